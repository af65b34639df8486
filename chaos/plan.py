"""The fault plan of `slipstream chaos`, drawn from a seed before the run starts. Pure.

Invariants:
- The same config, numbers of kills, hosts and links, and seed give the same plan.
- A fault due after seconds hits a run that is recovering from the fault before; one due after steps hits a run that works.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from ..common.replica_names import replica_of
from ..configs import Config
from ..configs.engines import Vllm
from ..launch.supervisor.processes import role_names

Kind = Literal["kill", "stop", "disk", "lost", "frozen", "cut", "slow"]

HOST = "host "
"""Prefix of a victim: a host, by its number."""

SUPERVISOR = "supervisor"

CORE = " core"
"""Suffix of a victim: the process in which an engine server computes, not the server itself."""

WEIGHTS = {
    "buffer": 5.0,
    "learner": 3.0,
    "reference": 1.0,
    "critic": 2.0,
    "worker": 3.0,
    "engine": 3.0,
    "reward": 1.0,
    SUPERVISOR: 1.0,
}
"""Relative frequency of each kind of role. Killing the supervisor ends all roles, which costs most."""

STOPS = 0.25
"""SIGSTOPs per SIGKILL."""

DISKS = 0.1
"""Full disks per SIGKILL."""

LOSSES = 0.1
"""Hosts that are lost with all their processes per SIGKILL,"""

FREEZES = 0.05
"""and hosts that are frozen, where there are several."""

BACK_S = (1.0, 10.0)
"""When a lost host is back."""

CUTS = 0.5
"""Share of the faults of links that cut a host off; the others make all links slow and lossy."""

WRITERS = ("buffer", "learner", "critic")
"""Kinds of roles whose disk becomes full."""

STEPS = 2
"""Most learner steps between two faults,"""

PAUSE_S = 2.0
"""or most seconds;"""

MAX_RAPID = 3
"""and the most faults in a row that are due after seconds: the run must be seen to recover."""


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        number: from 1.
        kind: SIGKILL; SIGSTOP and after `seconds` SIGCONT; no file of the process may grow for `seconds`; a host is lost with all
            its processes and back after `seconds`; all its processes are stopped for `seconds`; its link is cut, or all links are
            slow and lossy, for `seconds`.
        victim: a role, `supervisor`, an engine's ` core`, or a host.
        seconds: how long it lasts; 0 for a kill.
        after_steps: learner steps since the fault before; 0 where it is due after `after_s` seconds.
    """

    number: int
    kind: Kind
    victim: str
    seconds: float
    after_steps: int
    after_s: float

    @property
    def role(self) -> str:
        """The role of the victim."""
        return self.victim.removesuffix(CORE)

    @property
    def host(self) -> int:
        """The number of the host that is the victim."""
        return int(self.victim.removeprefix(HOST))

    def __str__(self) -> str:
        due = f"{self.after_steps} steps" if self.after_steps else f"{self.after_s:.1f} s"
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.number:4}  after {due:8} {self.kind:6} {self.victim}{lasts}"


def make_plan(config: Config, kills: int, seed: int, hosts: int = 0, links: int = 0) -> tuple[PlannedFault, ...]:
    """`kills` SIGKILLs mixed with SIGSTOPs and full disks in proportion; on several `hosts` also with hosts that are lost and
    frozen in proportion, and with `links` faults of links. Host 0, the supervisor's, is neither lost nor frozen as a whole."""
    rng = random.Random(f"{seed}/{kills}" + (f"/{hosts}/{links}" if hosts else ""))
    counts: dict[Kind, int] = {"kill": kills, "stop": round(STOPS * kills), "disk": round(DISKS * kills)}
    if hosts:
        cuts = round(CUTS * links)
        counts |= {
            "lost": math.ceil(LOSSES * kills),
            "frozen": math.ceil(FREEZES * kills),
            "cut": cuts,
            "slow": links - cuts,
        }
    kinds: list[Kind] = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return tuple(_faults(config, kinds, hosts, rng))


def _faults(config: Config, kinds: list[Kind], hosts: int, rng: random.Random) -> Iterator[PlannedFault]:
    victims = [SUPERVISOR, *(name for name in role_names(config) if name != "evaluator")]
    if isinstance(config.rollout.engine, Vllm):
        victims += [name + CORE for name in victims if name.startswith("engine-") and replica_of(name) == name]
    writers = [name for name in victims if name.partition("-")[0] in WRITERS]
    rapid = 0
    for number, kind in enumerate(kinds, start=1):
        if kind in ("lost", "frozen", "cut", "slow"):
            victim = f"{HOST}{rng.randrange(0 if kind in ('cut', 'slow') else 1, hosts)}"
        else:
            candidates = writers if kind == "disk" else victims
            victim = rng.choices(candidates, [WEIGHTS[name.partition("-")[0]] for name in candidates])[0]
        steps, seconds = rng.randint(1, STEPS), rng.uniform(0, PAUSE_S)
        pause, full = _pause(config, rng), rng.uniform(0.2, 4.0)
        back = rng.uniform(*BACK_S) if kind == "lost" else 0.0
        lasts = {"kill": 0.0, "disk": full, "lost": back}.get(kind, pause)
        in_seconds = rng.random() < 0.5 and rapid < MAX_RAPID
        rapid = rapid + 1 if in_seconds else 0
        yield PlannedFault(
            number,
            kind,
            victim,
            round(lasts, 1),
            after_steps=0 if in_seconds else steps,
            after_s=round(seconds, 1) if in_seconds else 0.0,
        )


def _pause(config: Config, rng: random.Random) -> float:
    """Seconds of a SIGSTOP: shorter than a lease, longer, or long enough to be killed for missing heartbeats."""
    lease, heartbeat = config.launch.lease_s, config.launch.heartbeat_s
    short, middle, long = (0.1, 0.6 * lease), (1.1 * lease, 0.8 * heartbeat), (1.3 * heartbeat, 1.6 * heartbeat)
    return rng.uniform(*rng.choices((short, middle, long), (5, 3, 2))[0])
