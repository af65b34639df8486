"""`slipstream chaos CONFIG --kills N --seed S`: a run whose processes are killed, stopped and kept from their disk, audited."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ..configs import load
from ..errors import ConfigError
from .chaos_audit import Check, audit
from .chaos_plan import make_plan

FORCED = ("learner.steps=1000000000", "launch.restarts=1000000", "evaluation.tasks=0", "monitor.live=false")
"""Overrides without which the run would end before the plan does."""


class Outcome(msgspec.Struct, frozen=True):
    """What `--json` prints.

    Attributes:
        plan: the faults, a line each.
        struck: those that were carried out, by kind.
        resumes: how often the run was continued after it had ended.
        steps: learner steps, repeated ones included.
        longest_s: longest time without a learner step while no fault lasted.
        checks: of the audit.
        problems: all that was found; empty where everything holds.
    """

    seed: int
    plan: tuple[str, ...]
    struck: dict[str, int]
    resumes: int
    steps: int
    longest_s: float
    checks: tuple[Check, ...]
    problems: tuple[str, ...]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `chaos` understands to its parser."""
    parser.add_argument(
        "--kills", type=int, default=20, metavar="N", help="SIGKILLs; a quarter as many stops come with them"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed makes the same plan")
    parser.add_argument(
        "--hang", type=float, default=180.0, metavar="SECONDS", help="longest time without a learner step"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def chaos(options: argparse.Namespace) -> int:
    """Torment and audit a run; returns the exit status, 1 where something does not hold."""
    from .chaos import Torment
    from .preflight import preflight

    overrides = [*options.overrides, *FORCED]
    config = load(options.config, overrides)
    run_dir = Path(config.run.dir).resolve()
    if options.kills < 0:
        raise ConfigError(f"--kills: {options.kills}; allowed are 0 and more")
    if config.launch.kind != "local":
        raise ConfigError("launch.kind: chaos reaches the processes of this host only; allowed here is local")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"run.dir: {config.run.dir} is not empty; name a new folder")
    preflight(config)
    plan = make_plan(config, options.kills, options.seed)
    console = Console(stderr=options.json, highlight=False, markup=False, soft_wrap=True)
    console.print(f"seed {options.seed}: {len(plan)} faults")
    for fault in plan:
        console.print(str(fault))
    console.print("now for real")
    told = Torment([options.config, *overrides], run_dir, options.hang, console.print).torment(plan)
    checks = (*audit(run_dir), _ledger(run_dir)) if (run_dir / "buffer.sqlite").exists() else ()
    problems = (*told.problems, *(f"{check.name}: {problem}" for check in checks for problem in check.problems))
    outcome = Outcome(
        options.seed,
        tuple(map(str, plan)),
        told.struck,
        told.resumes,
        told.steps,
        told.longest_s,
        checks,
        problems,
    )
    if options.json:
        sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
    else:
        console.print(_table(outcome))
        for problem in problems:
            console.print(f"PROBLEM {problem}")
    return 1 if problems else 0


def _ledger(run_dir: Path) -> Check:
    """What `slipstream ledger` says: code under audit, asked as well."""
    from .run import require_accounts

    accounts = require_accounts(run_dir)
    problems = () if accounts.closes else ("it does not close",)
    return Check("slipstream ledger says the same", accounts.total.generated, len(problems), problems)


def _table(outcome: Outcome) -> Table:
    done = ", ".join(f"{n} {kind}s" for kind, n in sorted(outcome.struck.items())) or "no fault"
    title = f"{done}, {outcome.resumes} resumes, {outcome.steps} learner steps, {outcome.longest_s:.1f} s at most between two"
    table = Table("", "looked at", "wrong", title=title)
    table.columns[1].justify = table.columns[2].justify = "right"
    for check in outcome.checks:
        table.add_row(check.name, f"{check.examined:,}", f"{check.wrong:,}")
    return table
