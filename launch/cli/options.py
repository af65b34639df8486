"""Command-line arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...configs.evaluation import BEST

FOLLOWER_NICE = 19  # of a command that follows a run on the same machine, so that it takes nothing from the run
Command: TypeAlias = Callable[[argparse.Namespace], int]  # runs a parsed command line; returns the exit status


class CommandParser(argparse.ArgumentParser):
    """A parser that keeps the line ends of its texts and builds a long epilog only when its help is printed."""

    make_epilog: Callable[[], str] | None = None

    def __init__(self, **given: object) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | given)  # pyright: ignore[reportArgumentType]

    def format_help(self) -> str:
        if self.make_epilog is not None:
            self.epilog = self.make_epilog()
        return super().format_help()


class CommandTable:
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)

    def add(self, name: str, command: Command, text: str) -> CommandParser:
        """A subcommand with its one-line description, which both helps show."""
        parser = self._parsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.set_defaults(command=command)
        return parser


def add_config(parser: argparse.ArgumentParser, *, default: str | None = None, or_run: bool = False) -> None:
    """`CONFIG [key=value ...]`; `CONFIG` may be left out where it has a default."""
    metavar = "CONFIG|RUN" if or_run else "CONFIG"
    text = "a YAML file, a preset, or a run folder" if or_run else "a YAML file, or a preset"
    text += f"; default: {default}" if default else ""
    parser.add_argument("config", metavar=metavar, nargs="?" if default else None, default=default, help=text)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, example: str = "learner.steps=20") -> None:
    """`[key=value ...]`, which may stand anywhere on the command line."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=f"for example {example}")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run")


def add_evaluation(parser: argparse.ArgumentParser, text: str) -> None:
    """`--evaluation [LABEL]`: None where it is not given, empty without LABEL."""
    parser.add_argument("--evaluation", nargs="?", const="", metavar="LABEL", help=text)


def add_step(parser: argparse.ArgumentParser) -> None:
    text = "of the checkpoint of this step, or the `best` of the suite with keep_best; default: of the last step, or of the newest"
    parser.add_argument("--step", type=_step, metavar="N|best", help=f"{text} checkpoint of an unfinished run")


def _step(text: str) -> int | str:
    if text != BEST and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a learner step nor {BEST}")
    return text if text == BEST else int(text)


def merge_overrides(parser: argparse.ArgumentParser, options: argparse.Namespace, unparsed: Sequence[str]) -> None:
    """Add words that argparse left over because they follow an option; exits with status 2 where one is no override."""
    if any(word.startswith("-") or "=" not in word for word in unparsed) or (unparsed and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(unparsed)}")
    if unparsed:
        options.overrides = [*options.overrides, *unparsed]
