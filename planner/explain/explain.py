"""`slipstream explain`: from the folder of a run to what to change in it.

    rows ──> alerts ──any but an idle side──> mend that first
                └──none──> profile, evidence ──> suspicions of the rules ──> gains by simulation ──> findings

Invariants:
- Alarms first: findings are told only while no alert is active, but those of an idle side, which findings are the answer to.
- A change is offered only where the run's own config takes it.
- Findings are in the order of what they cost: warnings, then what is free, then devices, then age; by gain among these.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ...configs import Config, changed
from ...errors import ConfigError, StateError
from ...monitor.alerts import ALERTS, Alert, AlertBook, read_alerts, unseen_in_rows
from ..closed_form import estimate
from ..fit import LEAST_STEPS, fit_profile, resume_command
from ..plan import SimulationPlan
from ..profile import RunProfile
from ..records import RunRecords
from .evidence import Evidence, Hardware, read_evidence
from .findings import Candidate, Explanation, Finding, Suspicion, overrides_in
from .gains import MISSED, GainSimulator, finding_of
from .rules import suspicions

IDLE_ALERTS = {"learner_idle", "rollout_idle"}
COSTS = ("free", "devices", "age")


def explain(folder: Path, hardware: Hardware, *, active: bool) -> Explanation:
    """What is wrong with the run in `folder`, and what to change. `active` where it goes on now.

    Raises:
        ConfigError: there is no run. StoreError: a file of it is damaged.
    """
    run = RunRecords(folder, active=active)
    alerts = tuple(active_alerts(run, active=active))
    if any(alert.rule not in IDLE_ALERTS for alert in alerts):
        return Explanation(
            run=str(folder),
            active=active,
            alerts=alerts,
            note="advice on speed follows when no alert is active any more",
        )
    needed = run.settling + LEAST_STEPS
    if (steps := len(run.in_force)) < needed:
        note = f"{steps} steps so far: what to change is said from {needed} on"
        note += "" if active else f"; {resume_command(run, needed)} continues the run"
        return Explanation(run=str(folder), active=active, alerts=alerts, note=note)
    try:
        profile = fit_profile(run)
    except (ConfigError, StateError) as error:  # an environment was not played yet, or no batch is ever full
        return Explanation(run=str(folder), active=active, alerts=alerts, note=str(error))
    measured = profile.measured
    assert measured is not None  # it is of a run
    evidence = read_evidence(run, profile, measured, hardware)
    findings, missed, note = find(profile, evidence)
    return Explanation(
        run=str(folder),
        active=active,
        alerts=alerts,
        findings=tuple(findings),
        steps=evidence.steps,
        measured=measured,
        missed=missed,
        note=note,
    )


def active_alerts(run: RunRecords, *, active: bool) -> list[Alert]:
    """By the rules on the rows; of what no row shows, while the run goes on, what its supervisor wrote last. Raises StoreError."""
    book = AlertBook(run.config)
    for row in run.rows:
        book.observe(row)
    seen = unseen_in_rows(read_alerts(run.folder / ALERTS)) if active else []
    found = sorted((*seen, *book.active.values()), key=lambda alert: alert.severity != "critical")
    # Their advice is to look here.
    return [msgspec.structs.replace(one, advice="") if one.rule in IDLE_ALERTS else one for one in found]


def find(profile: RunProfile, evidence: Evidence) -> tuple[list[Finding], float | None, str]:
    """The findings in their order, by how much the simulation misses the run's cycle, and why no gain is claimed. Pure."""
    plan = SimulationPlan.of(profile)
    every = (possible(one, evidence.config) for one in suspicions(evidence, plan, estimate(plan)))
    suspected = [one for one in every if one.candidates or one.otherwise]
    if not suspected:
        return [], None, ""
    try:
        simulator = GainSimulator(profile, sum(len(one.candidates) for one in suspected))
    except StateError as error:
        return in_order(_unproved(suspected)), None, f"no gain is claimed: {error}"
    if abs(simulator.missed) > MISSED:
        note = (
            f"no gain is claimed: the simulation of the run itself misses its cycle by {100 * simulator.missed:+.0f} %"
        )
        return in_order(_unproved(suspected)), simulator.missed, note
    judged = (simulator.judge(one) for one in suspected)
    return in_order(one for one in judged if one is not None), simulator.missed, ""


def possible(suspicion: Suspicion, config: Config) -> Suspicion:
    """Without the candidates that the run's own config refuses."""

    def allowed(candidate: Candidate) -> bool:
        try:
            changed(config, overrides_in(candidate.change))
        except ConfigError:
            return False
        return True

    return msgspec.structs.replace(suspicion, candidates=tuple(filter(allowed, suspicion.candidates)))


def _unproved(suspected: Iterable[Suspicion]) -> Iterable[Finding]:
    """Without simulation; that a bound may be lowered at no price is nothing but a simulation's word."""
    for one in suspected:
        if one.aim != "staleness":
            yield finding_of(one, one.candidates[0] if one.candidates else None)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    def key(one: Finding) -> tuple[bool, int, float]:
        gain = one.gain.trained_tokens_per_s.mean if one.gain else 0.0
        return one.severity != "warning", COSTS.index(one.cost), -gain

    return sorted(findings, key=key)
