"""`slipstream program`, a child process of a program. It supervises a run as `slipstream train` does, but rank 0 of the learner is
the program.

Invariants:
- It ends with the program, also when that is killed; then the kernel ends the other roles.
- Its stdout is the pipe to the program; what is printed goes to stderr.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...common.process import set_parent_death_signal
from ...configs import RUN_CONFIG, load, run_config
from ...errors import Interrupted, SlipstreamError
from ...monitor.output import print_notice
from ...monitor.settings import SETTINGS, in_force, read_changes
from .. import run
from .link import ProgramLink
from .messages import RunEnded


def supervise_program() -> int:
    """See the run of the program, which started this process, through; the exit status."""
    set_parent_death_signal()
    read, write = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what others print must not be read as a message
    link = ProgramLink(read, write)
    try:
        text = _see_through(link)
    except (SlipstreamError, Interrupted) as error:
        link.send(RunEnded(type(error).__name__, str(error)))
        return 1
    link.send(RunEnded(text=text))
    return 0


def _see_through(link: ProgramLink) -> str:
    config = link.begin.config
    folder = Path(config.run.dir)
    if not (link.begin.resume and (folder / RUN_CONFIG).is_file()):
        return run.summary(run.train(config, program=link))
    before = load(str(run_config(str(folder))), in_force(read_changes(folder / SETTINGS)), notice=print_notice)
    return run.summary(run.resume(run.with_absolute_paths(config), before, folder.resolve(), program=link))
