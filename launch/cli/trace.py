"""`slipstream trace RUN [-o FILE] [--steps A-B] [--otlp URL]`: what every process did and when, for viewers of traces."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from ...errors import ConfigError, StoreError
from ...monitor.output import print_line
from .options import CommandTable, add_run

FILE = "trace.perfetto-trace"  # in the run's folder
VIEWER = "https://ui.perfetto.dev"


def register(commands: CommandTable) -> None:
    parser = commands.add("trace", trace, "write what every process did and when, for Perfetto or OpenTelemetry")
    add_run(parser)
    text = f"a new file; default: RUN/{FILE}, which is replaced"
    parser.add_argument("-o", "--out", metavar="FILE", help=text)
    text = "only the time of these learner steps, and the episodes that they trained on"
    parser.add_argument("--steps", type=_steps, metavar="A-B", help=text)
    text = "send spans to a collector of OpenTelemetry, for example http://localhost:4318; a file is then written with -o only"
    parser.add_argument("--otlp", metavar="URL", help=text)


def _steps(text: str) -> str:
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a learner step nor two, as in 10-20")
    return text


def trace(options: argparse.Namespace) -> int:
    from ...common.fsio import part_of
    from ...dashboard.formats.otlp import check_url, send_otlp
    from ...dashboard.formats.perfetto import write_perfetto
    from ...dashboard.formats.trace import read_trace
    from ..watched import open_run, versions_of

    url = check_url(options.otlp) if options.otlp else ""
    run = open_run(options.run)
    out = Path(options.out) if options.out else run.folder / FILE
    if options.out and out.exists():
        raise ConfigError(f"{out} exists; remove it, or name another file with -o")
    if not out.parent.is_dir():
        raise ConfigError(f"-o {out}: there is no folder {out.parent}")
    found = read_trace(run, versions_of(run, "--steps", options.steps) if options.steps else None)
    if url:
        config, _ = run.config()
        model = Path(config.model.path).name if config else "policy"
        sent = send_otlp(found, str(run.folder.resolve()), model, url)
        print_line(f"{sent} spans were sent to {url}")
    if options.out or not url:
        try:
            with part_of(out) as part, part.open("wb") as file:
                slices, counters = write_perfetto(found, run.gauges, file)
        except OSError as error:
            raise StoreError(f"{out} cannot be written: {os.strerror(error.errno or 0)}") from error
        print_line(
            f"{found.spans} spans as {slices} slices, and {counters} counters, are in {out}; open it at {VIEWER}"
        )
    return 0
