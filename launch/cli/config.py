"""`slipstream config`: every field of a config with its value and meaning."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable

from ...configs import FieldDoc, describe, dump, load
from ...monitor.output import print_line, print_notice
from .options import CommandTable, add_config


def register(commands: CommandTable) -> None:
    parser = commands.add("config", show_config, "show every field of a config with its meaning")
    add_config(parser)
    parser.add_argument("--yaml", action="store_true", help="as a file that can be loaded again")


def show_config(options: argparse.Namespace) -> int:
    config = load(options.config, options.overrides, notice=print_notice)
    print_line(dump(config).rstrip() if options.yaml else fields_text(describe(config)))
    return 0


def fields_text(fields: Iterable[FieldDoc]) -> str:
    """Every field with its value, type and meaning, wrapped at the width of the terminal."""
    wrap = textwrap.TextWrapper(shutil.get_terminal_size().columns, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(f"{field.key} = {field.value}    ({field.type})\n{wrap.fill(field.doc)}" for field in fields)
