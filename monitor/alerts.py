"""Alerts: what is wrong with a run, by rules on the rows of its steps. Pure.

    row ──> each rule: bad, good, or neither ──> `attack` bad rows in a row: it fires ──> `release` good ones: it is over

Invariants:
- No alert flaps: between what is bad and what is good there is a gap, and both must last.
- A rule says nothing of a row that lacks its numbers; such a row neither fires an alert nor ends it.
- What happens outside of steps (none comes, the disk fills) is set by whoever sees it.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..common.outcomes import WARN_SHARE, failed_share, failures_text
from ..configs import Config
from ..errors import StoreError
from .metrics import Row
from .series import CYCLE, of_policy, total
from .text import count, duration, share

ALERTS = "alerts.jsonl"  # in the folder of a run: each alert as it fires, and as it ends
Severity = Literal["critical", "warning"]
NO_STEP, DISK, FALSE_REPLIES = "no_step", "disk", "false_replies"
UNSEEN: dict[str, Severity] = {NO_STEP: "critical", DISK: "critical", FALSE_REPLIES: "warning"}
"""The alerts that no row shows, and how severe they are."""

SMOOTH = 5  # rows that a mean is over
IDLE_ROWS = 10  # rows over which a side is idle
KEPT = 20  # newest rows that rules see
SETTLING = 3  # steps beyond the bound until a run has filled up: they say nothing of its speed
ERRORS, DROP = 4.0, 0.2  # a reward has collapsed when it is so many standard errors, and this share, below its best
ENTROPY_LEFT = 0.2  # share of the entropy of the start below which a policy samples almost nothing new
BEST_ERRORS, BEST_DROP = 3.0, 0.15  # likewise, from which a reward is not at its best any more
LEAST_ESS = 0.5  # effective sample size below which most tokens count for nothing
MISMATCHED = 10.0  # times `weightsync.canary_tolerance` by which engine and learner may differ
GROWN = 2.0  # growth of that difference over `MEASURED` rows
MEASURED = 10
IDLE = 0.3  # share of the time
LEAST_ENDED = 10  # episodes below which a share of failures means nothing
TRUNCATED = 0.15  # growth of the share of truncated episodes since the start
SHORTER = 0.8  # trained tokens of an episode by generated ones below which long episodes are lost
DISK_S, DISK_OVER_S = 3600.0, 7200.0  # seconds until a disk is full: it fires below the first and ends above the second
DISK_WINDOW_S = 300.0  # over which the growth is measured: a checkpoint must not look like a trend


class Alert(msgspec.Struct, frozen=True):
    """A line of `alerts.jsonl`."""

    rule: str
    severity: Severity
    text: str  # what is wrong, with its numbers
    advice: str  # what to do, the end of a sentence: "lower ...", "see ..."
    step: int
    time: float  # seconds since the epoch
    active: bool = True  # False where it ends

    def __str__(self) -> str:
        said = f"{self.text}: {self.advice}" if self.advice else self.text
        return said if self.active else f"over: {self.text}"


class Verdict(msgspec.Struct, frozen=True):
    """What a rule says of the newest row. Neither bad nor good is in the gap."""

    bad: bool
    good: bool
    text: str


class RunHistory:
    """What rules know: the newest rows, how the run began, and the best that its reward was."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rows: deque[Row] = deque(maxlen=KEPT)
        self.first: list[Row] = []  # the first `SMOOTH` in which the policy was stepped
        self.number = 0  # of rows
        self.best: float | None = None  # of the means of `SMOOTH` rewards
        self.measured: deque[float] = deque(maxlen=MEASURED)  # the newest differences of engine and learner

    def add(self, row: Row) -> None:
        self.number += 1
        self.rows.append(row)
        if len(self.first) < SMOOTH:
            self.first += of_policy([row])
        if row.get("mismatch_max") is not None:
            self.measured.append(row["mismatch_max"])
        if (reward := self.mean("reward_mean")) is not None:
            self.best = reward if self.best is None else max(self.best, reward)

    def newest(self, rows: int) -> list[Row]:
        return list(self.rows)[-rows:]

    def mean(self, name: str) -> float | None:
        """Over the newest `SMOOTH` rows, None where one lacks it."""
        return mean_of(self.newest(SMOOTH), name)

    @property
    def settled(self) -> int:
        """Rows since the run filled up."""
        return self.number - self.config.buffer.max_staleness - SETTLING

    @property
    def reward_error(self) -> float | None:
        """Standard error of the mean reward of `SMOOTH` rows; members of a group count as one, because they have one task."""
        rows = self.newest(SMOOTH)
        if any(row.get("reward_std") is None or not row.get("groups") for row in rows):
            return None
        return math.sqrt(sum(row["reward_std"] ** 2 / row["groups"] for row in rows)) / max(1, len(rows))


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """None with fewer than `SMOOTH` rows, or where one lacks it."""
    values = [row.get(name) for row in rows]
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if len(found) == len(values) >= SMOOTH else None


