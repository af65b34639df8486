"""The token ledger: where every generated token is.

Invariants:
- `generated` is counted from the workers' running reports, completion by completion; all other accounts from what was
  delivered and committed. That the two agree is a check, not a definition.
- A token is in exactly one account. `closes` says whether the sums match; it is asked at every commit.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Account = Literal["in_flight", "ready", "trained", "withheld"]


class Ledger(msgspec.Struct):
    """Tokens by account.

    Attributes:
        generated: all tokens that engines returned to workers.
        in_flight: in episodes that are still running.
        ready: delivered, waiting for a batch or in one that is not committed.
        trained: carried loss in a committed step.
        withheld: in a committed step as context without loss, because they were too old.
        discarded: reason -> tokens.
    """

    generated: int = 0
    in_flight: int = 0
    ready: int = 0
    trained: int = 0
    withheld: int = 0
    discarded: dict[str, int] = {}

    def add(self, account: Account, tokens: int) -> None:
        """Add `tokens` (may be negative) to an account."""
        setattr(self, account, getattr(self, account) + tokens)

    def discard(self, reason: str, tokens: int) -> None:
        """Add `tokens` to `discarded[reason]`; an account that falls to 0 disappears."""
        total = self.discarded.get(reason, 0) + tokens
        if total:
            self.discarded[reason] = total
        else:
            self.discarded.pop(reason, None)

    @property
    def accounted(self) -> int:
        """The sum of all accounts."""
        return self.in_flight + self.ready + self.trained + self.withheld + sum(self.discarded.values())

    @property
    def closes(self) -> bool:
        """Whether every generated token is in an account."""
        return self.generated == self.accounted

    def copy(self) -> Ledger:
        return msgspec.structs.replace(self, discarded=dict(self.discarded))
