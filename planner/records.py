"""The records of a run that the planner reads: each file is read once for all parts of the planner.

Invariants:
- Rows are as they were when they were read first: of a run that goes on, all numbers are of one moment's steps.
- `steady` are the steps under the settings in force, without those until the run has filled up under them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from ..buffer.history import read_groups
from ..buffer.schema import DATABASE
from ..buffer.trajectory import BatchRow
from ..configs import load, run_config
from ..monitor.alerts import SETTLING
from ..monitor.metrics import METRICS, Row, read_metrics
from ..monitor.series import of_policy
from ..monitor.settings import SETTINGS, read_changes, rows_since

GROUPS = 200  # most groups that are looked at; evenly spread over the run

Groups = Sequence[Sequence[Sequence[BatchRow]]]  # of each group its episodes, of each episode its branches


class RunRecords:
    """Of the run in `folder`, finished or going on; `active` where a process may write to it. Raises ConfigError where there is
    none, StoreError where a file is damaged."""

    def __init__(self, folder: Path, *, active: bool = True) -> None:
        self.folder, self.active = folder, active
        self.database = folder / DATABASE
        self.config = load(str(run_config(folder)))
        self.rows: Sequence[Row] = of_policy(read_metrics(folder / METRICS))
        # Of the steps since the settings were changed last.
        self.in_force = rows_since(read_changes(folder / SETTINGS), self.rows)
        self.settling = self.config.buffer.max_staleness + SETTLING  # steps until the run has filled up

    @property
    def steady(self) -> Sequence[Row]:
        return self.in_force[self.settling :]

    @property
    def since(self) -> int:
        """The version before the first steady step, of which there must be one."""
        return self.steady[0]["version"] - 1

    @functools.cached_property
    def groups(self) -> Groups:
        """At most `GROUPS` that ended since then. Raises StoreError."""
        return read_groups(self.database, self.since, GROUPS, active=self.active)
