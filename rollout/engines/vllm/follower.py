"""`python -m slipstream.rollout.engines.vllm.follower ARGUMENTS`: the process of a vLLM server on each host but the first. It
starts the ranks of this host, which meet those of the others at `--master-addr`, and has no port for requests.

`vllm serve --headless` does the same; the `vllm` command is broken in the wheel for CPU.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> None:
    """Returns when a rank of this host has ended."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([*arguments, "--headless"])
    assert parsed is not None
    parsed.api_server_count = 0
    validate_parsed_serve_args(parsed)
    run_headless(parsed)


if __name__ == "__main__":
    main(sys.argv[1:])