# --- rules --------------------------------------------------------------------------------------------------------


def _reward_collapse(run: RunHistory) -> Verdict | None:
    now, error, best = run.mean("reward_mean"), run.reward_error, run.best
    if now is None or error is None or best is None:
        return None
    drop, limit = best - now, max(ERRORS * error, DROP * abs(best))
    text = f"the reward fell from {best:.3f} to {now:.3f} (means of {SMOOTH} steps)"
    return Verdict(drop > limit, drop < limit / 2, text)


def _entropy_collapse(run: RunHistory) -> Verdict | None:
    now, began, reward, best = run.mean("entropy"), mean_of(run.first, "entropy"), run.mean("reward_mean"), run.best
    if now is None or not began or reward is None or best is None:
        return None
    drop, limit = best - reward, max(BEST_ERRORS * (run.reward_error or 0.0), BEST_DROP * abs(best))
    text = (
        f"the entropy fell from {began:.3g} to {now:.3g} nats, and the reward {reward:.3f} is below its best {best:.3f}"
    )
    return Verdict(
        now < ENTROPY_LEFT * began and drop > limit, now > 1.5 * ENTROPY_LEFT * began or drop < limit / 2, text
    )


def _ratio_explosion(run: RunHistory) -> Verdict | None:
    ess = run.rows[-1].get("ess")
    if ess is None:
        return None
    text = f"the importance weights explode: only {share(ess)} of the trained tokens count (effective sample size)"
    return Verdict(ess < LEAST_ESS, ess > 1.2 * LEAST_ESS, text)


def _mismatch(run: RunHistory) -> Verdict | None:
    found, limit = run.rows[-1].get("mismatch_max"), MISMATCHED * run.config.weightsync.canary_tolerance
    if found is None:
        return None
    text = f"engines and learner differ by {found:.2g} nats on the same tokens and weights, allowed are {limit:.2g}"
    return Verdict(found > limit, found < limit / 2, text)


def _mismatch_growth(run: RunHistory) -> Verdict | None:
    if len(run.measured) < MEASURED or run.rows[-1].get("mismatch_max") is None:
        return None
    half = MEASURED // 2
    before, now = sum(list(run.measured)[:half]) / half, sum(list(run.measured)[half:]) / half
    text = (
        f"what engines and learner differ by grows, from {before:.2g} to {now:.2g} nats over {MEASURED} measured steps"
    )
    big = now > run.config.weightsync.canary_tolerance
    return Verdict(big and now > GROWN * before, not big or now < math.sqrt(GROWN) * before, text)


def _idle(run: RunHistory, wasted: str, whole: Sequence[str], text: str) -> Verdict | None:
    """Time-weighted, over the newest `IDLE_ROWS` rows since the run filled up. None where the sides take turns: each is idle by
    design."""
    if run.config.launch.colocated:
        return None
    rows = run.newest(IDLE_ROWS)
    seconds = sum(total(rows, name) for name in whole)
    if run.settled < IDLE_ROWS or seconds <= 0:
        return None
    idle = total(rows, wasted) / seconds
    return Verdict(idle > IDLE, idle < IDLE * 2 / 3, text.format(share(idle)))


def _learner_idle(run: RunHistory) -> Verdict | None:
    return _idle(
        run,
        "wait_s",
        CYCLE,
        f"the learner waited for batches for {{}} of the time of {IDLE_ROWS} steps",
    )


def _rollout_idle(run: RunHistory) -> Verdict | None:
    return _idle(
        run,
        "idle_slot_s",
        ("slot_s",),
        f"{{}} of the episode slots were empty over {IDLE_ROWS} steps, because no task was allowed to start",
    )


