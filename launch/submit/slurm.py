"""The batch script of a run for Slurm. It is one file: the config is in it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from ...configs import dump
from ...errors import ConfigError
from .job import OBJECT_STORE, Job

TEMPLATE = "sbatch.jinja"
MARKER = "END_OF_THE_CONFIG"  # a line of its own, which no dumped config has
JOIN_S = 300  # for the head of Ray to listen; a node may read its Python from a slow file system
VALUE = re.compile(r"[\w.,:+=/@%-]+")


def batch_script(job: Job, *, options: Sequence[str] = (), interface: str = "") -> str:
    """The script for `sbatch`. `options` are more of its options, `--name=value` each; `interface` is the network that the nodes
    talk over, by default the one to which their names resolve. Raises ConfigError."""
    for flag, value in (("--name", job.name), ("--interface", interface)):
        if value and not VALUE.fullmatch(value):
            raise ConfigError(f"{flag}: {value!r} is not allowed; allowed are letters, digits and . , : + = / @ % _ -")
    for option in options:
        if not re.fullmatch(rf"--[a-z][a-z-]*(={VALUE.pattern})?", option):
            raise ConfigError(f"--sbatch: {option!r} is not of the form --option or --option=value")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(TEMPLATE).render(
        job=job,
        options=options,
        interface=interface,
        python=sys.executable,
        folder=str(Path.cwd()),
        join_s=JOIN_S,
        object_store=OBJECT_STORE,
        marker=MARKER,
        text=dump(job.config),
    )
