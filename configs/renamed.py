"""Config keys that earlier versions had, and what replaces each. An old key is refused with one line that names the new one."""

from __future__ import annotations

import re

RENAMED = {
    "learner.beside": "learner.aux_models",
    "learner.checkpoint": "learner.checkpoint_every and learner.checkpoint_keep",
    "learner.optimizer.beta1": "learner.optimizer.betas=[BETA1, BETA2]",
    "learner.optimizer.beta2": "learner.optimizer.betas=[BETA1, BETA2]",
    "learner.algorithm.advantage.lam_by_length": "learner.algorithm.advantage.lam.by_length=0.05",
    "learner.algorithm.advantage.critic_lam": "learner.algorithm.advantage.lam.critic",
    "learner.algorithm.advantage.critic_lr": "learner.algorithm.advantage.lr",
    "learner.algorithm.advantage.reward_lr": "learner.algorithm.advantage.lr",
    **{f"learner.algorithm.loss.clip_{one}": "learner.algorithm.loss.clip=[LOW, HIGH]" for one in ("low", "high")},
    "learner.algorithm.loss.share": "learner.algorithm.loss.held.share",
    "learner.algorithm.correction.biased": "learner.algorithm.correction.kind=uncorrected",
    **{
        f"learner.algorithm.correction.{one}": "learner.algorithm.correction.bounds=[LOW, HIGH]"
        for one in ("low", "high")
    },
    **{f"learner.algorithm.{one}": f"learner.algorithm.terms.{one}" for one in ("entropy", "imitation")},
    "learner.backend.context_parallel": "learner.backend.parallel.context",
    "learner.backend.tensor_parallel": "learner.backend.parallel.tensor",
    "learner.backend.pipeline_parallel": "learner.backend.parallel.pipeline",
    "learner.backend.virtual_stages": "learner.backend.parallel.virtual",
    "learner.backend.expert_parallel": "learner.backend.parallel.expert",
    **{f"learner.backend.{o}": f"learner.backend.options=[{o}]" for o in ("recompute", "compile", "offload", "liger")},
    "evaluation.keep_best": "evaluation.suites.NAME.keep_best=true",
    "buffer.lease_s": "launch.heartbeat_s, from which it follows",
    "rollout.sampling": "rollout.temperature and rollout.top_p",
    "rollout.request_s": "rollout.episode_s, from which it follows",
    "rollout.step_s": "rollout.episode_s, from which it follows",
    "rollout.tool_s": "rollout.episode_s, from which it follows",
    "rollout.engine.tensor_parallel": "rollout.engine.options.tensor_parallel_size",
    "rollout.engine.faults": "the environment variable SLIPSTREAM_FAULTS",
    "rollout.engine.python": "the environment variable SLIPSTREAM_SGLANG_PYTHON",
    "reward.weight": "reward.weights.model",
    "reward.environment": "reward.weights.environment",
    "reward.memory": "rollout.engine.memory, which the reward server gets, too",
    "reward.request_s": "rollout.episode_s, from which it follows",
    "weightsync.bucket": "nothing: it follows from the device",
    "weightsync.push_s": "rollout.episode_s, from which it follows",
    "launch.port": "launch.ports.first",
    "launch.hosts": "launch.kind=ray_cluster",
    "launch.stop_s": "launch.heartbeat_s, from which it follows",
    "monitor": "run.trackers, run.on_alert and launch.ports.metrics; TERM=dumb in the environment gives plain lines",
    "sft": "the overrides sft.KEY=VALUE of `slipstream sft`, or a file of its own with `extends:`",
}
"""Old key -> what to write in its place."""


def replacement_of(key: str) -> str | None:
    """What replaces an old key, None for a key that no version had. Parts of a mixture count as the environment itself."""
    return RENAMED.get(re.sub(r"^env\.parts\.[^.]+", "env", key))
