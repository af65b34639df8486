"""`slipstream export RUN [--to hf|jsonl|parquet|inspect] [-o PATH] [--step N|A-B|best | --evaluation [LABEL]]`: a run as files for
other programs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ...configs.evaluation import BEST
from ...errors import ConfigError
from ...monitor.output import print_line
from .options import CommandTable, add_evaluation, add_run

KINDS = {
    "hf": "the model of a checkpoint as a Hugging Face folder",
    "jsonl": "every trajectory, an object per line",
    "parquet": "every trajectory, a row each",
    "inspect": "the episodes as a log of Inspect",
}


def register(commands: CommandTable) -> None:
    parser = commands.add("export", export, "write a run's model, or its trajectories, for other programs")
    add_run(parser)
    text = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    parser.add_argument("--to", choices=list(KINDS), default="hf", help=f"{text}; default: hf")
    text = (
        "hf: of the checkpoint of this step, or the `best` of the suite with keep_best; default: the newest checkpoint. "
        "The others: trajectories that these steps trained; default: all that were delivered"
    )
    parser.add_argument("--step", type=_step, metavar="N|A-B|best", help=text)
    text = "not hf: trajectories of an evaluation, for example 'step 20' or 'final, math'; without LABEL of all evaluations"
    add_evaluation(parser, text)
    text = "the new folder or file; default: RUN/model-step-N, or RUN/trajectories.jsonl, .parquet, .eval "
    text += "(evaluation-trajectories with --evaluation)"
    parser.add_argument("-o", "--out", metavar="PATH", help=text)
    text = "inspect: an interpreter that has inspect-ai; default: the one that runs this"
    parser.add_argument("--python", default="", metavar="PROGRAM", help=text)


def _step(text: str) -> str:
    if text != BEST and not re.fullmatch(r"\d{1,9}(-\d{1,9})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a learner step nor {BEST}, nor two steps as in 10-20")
    return text


def export(options: argparse.Namespace) -> int:
    out = Path(options.out) if options.out else None
    if options.python and options.to != "inspect":
        raise ConfigError("--python is for --to inspect")
    if options.evaluation is not None and (options.to == "hf" or options.step):
        other = "--to hf" if options.to == "hf" else "--step"
        raise ConfigError(
            f"--evaluation, {other}: an evaluation has trajectories, which no step trained; give one of the two"
        )
    if options.to == "hf":
        if options.step and "-" in options.step:
            raise ConfigError(
                f"--step {options.step}: a model is of one step; --to jsonl, parquet and inspect take several"
            )
        from ..export import export as export_model  # takes seconds

        step = options.step if options.step in (None, BEST) else int(options.step)
        print_line(f"the model is in {export_model(options.run, out, step)}")
        return 0
    if options.step == BEST:
        raise ConfigError("--step best: is of a checkpoint; trajectories are of the steps that trained them")
    from ...dashboard.formats.rows import Wanted
    from ...dashboard.formats.trajectory_files import export_trajectories
    from ..watched import open_played_run, open_run, versions_of

    run = (open_played_run if options.evaluation is None else open_run)(options.run)
    versions = versions_of(run, "--step", options.step) if options.step else None
    wanted = Wanted(versions, options.evaluation)
    path, number = export_trajectories(run, options.to, out, wanted, options.python)
    print_line(f"{number} trajectories are in {path}")
    return 0
