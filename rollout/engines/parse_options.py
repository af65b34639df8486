"""`python parse_options.py KIND JSON`: what the command-line parser of a server says of arguments.
It runs in the server's Python, which need not have this version of Slipstream; it starts no server and loads no model, and prints
one line of JSON, an `options.ParserAnswer`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from typing import Any, NoReturn


class RefusedArguments(Exception):
    """A parser does not take the arguments; in a server it would end the process with this message."""


def refuse(message: str) -> NoReturn:
    raise RefusedArguments(message)


class RefusingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message)


def parser_of(kind: str) -> argparse.ArgumentParser:
    if kind == "vllm":
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser())
        parser.error = refuse  # type: ignore[method-assign]
        return parser
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    parser = RefusingParser()
    ServerArgs.add_cli_args(parser)
    return parser


def answer(kind: str, arguments: list[str], options: list[str], owned: list[str]) -> dict[str, Any]:
    """The fields of a `ParserAnswer`. `options` are the names in `arguments`, `owned` arguments without their dashes."""
    parser = parser_of(kind)
    flags = {flag.lstrip("-").replace("_", "-"): action.dest for flag, action in parser._option_string_actions.items()}
    names = {name: name.replace("_", "-") for name in options}
    unknown = [name for name, flag in names.items() if flag not in flags]
    near = {name: difflib.get_close_matches(names[name], flags, 1) for name in unknown}
    ours = {flags[flag]: flag for flag in owned if flag in flags}
    found = {name: ours[flags[flag]] for name, flag in names.items() if flags.get(flag) in ours}
    for action in parser._actions:
        action.required = False  # Slipstream sets what a server must have
    error = ""
    if not unknown:
        try:
            parser.parse_args(arguments)
        except (RefusedArguments, ValueError) as refused:
            error = " ".join(str(refused).split())
    return {"unknown": {name: (near[name] or [""])[0] for name in unknown}, "owned": found, "error": error}


if __name__ == "__main__":
    line = json.dumps(answer(sys.argv[1], **json.loads(sys.argv[2])))
    sys.stdout.write(f"\n{line}\n")