def _failures(run: RunHistory) -> Verdict | None:
    ended = Counter[str]()
    for row in run.newest(SMOOTH):
        ended.update(row.get("outcomes") or {})
    if ended.total() < LEAST_ENDED:
        return None
    failed = failed_share(ended)
    return Verdict(failed > WARN_SHARE, failed < WARN_SHARE / 2, failures_text(ended) or "no episode failed")


def _truncation(run: RunHistory) -> Verdict | None:
    now, began = run.mean("truncated"), mean_of(run.first, "truncated")
    if now is None or began is None:
        return None
    text = f"{share(now)} of the episodes reach a limit of tokens or turns, at the start it was {share(began)}"
    return Verdict(now - began > TRUNCATED, now - began < TRUNCATED * 2 / 3, text)


def _length_bias(run: RunHistory) -> Verdict | None:
    rows = of_policy(run.newest(KEPT))
    ended, trained = sum(sum((row.get("outcomes") or {}).values()) for row in rows), total(rows, "episodes")
    generated, kept_tokens = total(rows, "tokens_generated"), total(rows, "tokens_trained")
    if (
        run.config.buffer.filter != "none"
        or run.settled < KEPT
        or not (ended and trained and generated and kept_tokens)
    ):
        return None  # a filter leaves out episodes on purpose
    kept, all_ = kept_tokens / trained, generated / ended
    text = f"long episodes are lost: {count(kept)} tokens of an episode are trained on, {count(all_)} are generated"
    return Verdict(kept < SHORTER * all_, kept > (1 + SHORTER) / 2 * all_, text)


def _replicas_behind(run: RunHistory) -> Verdict | None:
    failed, took = run.rows[-1].get("replicas_failed"), run.rows[-1].get("replicas")
    if failed is None or took is None:
        return None
    return Verdict(failed > 0, failed == 0, f"{failed} of {failed + took} replicas do not take new weights")


def _unusable(run: RunHistory) -> Verdict | None:
    rows = run.newest(KEPT)
    if "batches_unusable" not in rows[-1]:
        return None
    counts = [row.get("batches_unusable") or 0 for row in rows]  # since the run began
    most, before = max(counts), min(counts) if len(counts) == KEPT else 0
    text = f"{most} batches of the run could not be trained on, groups of them were set aside"
    return Verdict(most > before, most == before, text)


class AlertRule(msgspec.Struct, frozen=True):
    name: str
    severity: Severity
    attack: int  # bad rows in a row until it fires
    release: int  # good rows in a row until it is over
    judge: Callable[[RunHistory], Verdict | None]
    advice: str


def alert_rules(config: Config) -> tuple[AlertRule, ...]:
    bound, run, quoted = config.buffer.max_staleness, config.run.dir, shlex.quote(config.run.dir)
    back = f"begin again from a checkpoint before it (`slipstream export {quoted} --step N`)"
    explain = f"`slipstream explain {quoted}` names what to change"
    workers, engines = f"the tracebacks are in {run}/logs/worker-*.log", f"see {run}/logs/engine-*.log"
    lower = "lower learner.optimizer.lr"
    longer = "raise agent.max_tokens_per_turn or agent.max_tokens, or set learner.algorithm.overlong"
    return (
        AlertRule("reward_collapse", "critical", bound + SMOOTH, 3, _reward_collapse, f"{lower} and {back}"),
        AlertRule("entropy_collapse", "critical", 3, 3, _entropy_collapse, f"{lower} and {back}"),
        AlertRule("ratio_explosion", "critical", 3, 3, _ratio_explosion, f"{lower} or buffer.max_staleness"),
        AlertRule("mismatch", "critical", 2, 3, _mismatch, f"the learner cannot trust their log-probs; {engines}"),
        AlertRule("mismatch_growth", "warning", 3, 3, _mismatch_growth, f"{engines}"),
        AlertRule("learner_idle", "warning", 1, 1, _learner_idle, explain),
        AlertRule("rollout_idle", "warning", 1, 1, _rollout_idle, explain),
        AlertRule("failures", "warning", 2, 3, _failures, f"mend that first, {workers}"),
        AlertRule("truncation", "warning", 3, 3, _truncation, longer),
        AlertRule("length_bias", "warning", 3, 3, _length_bias, f"`slipstream ledger {quoted}` says where they are"),
        AlertRule(
            "unusable_batches", "warning", 1, 1, _unusable, f"{run}/logs/learner-*.log and buffer*.log name the groups"
        ),
        AlertRule("replicas_behind", "warning", max(2, bound), 1, _replicas_behind, engines),
    )


