"""What `slipstream chaos` will do to a run: drawn from a seed before the run begins. Pure.

Invariants:
- The same config, number of kills and seed give the same plan.
- A fault that is due after seconds hits what recovers from the one before; one that is due after steps hits what works.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from ..configs import Config
from ..configs.schema import Vllm
from .member import role_names

Kind = Literal["kill", "stop", "disk"]

SUPERVISOR = "supervisor"

CORE = " core"
"""Suffix of a victim: not the server itself but the process in which it computes."""

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
"""How often a process of each kind is hit. The supervisor takes everybody with it, which costs most."""

STOPS = 0.25
"""SIGSTOPs for each SIGKILL."""

DISKS = 0.1
"""Full disks for each SIGKILL."""

WRITERS = ("buffer", "learner", "critic")
"""Kinds of roles that a full disk is told to."""

STEPS = 2
"""A fault comes after at most so many learner steps,"""

PAUSE_S = 2.0
"""or after at most so many seconds;"""

HASTY = 3
"""but never so many in a row after seconds: the run must be seen to recover."""


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong.

    Attributes:
        number: from 1.
        kind: SIGKILL; SIGSTOP and after `seconds` SIGCONT; or no file of the process may grow for `seconds`.
        victim: a role, `supervisor`, or an engine's ` core`.
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
        """The process to look for."""
        return self.victim.removesuffix(CORE)

    def __str__(self) -> str:
        due = f"{self.after_steps} steps" if self.after_steps else f"{self.after_s:.1f} s"
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.number:4}  after {due:8} {self.kind:5} {self.victim}{lasts}"


def make_plan(config: Config, kills: int, seed: int) -> tuple[Fault, ...]:
    """`kills` SIGKILLs, and in between SIGSTOPs and full disks in proportion."""
    rng = random.Random(f"{seed}/{kills}")
    counts: dict[Kind, int] = {"kill": kills, "stop": round(STOPS * kills), "disk": round(DISKS * kills)}
    kinds: list[Kind] = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    return tuple(_faults(config, kinds, rng))


def _faults(config: Config, kinds: list[Kind], rng: random.Random) -> Iterator[Fault]:
    victims = [SUPERVISOR, *(name for name in role_names(config) if name != "evaluator")]
    if isinstance(config.rollout.engine, Vllm):
        victims += [name + CORE for name in victims if name.startswith("engine-")]
    writers = [name for name in victims if name.partition("-")[0] in WRITERS]
    hasty = 0
    for number, kind in enumerate(kinds, start=1):
        among = writers if kind == "disk" else victims
        victim = rng.choices(among, [WEIGHTS[name.partition("-")[0]] for name in among])[0]
        steps, seconds = rng.randint(1, STEPS), rng.uniform(0, PAUSE_S)
        lasts = {"kill": 0.0, "stop": _pause(config, rng), "disk": rng.uniform(0.2, 4.0)}[kind]
        in_seconds = rng.random() < 0.5 and hasty < HASTY
        hasty = hasty + 1 if in_seconds else 0
        yield Fault(
            number,
            kind,
            victim,
            round(lasts, 1),
            after_steps=0 if in_seconds else steps,
            after_s=round(seconds, 1) if in_seconds else 0.0,
        )


def _pause(config: Config, rng: random.Random) -> float:
    """Seconds of a SIGSTOP: shorter than a lease, longer, or long enough to be killed for its silence."""
    lease, heartbeat = sorted((config.buffer.lease_s, config.launch.heartbeat_s))
    short, middle, long = (0.1, 0.6 * lease), (1.2 * lease, 0.8 * heartbeat), (1.3 * heartbeat, 1.6 * heartbeat)
    return rng.uniform(*rng.choices((short, middle, long), (5, 3, 2))[0])
