"""A run folder whose times are known: a simulated run that writes the files of a real one, by the product's store and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from slipstream.buffer.encoded import DeliveredTrajectory, EncodedTrajectory
from slipstream.buffer.store import Store, WriteBatch
from slipstream.buffer.trajectory import FINISHED, Trajectory, Turn, VersionSpan
from slipstream.common.spans import Id, Span
from slipstream.configs import Config, dump, load
from slipstream.monitor.metrics import METRICS, MetricsWriter
from slipstream.monitor.timeline import SPANS
from slipstream.planner.engine import SimulatedReplica, SimulatedRequest
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import RunProfile, text_of
from slipstream.planner.run import SimulatedRun
from slipstream.planner.worker import PlayedEpisode, SimulatedWorker

EPOCH = 1.7e9  # when the virtual clock began


class ProgressLog:
    """Progress of a replica over time, from which the time of any token follows. `submitted`: request -> when."""

    def __init__(self, replica: SimulatedReplica, clock: Any) -> None:
        self.submitted: dict[SimulatedRequest, float] = {}
        self._times, self._progress = [0.0], [0.0]
        processor, submit = replica._processor, replica.submit
        settle = processor.settle

        def settled() -> None:
            settle()
            self._times.append(clock.now)
            self._progress.append(processor.progress)

        def submitted(request: SimulatedRequest) -> None:
            self.submitted[request] = clock.now
            submit(request)

        setattr(processor, "settle", settled)  # noqa: B010
        setattr(replica, "submit", submitted)  # noqa: B010

    def time_of(self, progress: float) -> float:
        return float(np.interp(progress, self._progress, self._times))


def trajectory_of(episode: PlayedEpisode, started: float, turns: list[Turn]) -> Trajectory:
    """As a worker would deliver it: its turns, and its tokens by version in the order of the versions."""
    versions = [version for version, tokens in sorted(episode.generated.items()) for _ in range(tokens)]
    mask, spans, placed = list[bool](), list[VersionSpan](), list[Turn]()
    for turn, times in zip(episode.shape.turns, turns, strict=True):
        mask += [False] * turn.prompt
        placed.append(msgspec.structs.replace(times, start=len(mask), end=len(mask) + turn.sampled))
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
        turns=tuple(placed),
        reward=episode.shape.reward,
        turn_rewards=(episode.shape.reward,),
        outcome=FINISHED,
        timings={"total": episode.ended - episode.began, "environment": episode.shape.environment_s},
        started=started,
        token_ids=np.zeros(tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(tokens, dtype=np.float32),
        loss_mask=np.array(mask),
    )


def config_of(profile: RunProfile, *overrides: str) -> Config:
    """The quickstart with the settings of a profile, and with overrides."""
    return load("quickstart", [*(f"{key}={text_of(value)}" for key, value in profile.settings.items()), *overrides])


class RecordedRun(SimulatedRun):
    """Writes `buffer.sqlite`, `metrics.jsonl`, `config.yaml` (with `overrides`) and, with `times`, the times of turns and `spans/`
    into `folder`."""

    def __init__(
        self, profile: RunProfile, folder: Path, seed: int = 0, *, times: bool = True, overrides: Sequence[str] = ()
    ) -> None:
        super().__init__(SimulationPlan.of(profile), seed)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config_of(profile, *overrides)))
        self._folder, self._times = folder, times
        self._store = Store(folder / "buffer.sqlite")
        self._metrics = MetricsWriter(folder / METRICS)
        self._new: list[DeliveredTrajectory] = []
        self._spans: dict[str, list[Span]] = {}
        self._logs = {replica: ProgressLog(replica, self._clock) for replica in self._fleet.replicas}
        self._turns: dict[str, list[Turn]] = {}
        for worker in self._workers:
            self._record_turns(worker)
        leases = self.replay.leases
        for owner, name in ((leases, "grant"), (leases, "deliver"), (self.replay, "take")):
            setattr(owner, name, self._at_its_time(getattr(owner, name)))
        commit = self.replay.commit

        def committed(version: int) -> None:
            commit(version)
            self._save()  # a simulation drains what has changed

        setattr(self.replay, "commit", committed)  # noqa: B010

    def record(self, steps: int) -> None:
        result = self.run(steps)
        self._store.close()
        for number, sample in enumerate(result.samples, start=1):
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
                    "tokens_generated": sample.generated,
                    "learner_tokens_per_s": sample.context / sample.step_s,
                    "slot_s": sample.slot_s,
                    "idle_slot_s": sample.idle_slot_s,
                    "replicas": self.plan.replicas,
                }
            )
        self._metrics.close()
        if self._times:
            (self._folder / SPANS).mkdir()
            for role, spans in self._spans.items():
                lines = (msgspec.json.encode(span) + b"\n" for span in spans)
                (self._folder / SPANS / f"{role}.1.jsonl").write_bytes(b"".join(lines))

    def _at_its_time(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """As the buffer's service, which sets the time of its table before every round."""

        def timed(*arguments: Any) -> Any:
            self.replay.table.time = EPOCH + self._clock.now
            return call(*arguments)

        return timed

    def _record(self, role: str, t0: float, t1: float, what: str, **ids: Id) -> None:
        self._spans.setdefault(role, []).append(Span(EPOCH + t0, EPOCH + t1, what, ids))

    def _record_turns(self, worker: SimulatedWorker) -> None:
        router, completed, clock = worker._router, worker._completed, self._clock
        send, asked = router.send, dict[SimulatedRequest, float]()

        def sent(episode: str, request: SimulatedRequest, oldest_version: int) -> None:
            asked[request] = clock.now
            send(episode, request, oldest_version)

        def arrived(episode: PlayedEpisode, request: SimulatedRequest) -> None:
            assert request.replica is not None
            log, began = self._logs[request.replica], asked.pop(request)
            queued_s = log.submitted[request] - began
            first_s = log.time_of(request.began + 1) - log.submitted[request]
            decode_s = clock.now - began - queued_s - first_s
            cached, name = min(request.cached, request.context - 1), request.replica.name
            turn = Turn(0, 0, "stop", EPOCH + began, queued_s, first_s, decode_s, cached, name)
            self._turns.setdefault(episode.id, []).append(turn if self._times else Turn(0, 0, "stop"))
            self._record(
                worker._name,
                began,
                clock.now,
                "turn",
                episode=episode.id,
                replica=name,
                prompt=request.context,
                cached=cached,
                tokens=request.sampled_tokens,
                queued_s=queued_s,
                first_s=first_s,
            )
            completed(episode, request)

        setattr(router, "send", sent)  # noqa: B010
        setattr(worker, "_completed", arrived)  # noqa: B010

    def _delivered(self, episode: PlayedEpisode, kept: bool) -> None:
        turns = self._turns.pop(episode.id, [])
        if kept:
            started = EPOCH + episode.began if self._times else 0.0
            trajectory = trajectory_of(episode, started, turns)
            trajectory.check()
            self._new.append(DeliveredTrajectory.of(episode.id, trajectory, EncodedTrajectory.of(trajectory)))
        super()._delivered(episode, kept)

    def _take(self) -> None:
        asked, version = self._asked_at, self.replay.version
        super()._take()
        if asked is not None and self._asked_at is None:
            self._record("learner-0", asked, self._clock.now + self.plan.take_s, "take", version=version)

    def _save(self) -> None:
        drained = self.replay.table.drain()
        self._store.save(WriteBatch.of(self.replay.table.counters, drained, self._new))
        self._new = []

    def _commit(self) -> None:
        self._save()
        super()._commit()
        plan, now, version = self.plan, self._clock.now, self.replay.version
        for index in range(plan.cohorts):
            begins = now + plan.once_s + index * plan.cohort_s
            names = [r.name for r in self._fleet.replicas[index * plan.cohort : (index + 1) * plan.cohort]]
            ends = begins + plan.cohort_s
            served = ends - plan.canary_s
            pauses = served - plan.pause_s
            self._record("learner-0", begins, pauses, "stage", version=version, replicas=", ".join(names))
            for name in names:
                self._record("learner-0", pauses, served, "pause", version=version, replica=name)
                self._record("learner-0", served, ends, "canary", version=version, replica=name)
        self._record("learner-0", now, now + plan.push_s, "publish", version=version)

    def _on_served(self) -> None:
        self._save()
        super()._on_served()