def severities(config: Config) -> dict[str, Severity]:
    """Every rule that may fire -> how severe it is."""
    found: dict[str, Severity] = {rule.name: rule.severity for rule in alert_rules(config)}
    return found | UNSEEN


class AlertBook:
    """The alerts of a run: takes what happens, returns the alerts that fired and those that are over."""

    def __init__(self, config: Config) -> None:
        self.active: dict[str, Alert] = {}  # by rule, with the numbers of the newest row that was bad
        self._run = config.run.dir
        self._history = RunHistory(config)
        self._rules = alert_rules(config)
        self._bad: Counter[str] = Counter()  # rows in a row
        self._good: Counter[str] = Counter()

    def configure(self, config: Config) -> None:
        """Another config is in force: its bound and limits count from the next row on."""
        self._history.config, self._rules = config, alert_rules(config)

    def observe(self, row: Row) -> list[Alert]:
        """A step's row of `metrics.jsonl`."""
        self._history.add(row)
        step, time = int(row["step"]), float(row.get("time") or 0.0)
        changed = list[Alert]()
        for rule in self._rules:
            verdict = rule.judge(self._history)
            if verdict is None:
                continue
            self._bad[rule.name] = self._bad[rule.name] + 1 if verdict.bad else 0
            self._good[rule.name] = self._good[rule.name] + 1 if verdict.good else 0
            alert = Alert(rule.name, rule.severity, verdict.text, rule.advice, step, time)
            if rule.name in self.active:
                if verdict.bad:
                    began = self.active[rule.name]
                    self.active[rule.name] = msgspec.structs.replace(began, text=verdict.text)
                elif self._good[rule.name] >= rule.release:
                    over = self.active.pop(rule.name)
                    changed.append(msgspec.structs.replace(over, step=step, time=time, active=False))
            elif self._bad[rule.name] >= rule.attack:
                self.active[rule.name] = alert
                changed.append(alert)
        return changed

    def set(self, rule: str, text: str, time: float) -> list[Alert]:
        """What no row shows: the rule of `UNSEEN` is as `text` says, or over where there is none."""
        step = int(self._history.rows[-1]["step"]) if self._history.rows else 0
        began = self.active.pop(rule, None)
        if not text:
            return [] if began is None else [msgspec.structs.replace(began, step=step, time=time, active=False)]
        advice = {
            NO_STEP: f"`slipstream waits {shlex.quote(self._run)}` says who waits for whom",
            DISK: "free some, or lower buffer.keep or learner.checkpoint_keep",
            FALSE_REPLIES: f"its hardware or its server is broken, see {self._run}/logs/engine-*.log",
        }[rule]
        alert = Alert(rule, UNSEEN[rule], text, advice, began.step if began else step, began.time if began else time)
        self.active[rule] = alert
        return [] if began else [alert]


class DiskForecast:
    """When a disk is full, by how its free space shrank over the last `DISK_WINDOW_S`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._fired = False

    def observe(self, time: float, free: int) -> str:
        """What is wrong now, with `free` bytes; empty where nothing is."""
        samples = self._samples
        samples.append((time, free))
        while len(samples) > 1 and samples[1][0] <= time - DISK_WINDOW_S:
            samples.popleft()
        seconds, lost = time - samples[0][0], samples[0][1] - free
        left_s = free * seconds / lost if lost > 0 and seconds >= DISK_WINDOW_S else math.inf
        self._fired = left_s < (DISK_OVER_S if self._fired else DISK_S)
        return f"the disk of the run is full in {duration(left_s)}, {free >> 20} MiB are free" if self._fired else ""


def read_alerts(path: Path) -> list[Alert]:
    """Every line in its order; empty where there is no file. A last line that a crash tore is left out. Raises StoreError naming a
    complete line that is no alert."""
    if not path.is_file():
        return []
    found = list[Alert]()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            found.append(msgspec.json.decode(line, type=Alert))
        except msgspec.MsgspecError as error:
            raise StoreError(f"{path}, line {number}: not an alert: {error}") from None
    return found


def unseen_in_rows(alerts: Sequence[Alert]) -> list[Alert]:
    """Those of `UNSEEN` that are active after `alerts`, the lines of a run's file."""
    last = {alert.rule: alert for alert in alerts}
    return [last[rule] for rule in UNSEEN if rule in last and last[rule].active]
