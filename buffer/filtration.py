"""Policy filtration: which episodes of a complete group are trained on, by the rank of their rewards.

PF-PPO, Shen and Zhang 2024, "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957: a reward model is
least to be trusted about answers that it finds neither good nor bad, so of the N answers to a task only these are trained on:

    best           the one that earned most                  the paper's best-of-N
    best_random    that one, and one of the others by lot    best-random
    best_worst     that one, and the one that earned least   best-worst

Invariants:
- Pure: the same group is filtered alike at any time and in any process; the lot is drawn by the group's number. Among equal rewards
  the first member is the best and the last the worst, so that the two differ wherever there are two.
- Only who could carry loss is ranked: no baseline, and nobody who comes after.
"""

from __future__ import annotations

import random

from .group import Episode, Group
from .rules import Filter


def left_out(group: Group, rule: Filter) -> list[Episode]:
    """The delivered episodes of `group` that are not to be trained on by `rule`, of those that no other reason withholds."""
    if rule == "none":
        return []
    ranked = sorted(
        (e for e in group.in_account("ready") if e.withheld is None), key=lambda e: (-(e.reward or 0.0), e.member)
    )
    match rule:
        case "best":
            return ranked[1:]
        case "best_random":
            others = ranked[1:]
            if others:
                del others[random.Random(group.id).randrange(len(others))]
            return others
        case "best_worst":
            return ranked[1:-1]
