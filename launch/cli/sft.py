"""`slipstream sft`: supervised fine-tuning."""

from __future__ import annotations

import argparse

from ... import __version__
from ...configs import SftConfig, describe, load
from ...configs.algorithm import Dpo
from ...monitor.output import print_line, print_notice
from .config import fields_text
from .options import CommandTable, add_config


def register(commands: CommandTable) -> None:
    parser = commands.add(
        "sft", sft, "fine-tune model.path on conversations, demonstrations or preferences, into sft.out"
    )
    add_config(parser)
    parser.make_epilog = lambda: (
        "fields in addition to those of a run:\n\n"
        + fields_text(field for field in describe(SftConfig()) if field.key.startswith("sft."))
    )


def sft(options: argparse.Namespace) -> int:
    config = load(options.config, options.overrides, SftConfig, print_notice)
    print_line(f"slipstream {__version__}: checks the config, then fine-tunes {config.model.path}")
    from ..sft import fine_tune

    result = fine_tune(config, print_line)
    held_out = f", {result.held_out[-1].loss:.3f} on what was held out" if result.held_out else ""
    unit = "preference" if config.sft.preferences else "token"
    made = "classifier" if config.sft.preferences and not isinstance(config.sft.loss, Dpo) else "model"
    print_line(f"final loss {result.loss:.3f} nats per {unit}{held_out}; the {made} is in {config.sft.out}")
    return 0
