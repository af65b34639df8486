"""The arms of `bench learning`, what they all share, and what is left of one when it has run.

Invariants:
- All arms begin with the same weights, see the same tasks in the same order, draw as many samples per step at the same temperature,
  and take as many AdamW steps with the same rate, clip, loss and group normalization.
- Ours are `slipstream train` of `overrides`; only staleness and correction differ between them.
- Nothing here needs torch: TRL's process, in an environment of its own, reads it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..configs import Config
from ..configs.environments import ReasoningGym
from ..envs.reasoning_gym import ReasoningGymEnv

PRESET = "quickstart"

LR = 3e-4
CLIP = 0.2
GROUPS, GROUP_SIZE = 16, 16
ANSWER_TOKENS = 16

TASK = (
    "env.calculator=false",
    "env.parameters={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
    "agent.kind=single_turn",
    f"agent.max_tokens_per_turn={ANSWER_TOKENS}",
    "agent.max_tokens=64",
)
"""Sums of two digits, answered at once: a single turn, which both trainers can do in the same way."""

WARM_UP = ("sft.epochs=1", "sft.demonstrations=4096")
"""The warm-up teaches the form of an answer, and some sums."""

UNCORRECTED = ("learner.algorithm.correction.kind=uncorrected",)
"""What an arm without correction sets: a config refuses `none` where tokens are stale, and allows this kind for ablations."""

TRAINING = (
    f"buffer.groups_per_batch={GROUPS}",
    f"buffer.group_size={GROUP_SIZE}",
    f"learner.optimizer.lr={LR}",
    "learner.optimizer.warmup_steps=0",
    f"learner.algorithm.loss.clip=[{CLIP}, {CLIP}]",
    "evaluation.tasks=0",
)

EVALUATION = ("evaluation.tasks=1024",)
"""Of what each arm has made; so many, that the standard error of a reward is about 0.014."""


class Arm(msgspec.Struct, frozen=True):
    """One column of the comparison; `max_staleness` -1 is TRL."""

    max_staleness: int
    corrected: bool = True

    @property
    def trl(self) -> bool:
        return self.max_staleness < 0

    @property
    def name(self) -> str:
        """Also of its folder."""
        if self.trl:
            return "trl"
        return f"staleness-{self.max_staleness}" + ("" if self.corrected else "-uncorrected")

    @property
    def title(self) -> str:
        if self.trl:
            return "TRL"
        return f"max_staleness {self.max_staleness}" + ("" if self.corrected else ", not corrected")

    @property
    def overrides(self) -> tuple[str, ...]:
        """What an arm of ours sets in addition to `TASK` and `TRAINING`."""
        return (f"buffer.max_staleness={self.max_staleness}", *(() if self.corrected else UNCORRECTED))


TRL = Arm(-1)


class Point(msgspec.Struct, frozen=True):
    """After one step: episodes trained on until then, seconds since training began, mean reward of its batch."""

    samples: int
    seconds: float
    reward: float


class Run(msgspec.Struct, frozen=True):
    """One arm with one seed.

    Attributes:
        reward: of held-out tasks after the last step.
        stderr: its standard error over the tasks.
        lag: mean staleness of the trained tokens, in versions.
        points: the steps in order.
    """

    arm: Arm
    seed: int
    reward: float
    stderr: float
    lag: float
    points: tuple[Point, ...]


class TrlJob(msgspec.Struct, frozen=True):
    """What TRL's process needs to know.

    Attributes:
        overrides: of `PRESET`: tasks and seed.
        prompt_ids: of the first task, as our renderer makes them; TRL's must be the same.
        out: folder for `points.json` and the trained model.
    """

    model: str
    overrides: tuple[str, ...]
    steps: int
    seed: int
    prompt_ids: list[int]
    out: str


def arms(staleness: Sequence[int], trl: bool) -> list[Arm]:
    """TRL where it is there, then every staleness with correction, and without where anything is stale."""
    ours = [Arm(bound, corrected) for bound in staleness for corrected in (True, False) if corrected or bound]
    return [TRL, *ours] if trl else ours


def tasks(config: Config) -> ReasoningGymEnv:
    """What every arm with this config trains on, and who scores it."""
    assert isinstance(config.env, ReasoningGym)
    return ReasoningGymEnv(config.env, "train", config.seed)
