"""The token ledger: which account every generated token is in, by the policy version that sampled it.

Invariants:
- `generated` is counted from the workers' running reports, completion by completion; all other accounts from deliveries and
  commits. That the two sums agree is checked, not defined.
- A token is in exactly one account. `balances` compares the sums; every commit requires it of every version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Counts = dict[int, int]  # policy version -> tokens
# Every other account is the reason for which tokens were discarded, or with the prefix `WITHHELD` were withheld.
ACCOUNTS = ("in_flight", "ready", "trained")
WITHHELD = "withheld_"  # prefix of the accounts of tokens in a committed step that carried no loss there
# Reason for withholding single tokens: they are older than the bound. A group without other tokens is discarded for it.
STALE = "stale"
# Why no token of an episode carries loss. `late`: it ended after its group was complete. `baseline`: it was sampled
# greedily, as the baseline of the others. `filtered`: others of its group were selected by their rewards.
Withheld = Literal["late", "baseline", "filtered"]

# Why a whole batch is discarded that the learner took: the critic alone learned from it, or a program discarded it.
Unstepped = Literal["critic_warmup", "program"]


class Ledger(msgspec.Struct):
    """Tokens by account."""

    generated: int = 0  # all tokens that workers accepted from replicas and reported
    in_flight: int = 0  # in running episodes
    ready: int = 0  # delivered; waiting for a batch or in one that is not committed
    trained: int = 0  # carried loss in a committed step
    withheld: dict[str, int] = {}  # in a committed step without loss: reason, `stale` or one of `Withheld` -> tokens
    discarded: dict[str, int] = {}  # reason -> tokens

    def add(self, account: str, tokens: int) -> None:
        """Add `tokens` (may be negative) to an account or a reason; a reason that falls to 0 is removed."""
        if account in ACCOUNTS:
            setattr(self, account, getattr(self, account) + tokens)
            return
        reason = account.removeprefix(WITHHELD)
        reasons = self.discarded if reason == account else self.withheld
        if total := reasons.get(reason, 0) + tokens:
            reasons[reason] = total
        else:
            reasons.pop(reason, None)

    @property
    def accounted(self) -> int:
        """The sum of all accounts."""
        return self.in_flight + self.ready + self.trained + sum(self.withheld.values()) + sum(self.discarded.values())

    @property
    def balances(self) -> bool:
        """Whether every generated token is in an account."""
        return self.generated == self.accounted

    def copy(self) -> Ledger:
        return msgspec.structs.replace(self, withheld=dict(self.withheld), discarded=dict(self.discarded))


class VersionLedgers:
    """One ledger per policy version, and their sum.

    Attributes:
        total: over all versions.
        by_version: policy version -> its ledger.
    """

    def __init__(self, by_version: dict[int, Ledger] | None = None) -> None:
        self.by_version = by_version or {}
        self.total = total_of(self.by_version.values())
        self._unchecked = set(self.by_version)

    def add_generated(self, counts: Counts) -> None:
        """Engines returned `counts` more tokens."""
        for version, tokens in counts.items():
            self.total.generated += tokens
            self._of(version).generated += tokens

    def add(self, account: str, counts: Counts, sign: int = 1) -> None:
        """Add `counts` to an account, or with `sign` -1 subtract them."""
        for version, tokens in counts.items():
            self.total.add(account, sign * tokens)
            self._of(version).add(account, sign * tokens)

    def gap(self) -> str:
        """What does not balance, in words; "" when everything does. Checks only the versions that changed since they balanced."""
        for version in sorted(self._unchecked):
            if gap := _gap(f"version {version}", self.by_version[version]):
                return gap
            self._unchecked.discard(version)
        return _gap("all versions", self.total)

    def _of(self, version: int) -> Ledger:
        self._unchecked.add(version)
        return self.by_version.get(version) or self.by_version.setdefault(version, Ledger())


def _gap(name: str, ledger: Ledger) -> str:
    if ledger.balances:
        return ""
    return f"of {name}, {ledger.generated} tokens were generated, {ledger.accounted} are accounted for"


def total_of(ledgers: Iterable[Ledger]) -> Ledger:
    """The sum of `ledgers`."""
    total = Ledger()
    for ledger in ledgers:
        total.generated += ledger.generated
        for account in ACCOUNTS:
            total.add(account, getattr(ledger, account))
        for reason, tokens in ledger.withheld.items():
            total.add(WITHHELD + reason, tokens)
        for reason, tokens in ledger.discarded.items():
            total.add(reason, tokens)
    return total
