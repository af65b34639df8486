"""Combinations of keys that are each allowed and together impossible: the run would break, so it is not started.

Invariants:
- Only what would break a run is refused. What is merely slow is the report's to say, what needs the machine is `doctor`'s.
- No process is started, no file is read, nothing heavier than the schema is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import get_args, get_type_hints

from ..errors import ConfigError
from .algorithm import (
    REFILLABLE,
    SELF_CORRECTING,
    Gae,
    KlInLoss,
    Masked,
    NoCorrection,
    Rejected,
    Truncated,
    needs_critic,
    needs_reference,
)
from .backends import Fsdp2, Megatron, copy_ranks
from .reward import FIELDS, Judge, ModelReward, fields_of
from .schema import NO_FAULTS, Agent, Config, Fake, Fault, Mixture, PythonEnv, ReasoningGym, parse_memory, parse_size

BF16_NOISE = 0.05
"""Nats by which log-probs of equal bfloat16 weights differ between implementations, at least now and then."""

BUILT_IN_AGENTS = ("tool_calling", "single_turn")
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PART_NAME = re.compile(r"[\w-]+")


def check(config: Config) -> None:
    """Raises ConfigError with the first impossible combination, naming its keys and what is allowed."""
    for problem in _problems(config):
        raise ConfigError(problem)


def meaningless(fault: Fault) -> str | None:
    """What is wrong with a fault that cannot happen, and what can happen in its place; None when it can."""
    if (fault.at, fault.do) not in NO_FAULTS:
        return None
    deeds = get_args(get_type_hints(Fault)["do"])
    allowed = ", ".join(do for do in deeds if (fault.at, do) not in NO_FAULTS)
    return f"do={fault.do} means nothing at={fault.at}; allowed there are {allowed}"


def _problems(config: Config) -> Iterator[str]:
    yield from _episode(config)
    yield from _batch(config)
    yield from _correction(config)
    yield from _kl(config)
    yield from _optimizer(config)
    yield from _backend(config)
    yield from _layout(config)
    yield from _placed(config)
    yield from _reward(config)
    if config.model.dtype == "bfloat16" and config.weightsync.canary_tolerance < BF16_NOISE:
        yield (
            f"weightsync.canary_tolerance={config.weightsync.canary_tolerance:g} with model.dtype=bfloat16 would refuse "
            "pushes that arrived: learner and engine differ by up to 0.1 nats there; "
            f"allowed is {BF16_NOISE:g} and more, 0.2 is usual"
        )
    if config.launch.hosts == "many" and config.launch.kind != "ray":
        yield "launch.hosts=many needs launch.kind=ray; the local launcher knows one host"
    if config.weightsync.transport == "shared" and config.launch.hosts == "many":
        yield (
            "weightsync.transport=shared is one copy in the memory of one host, and launch.hosts=many spreads replicas over many; "
            "allowed there are broadcast, disk and delta"
        )
    parse_size("buffer.keep", config.buffer.keep)
    parse_size("weightsync.bucket", config.weightsync.bucket)
    parse_memory(config.rollout.engine.memory)
    if isinstance(config.rollout.engine, Fake):
        for number, fault in enumerate(config.rollout.engine.faults):
            if problem := meaningless(fault):
                yield f"rollout.engine.faults[{number}]: {problem}"
    for key, text in (("run.dir", config.run.dir), ("model.path", config.model.path), ("sft.out", config.sft.out)):
        if not text.strip():
            yield f"{key}: must not be empty"
    if len(set(config.monitor.trackers)) < len(config.monitor.trackers):
        yield f"monitor.trackers: {', '.join(config.monitor.trackers)} names a tracker twice"


def _episode(config: Config) -> Iterator[str]:
    agent, env = config.agent, config.env
    if agent.kind not in BUILT_IN_AGENTS and not _PYTHON_NAME.fullmatch(agent.kind):
        yield f"agent.kind: {agent.kind!r} is neither of {', '.join(BUILT_IN_AGENTS)}, nor of the form package.module:coroutine"
    if isinstance(env, Mixture) and not env.parts:
        yield "env.parts: a mixture needs at least one environment, for example {sums: {kind: reasoning_gym, share: 2}}"
    parts = {f"env.parts.{name}": p for name, p in env.parts.items()} if isinstance(env, Mixture) else {"env": env}
    for key, part in parts.items():
        yield from _environment(key, part, agent)
    if agent.max_tokens_per_turn > agent.max_tokens:
        yield (
            f"agent.max_tokens_per_turn={agent.max_tokens_per_turn} is more than agent.max_tokens={agent.max_tokens}, "
            f"the context of a whole episode; allowed are 1 to {agent.max_tokens}"
        )


def _environment(key: str, env: ReasoningGym | PythonEnv, agent: Agent) -> Iterator[str]:
    if key != "env" and not _PART_NAME.fullmatch(key.removeprefix("env.parts.")):
        yield f"{key}: a name of a part consists of letters, digits, _ and -"
    if isinstance(env, PythonEnv) and not _PYTHON_NAME.fullmatch(env.factory):
        yield f"{key}.factory: {env.factory!r} is not of the form package.module:Name"
    if agent.kind == "single_turn" and isinstance(env, ReasoningGym) and env.calculator:
        yield (
            f"agent.kind=single_turn answers once and cannot call the tool of {key}.calculator=true; "
            f"set {key}.calculator=false, or agent.kind=tool_calling"
        )


def _batch(config: Config) -> Iterator[str]:
    buffer, algorithm, rollout = config.buffer, config.learner.algorithm, config.rollout
    if algorithm.minibatches > buffer.groups_per_batch:
        yield (
            f"learner.algorithm.minibatches={algorithm.minibatches} is more than buffer.groups_per_batch="
            f"{buffer.groups_per_batch}: there would be steps of less than a group; allowed are 1 to {buffer.groups_per_batch}"
        )
    if buffer.min_members and not 2 <= buffer.min_members <= buffer.group_size:
        yield (
            f"buffer.min_members={buffer.min_members}: allowed are 0, which waits for all, and 2 to "
            f"buffer.group_size={buffer.group_size}"
        )
    if buffer.dynamic_sampling and not isinstance(algorithm.advantage, REFILLABLE):
        kinds = ", ".join(str(section.__struct_config__.tag) for section in REFILLABLE)
        yield (
            "buffer.dynamic_sampling=true would discard groups that teach: "
            f"learner.algorithm.advantage.kind={algorithm.advantage.__struct_config__.tag} learns from groups of equal rewards, "
            f"too; allowed with it are {kinds}"
        )
    if algorithm.overlong >= config.agent.max_tokens:
        yield (
            f"learner.algorithm.overlong={algorithm.overlong} leaves no length unpunished: it is a part of agent.max_tokens="
            f"{config.agent.max_tokens}; allowed are 0 to {config.agent.max_tokens - 1}"
        )
    waits = "buffer.max_staleness=0" if buffer.max_staleness == 0 else "buffer.on_deadline=wait"
    longest, keys = rollout.episode_s, f"rollout.episode_s={rollout.episode_s:g}"
    if isinstance(config.reward, ModelReward):  # asked when the episode is over
        longest, keys = longest + config.reward.request_s, f"{keys} + reward.request_s={config.reward.request_s:g}"
    if (buffer.max_staleness == 0 or buffer.on_deadline == "wait") and config.learner.batch_s < longest:
        yield (
            f"with {waits} the learner waits for the slowest episode, but learner.batch_s={config.learner.batch_s:g} is less "
            f"than {keys}; allowed is learner.batch_s >= {longest:g}"
        )


def _correction(config: Config) -> Iterator[str]:
    algorithm, staleness = config.learner.algorithm, config.buffer.max_staleness
    loss, correction = algorithm.loss, algorithm.correction
    key, kind = "learner.algorithm.correction", loss.__struct_config__.tag
    own = ", ".join(str(section.__struct_config__.tag) for section in SELF_CORRECTING)
    refused = isinstance(correction, NoCorrection) and not correction.biased
    if refused and staleness > 0 and not isinstance(loss, SELF_CORRECTING):
        yield (
            f"{key}.kind=none with buffer.max_staleness={staleness}: learner.algorithm.loss.kind={kind} would take tokens of "
            f"older policies for the learner's own; set {key}.kind to auto, truncated, masked or rejected, or "
            f"learner.algorithm.loss.kind to one that corrects by itself ({own}), or buffer.max_staleness=0; "
            f"an ablation sets {key}.biased=true"
        )
    if isinstance(correction, Truncated) and isinstance(loss, SELF_CORRECTING):
        yield (
            f"{key}.kind=truncated would weigh tokens twice: the ratio of learner.algorithm.loss.kind={kind} is to the policy "
            "that sampled and holds the weight; allowed with it are auto, none, masked and rejected"
        )
    if isinstance(correction, Masked | Rejected) and not correction.low < 1 < correction.high:
        yield (
            f"{key}.low={correction.low:g} and {key}.high={correction.high:g} leave no loss to tokens of the learner's own policy, "
            "whose weight is 1; allowed are a low below 1 and a high above 1"
        )


def _kl(config: Config) -> Iterator[str]:
    kl = config.learner.algorithm.kl
    if isinstance(kl, KlInLoss) and kl.estimator == "k1":
        yield (
            "learner.algorithm.kl.estimator=k1 with kl.kind=loss: its gradient is 0 on average and holds the policy nowhere; "
            "allowed there are k2 and k3"
        )


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if not isinstance(reward, ModelReward):
        return
    parse_memory(reward.memory, "reward.memory")
    if not reward.path.strip():
        yield "reward.path: must not be empty"
    if reward.weight == 0:
        yield "reward.weight: 0 asks a model for nothing; allowed are other numbers, or reward.kind=environment"
    if not isinstance(reward, Judge):
        return
    named = fields_of(reward.template)
    for name in named:
        if name not in FIELDS:
            yield f"reward.template: {{{name}}} is unknown; allowed are {', '.join(f'{{{field}}}' for field in FIELDS)}"
    if not {"answer", "conversation"} & set(named):
        yield "reward.template: the judge is not shown what the policy said; name {answer} or {conversation}"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.learner.optimizer
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        if beta == 1.0:
            yield f"learner.optimizer.{name}: 1 never forgets and divides by zero; allowed are 0 up to, but not, 1"


def _backend(config: Config) -> Iterator[str]:
    backend = config.learner.backend
    if isinstance(backend, Fsdp2) and backend.ranks % backend.context_parallel:
        yield (
            f"learner.backend.context_parallel={backend.context_parallel} does not divide learner.backend.ranks={backend.ranks}: "
            "some ranks would have no row to share; allowed are divisors of ranks"
        )
    if isinstance(backend, Fsdp2) and backend.offload and backend.device == "cpu":
        yield (
            "learner.backend.offload=true keeps what a GPU does not need right now in the host's memory; "
            "allowed with learner.backend.device=cpu is false"
        )
    if isinstance(backend, Fsdp2) and backend.liger and backend.device == "cpu":
        yield "learner.backend.liger=true takes kernels for CUDA; allowed with learner.backend.device=cpu is false"


def _layout(config: Config) -> Iterator[str]:
    backend, key = config.learner.backend, "learner.backend"
    if not isinstance(backend, Megatron):
        return
    split = copy_ranks(backend)
    if backend.ranks % split:
        yield (
            f"{key}.ranks={backend.ranks}: {key}.tensor_parallel={backend.tensor_parallel}, pipeline_parallel="
            f"{backend.pipeline_parallel} and context_parallel={backend.context_parallel} split one copy of the model over {split} "
            f"ranks; allowed are multiples of {split}"
        )
    elif backend.ranks // backend.pipeline_parallel % backend.expert_parallel:
        stage = backend.ranks // backend.pipeline_parallel
        yield (
            f"{key}.expert_parallel={backend.expert_parallel}: a stage of the pipeline has {stage} ranks; "
            f"allowed are divisors of {stage}"
        )
    if backend.virtual_stages > 1 and backend.pipeline_parallel == 1:
        yield (
            f"{key}.virtual_stages={backend.virtual_stages} with {key}.pipeline_parallel=1: there are no stages; allowed is 1, "
            "or a pipeline_parallel of 2 and more"
        )


def _placed(config: Config) -> Iterator[str]:
    """Models beside the policy in processes of their own."""
    learner = config.learner
    algorithm, beside, key = learner.algorithm, learner.beside, "learner.algorithm"
    if beside["reference"] and not needs_reference(algorithm):
        yield (
            f"learner.beside.reference={beside['reference']}: this algorithm has no reference policy; allowed are 0, or "
            f"{key}.kl.kind of loss or reward, or {key}.advantage.kind=prime"
        )
    if beside["critic"] and not needs_critic(algorithm):
        yield (
            f"learner.beside.critic={beside['critic']}: no model learns beside the policy in this algorithm; allowed are 0, or "
            f"{key}.advantage.kind of gae or prime"
        )
    unit = copy_ranks(learner.backend)
    if isinstance(learner.backend, Megatron):
        unit = math.lcm(unit, learner.backend.pipeline_parallel * learner.backend.expert_parallel)
    for kind, ranks in beside.items():
        whole = kind == "critic" and isinstance(algorithm.advantage, Gae)  # it is not split as the policy is
        if ranks > 1 and ranks % unit and not whole:
            yield (
                f"learner.beside.{kind}={ranks}: learner.backend splits a model, and with it this one, over {unit} ranks; "
                f"allowed are 0, 1, which holds it whole, and multiples of {unit}"
            )
