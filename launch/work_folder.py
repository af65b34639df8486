"""The folder of the processes of `slipstream eval` and `slipstream rate`, which have no run of their own.

Invariants:
- It is among the temporary files of this host, or, where `launch.kind` spreads processes over hosts, in a folder that these share:
  every host writes its logs there, and the launcher starts nothing where a host does not see it.
- It is gone at the end. Where the processes failed it stays, as the error names a log in it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..configs import Config
from ..errors import Interrupted


@contextlib.contextmanager
def work_folder(config: Config, command: str, shared: Path) -> Iterator[Path]:
    """With `logs` in it; `shared` is a folder that all hosts of `config` see. Raises OSError where it cannot be made."""
    many = config.launch.hosts == "many"
    folder = Path(tempfile.mkdtemp(prefix=f"slipstream-{command}-", dir=shared if many else None))
    (folder / "logs").mkdir()
    try:
        yield folder
    except Interrupted:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
