"""Which episodes of a complete group are trained on: those that no limit cut off, or by the rank of their rewards.

    untruncated    no limit of tokens or turns cut it off           DAPO's overlong filtering (Yu et al. 2025, arXiv:2503.14476)

PF-PPO, Shen and Zhang 2024, "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957: a reward model is
least reliable on answers that it scores neither high nor low, so of the N answers to a task policy filtration trains on these only:

    best           the highest reward                   the paper's best-of-N
    best_random    that one, and a random other         best-random
    best_worst     that one, and the lowest reward      best-worst

Invariants:
- Pure: the same group is filtered alike at any time and in any process; the group's number seeds the random choice. Among equal
  rewards the first member is the best and the last the worst, so the two differ in a group of two or more.
- Only episodes that could carry loss are ranked: no baseline, and no episode that is delivered later.
"""

from __future__ import annotations

import random

from .admission import Filter
from .group_table import Episode, Group


def dropped(group: Group, rule: Filter) -> list[Episode]:
    """The delivered episodes of `group` that `rule` excludes from training, of those that are not withheld for another reason."""
    if rule == "none":
        return []
    ranked = sorted(
        (e for e in group.in_account("ready") if e.withheld is None), key=lambda e: (-(e.reward or 0.0), e.member)
    )
    match rule:
        case "untruncated":
            return [e for e in ranked if e.outcome is not None and e.outcome.kind == "truncated"]
        case "best":
            return ranked[1:]
        case "best_random":
            others = ranked[1:]
            if others:
                del others[random.Random(group.id).randrange(len(others))]
            return others
        case "best_worst":
            return ranked[1:-1]
