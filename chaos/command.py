"""`slipstream chaos CONFIG --kills N --seed S`: inject faults into a run, then audit its run folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from ..buffer.schema import DATABASE
from ..configs import load
from ..configs.environments import LimitedTasks, parts_by_key
from ..errors import ConfigError
from ..launch.cli.options import CommandTable, add_config
from ..monitor.output import PipeSafeConsole, print_line

if TYPE_CHECKING:
    from .audit import AuditCheck

FORCED = ("learner.steps=1000000000", "launch.restarts=1000000", "evaluation.tasks=0")
"""Overrides without which the run would end before the plan does."""


class ChaosReport(msgspec.Struct, frozen=True):
    """What `--json` prints.

    Attributes:
        plan: the planned faults, a line each.
        faults: injected faults by kind.
        changes: settings that were changed.
        resumes: how often the run was resumed after it had ended.
        steps: learner steps, repeated ones included.
        longest_s: longest time without a learner step, counted from the end of the last fault.
        checks: of the audit.
        problems: every violation found; empty where all guarantees hold.
    """

    seed: int
    plan: tuple[str, ...]
    faults: dict[str, int]
    changes: int
    resumes: int
    steps: int
    longest_s: float
    checks: tuple[AuditCheck, ...]
    problems: tuple[str, ...]


def register(commands: CommandTable) -> None:
    parser = commands.add("chaos", chaos, "inject faults into a run at random, then audit its run folder")
    add_config(parser)
    text = "SIGKILLs; a quarter as many SIGSTOPs and a tenth as many full disks come with them"
    parser.add_argument("--kills", type=int, default=20, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed makes the same plan")
    text = "changes of settings at random while the run goes on, as `slipstream set` makes them; default: 0"
    parser.add_argument("--set-changes", type=int, default=0, metavar="N", help=text)
    text = "hosts to spread the run over, each a network namespace (as root) or a node of a Ray cluster; default: 1"
    parser.add_argument("--hosts", type=int, default=1, metavar="H", help=text)
    text = "faults of links between hosts, cut or slow; needs root; default: 0"
    parser.add_argument("--links", type=int, default=0, metavar="L", help=text)
    text = "longest time without a learner step"
    parser.add_argument("--hang", type=float, default=180.0, metavar="SECONDS", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def chaos(options: argparse.Namespace) -> int:
    """Run under faults and audit; returns 1 where a guarantee does not hold."""
    from ..launch.preflight import preflight
    from .audit import audit
    from .changes import make_changes
    from .harness import FaultRunner
    from .hosted import HostedFaultRunner, cpus_of, node_environments
    from .hosts import Hosts
    from .plan import make_plan

    many = options.hosts > 1
    overrides = [*options.overrides, *FORCED, *(["launch.kind=ray_cluster"] if many else [])]
    config = load(options.config, overrides)
    run_dir = Path(config.run.dir).resolve()
    _check_numbers(options)
    if config.launch.by_ray and not many:
        raise ConfigError(
            "launch.kind: chaos reaches the processes of this host only; allowed here are local, colocated, or --hosts"
        )
    for key, part in parts_by_key(config.env).items():
        if part.sampler != "sequential" or (isinstance(part, LimitedTasks) and part.tasks):
            raise ConfigError(
                f"{key}.sampler: the audit expects every task once; allowed here is sequential, without {key}.tasks"
            )
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"run.dir: {config.run.dir} is not empty; name a new folder")
    preflight(config)
    plan = make_plan(config, options.kills, options.seed, options.hosts if many else 0, options.links)
    changes = make_changes(config, options.set_changes, len(plan), options.seed)
    console = PipeSafeConsole(stderr=options.json, highlight=False, markup=False, soft_wrap=True)
    console.print(f"seed {options.seed}: {len(plan)} faults, {len(changes)} changes of settings")
    for planned in (*plan, *changes):
        console.print(str(planned))
    console.print("the run starts")
    arguments = ([options.config, *overrides], run_dir, options.hang, console.print)
    if many:
        folder = run_dir.with_name(f"{run_dir.name}.hosts")
        with Hosts(cpus_of(config, options.hosts), folder, node_environments(options.hosts)) as hosts:
            result = HostedFaultRunner(hosts, *arguments).run(plan, changes)
    else:
        result = FaultRunner(*arguments).run(plan, changes)
    checks = (*audit(run_dir), _ledger_check(run_dir)) if (run_dir / DATABASE).exists() else ()
    problems = (*result.problems, *(f"{check.name}: {problem}" for check in checks for problem in check.problems))
    report = ChaosReport(
        options.seed,
        tuple(map(str, plan)),
        result.faults,
        result.changes,
        result.resumes,
        result.steps,
        result.longest_s,
        checks,
        problems,
    )
    if options.json:
        print_line(msgspec.json.encode(report).decode())
    else:
        console.print(_table(report))
        for problem in problems:
            console.print(f"PROBLEM {problem}")
    return 1 if problems else 0


def _check_numbers(options: argparse.Namespace) -> None:
    from .hosts import may_make_namespaces

    least = (("--kills", options.kills, 0), ("--set-changes", options.set_changes, 0), ("--links", options.links, 0))
    for name, value, smallest in (*least, ("--hosts", options.hosts, 1)):
        if value < smallest:
            raise ConfigError(f"{name}: {value}; allowed are {smallest} and more")
    if options.links and options.hosts == 1:
        raise ConfigError(f"--links: {options.links}, but there is one host; name --hosts 2 or more")
    if options.links and not may_make_namespaces():
        raise ConfigError(f"--links: {options.links}; hosts have links only where root makes them, allowed here is 0")


def _ledger_check(run_dir: Path) -> AuditCheck:
    """The verdict of `slipstream ledger`, which is itself under audit."""
    from ..launch.run import read_ledger
    from .audit import AuditCheck

    report = read_ledger(run_dir)
    problems = () if report.balances else ("it does not close",)
    return AuditCheck("slipstream ledger agrees", report.total.generated, len(problems), problems)


def _table(report: ChaosReport) -> Table:
    faults = ", ".join(f"{n} {kind}s" for kind, n in sorted(report.faults.items())) or "no fault"
    faults += f", {report.changes} changed settings" if report.changes else ""
    longest = f"{report.longest_s:.1f} s at most between two"
    table = Table(
        "", "examined", "wrong", title=f"{faults}, {report.resumes} resumes, {report.steps} learner steps, {longest}"
    )
    table.columns[1].justify = table.columns[2].justify = "right"
    for check in report.checks:
        table.add_row(check.name, f"{check.examined:,}", f"{check.wrong:,}")
    return table
