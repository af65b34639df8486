"""A run folder whose times are known: a simulated run that writes the files of a real one, by the product's store and metrics."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from slipstream.buffer.store import NewTrajectory, Store, WriteBatch
from slipstream.buffer.trajectory import FINISHED, EncodedTrajectory, Trajectory, Turn, VersionSpan
from slipstream.configs import dump
from slipstream.monitor.metrics import METRICS, MetricsWriter
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import RunProfile
from slipstream.planner.run import SimulatedRun
from slipstream.planner.worker import PlayedEpisode


def trajectory_of(episode: PlayedEpisode, total_s: float) -> Trajectory:
    """As a worker would deliver it: its turns, and its tokens by version in the order of the versions."""
    versions = [version for version, tokens in sorted(episode.generated.items()) for _ in range(tokens)]
    mask, spans, turns = list[bool](), list[VersionSpan](), list[Turn]()
    for turn in episode.shape.turns:
        mask += [False] * turn.prompt
        turns.append(Turn(len(mask), len(mask) + turn.sampled, "stop"))
        for version in versions[: turn.sampled]:
            if spans and spans[-1].version == version and spans[-1].end == len(mask):
                spans[-1] = VersionSpan(spans[-1].start, len(mask) + 1, version)
            else:
                spans.append(VersionSpan(len(mask), len(mask) + 1, version))
            mask.append(True)
        versions = versions[turn.sampled :]
    tokens = len(mask)
    return Trajectory(
        id=f"{episode.id}.0",
        group_id=episode.group,
        member=int(episode.id.rpartition(".")[2]),
        branch=0,
        task_id="task",
        env="env",
        version_spans=tuple(spans),
        turns=tuple(turns),
        reward=episode.shape.reward,
        turn_rewards=(episode.shape.reward,),
        outcome=FINISHED,
        timings={"total": total_s, "environment": episode.shape.environment_s},
        token_ids=np.zeros(tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(tokens, dtype=np.float32),
        loss_mask=np.array(mask),
    )


class RecordedRun(SimulatedRun):
    """Writes `buffer.sqlite`, `metrics.jsonl` and `config.yaml` into `folder`."""

    def __init__(self, profile: RunProfile, folder: Path, seed: int = 0) -> None:
        super().__init__(SimulationPlan.of(profile), seed)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(profile.config([])))
        self._store = Store(folder / "buffer.sqlite")
        self._metrics = MetricsWriter(folder / METRICS)
        self._new: list[NewTrajectory] = []

    def record(self, steps: int) -> None:
        result = self.run(steps)
        self._store.close()
        for number, sample in enumerate(result.samples, start=1):
            slots = sample.slot_s / sample.total_s
            self._metrics.append(
                {
                    "step": number,
                    "version": number,
                    "time": time.time(),
                    "wait_s": sample.wait_s,
                    "step_s": sample.step_s,
                    "push_s": sample.push_s,
                    "pause_ms": 1e3 * self.plan.pause_s,
                    "staleness_tokens": {str(lag): n for lag, n in sample.tokens_by_staleness.items()},
                    "tokens_withheld": sample.withheld,
                    "rollout_tokens_per_s": sample.generated / sample.total_s,
                    "learner_tokens_per_s": sample.context / sample.step_s,
                    "slots": slots,
                    "rollout_idle": sample.idle_slot_s / sample.slot_s if sample.slot_s else 0.0,
                    "replicas": self.plan.replicas,
                }
            )
        self._metrics.close()

    def _delivered(self, episode: PlayedEpisode, kept: bool) -> None:
        if kept:
            trajectory = trajectory_of(episode, episode.ended - episode.began)
            trajectory.check()
            self._new.append(NewTrajectory(episode.id, trajectory, EncodedTrajectory.of(trajectory)))
        super()._delivered(episode, kept)

    def _commit(self) -> None:
        drained = self.replay.table.drain()
        self._store.save(WriteBatch.of(self.replay.counters(), drained, self._new))
        self._new = []
        super()._commit()

    def _served(self) -> None:
        drained = self.replay.table.drain()
        self._store.save(WriteBatch.of(self.replay.counters(), drained, self._new))
        self._new = []
        super()._served()
