"""`slipstream submit slurm|k8s`: write the job of a run over several nodes, and submit it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...common.fsio import is_folder
from ...configs import Config, load, run_config
from ...errors import ConfigError, SlipstreamError
from ...monitor.output import print_line, print_notice
from .options import CommandParser, CommandTable, add_config

if TYPE_CHECKING:
    from ..submit.job import Job

SUBMIT_S = 120.0  # for `sbatch` or `kubectl` to answer


class SubmitError(SlipstreamError):
    """The cluster did not take a job."""


def register(commands: CommandTable) -> None:
    parser = commands.add("submit", _slurm, "write the job of a run for Slurm or Kubernetes, and submit it")
    kinds = CommandTable(parser)
    slurm = kinds.add("slurm", _slurm, "write a batch script, which requeues itself until the run is done")
    _add_nodes(slurm)
    for option in ("partition", "account", "qos"):
        slurm.add_argument(f"--{option}", default="", metavar="NAME", help="as of sbatch")
    slurm.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more of sbatch, as in --sbatch=--constraint=h100",
    )
    slurm.add_argument(
        "--interface",
        default="",
        metavar="NAME",
        help="the network between the nodes, for example ib0; default: of their names",
    )
    k8s = kinds.add(
        "k8s", _kubernetes, "write a manifest for KubeRay, whose job resumes the run when it is tried again"
    )
    _add_nodes(k8s)
    k8s.add_argument("--image", required=True, metavar="IMAGE", help="with slipstream and ray[default]")
    k8s.add_argument("--namespace", default="", metavar="NAME", help="default: that of kubectl")
    k8s.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:/PATH",
        help="a persistent volume claim, mounted in every pod",
    )
    k8s.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a secret whose entries become environment variables",
    )
    k8s.add_argument(
        "--gpu-resource",
        default="",
        metavar="NAME",
        help="by which the cluster counts GPUs, for example amd.com/gpu; default: that of learner.backend.device, nvidia.com/gpu",
    )
    k8s.add_argument("--retries", type=int, default=3, metavar="N", help="attempts after the first; default: 3")


def _add_nodes(parser: CommandParser) -> None:
    add_config(parser, or_run=True)
    parser.add_argument("--nodes", type=_count, metavar="N", help="default: as few as the roles' GPUs fit on")
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="default: 0, which computes on CPUs")
    parser.add_argument("--cpus-per-node", type=_count, metavar="N", help="default: one for each role")
    parser.add_argument("--memory", default="", metavar="SIZE", help="of a node, for example 512GiB")
    parser.add_argument(
        "--time", default="", metavar="[D-]HH:MM:SS", help="the limit, before which the run is interrupted"
    )
    parser.add_argument("--name", default="", metavar="NAME", help="of the job; default: the run folder's")
    parser.add_argument("--out", default="", metavar="FILE", help="default: NAME.sbatch or NAME.yaml")
    parser.add_argument("--submit", action="store_true", help="submit it, too, by sbatch or kubectl")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 and more")
    return int(text)


def _slurm(options: argparse.Namespace) -> int:
    from ..run import with_absolute_paths
    from ..submit.slurm import batch_script

    config = _config(options)
    config = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, dir=str(Path(config.run.dir).resolve()))
    )
    job = _job(options, "slurm", with_absolute_paths(config))
    _check_files(job.config)
    named = [f"--{option}={value}" for option in ("partition", "account", "qos") if (value := getattr(options, option))]
    script = batch_script(job, options=[*named, *options.sbatch], interface=options.interface)
    return _finish(options, job, script, "sbatch", ["sbatch"])


def _kubernetes(options: argparse.Namespace) -> int:
    from ..submit.kubernetes import Pods, manifest, parse_volume

    volumes = tuple(map(parse_volume, options.volume))
    pods = Pods(options.image, options.namespace, volumes, tuple(options.secret), options.retries, options.gpu_resource)
    job = _job(options, "k8s", _config(options))
    return _finish(options, job, manifest(job, pods), "yaml", ["kubectl", "create", "-f"])


def _config(options: argparse.Namespace) -> Config:
    """The config of a new run, or the one of a run that is to be resumed."""
    if not is_folder(options.config):
        return load(options.config, options.overrides, notice=print_notice)
    if options.overrides:
        raise ConfigError(
            f"{options.overrides[0]}: the job resumes {options.config} with its own settings; change them by `slipstream set` or "
            "`slipstream resume` first"
        )
    return load(str(run_config(options.config)), [f"run.dir={options.config}"])


def _check_files(config: Config) -> None:
    """What can be checked where the job is written, on the file system of its nodes. Raises ConfigError."""
    from ..file_checks import agent_files, algorithm_files, environment_files, model_files, reward_files
    from ..preflight import folder
    from ..run_inputs import RunInputs

    inputs = RunInputs(config)
    for check in (folder, model_files, reward_files, algorithm_files, agent_files, environment_files):
        check(inputs)


def _job(options: argparse.Namespace, kind: str, config: Config) -> Job:
    from ..submit.job import make_job, plan_nodes

    run_dir = Path(config.run.dir)
    if not is_folder(options.config) and run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(
            f"run.dir: {run_dir} is not empty; resume it with `slipstream submit {kind} {shlex.quote(str(run_dir))}`, "
            "or name a new folder"
        )
    gpus, memory = options.gpus_per_node, options.memory
    if gpus < 0:
        raise ConfigError(f"--gpus-per-node: {gpus} is negative; allowed are 0 and more")
    nodes = plan_nodes(config, nodes=options.nodes, cpus=options.cpus_per_node, gpus=gpus, memory=memory)
    return make_job(config, name=options.name, nodes=nodes, time=options.time)


def _finish(options: argparse.Namespace, job: Job, text: str, ending: str, command: list[str]) -> int:
    """Write the job, and submit it where this is asked for. Raises ConfigError where the file exists, SubmitError."""
    path = Path(options.out or f"{job.name}.{ending}")
    if options.submit and shutil.which(command[0]) is None:
        raise ConfigError(f"--submit: there is no program {command[0]} on the PATH")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--out: {path} exists; name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None
    command = [*command, str(path)]
    hint = "" if options.submit else f"; submit it with `{' '.join(command)}`"
    print_line(f"{path}: {job.nodes}{hint}")
    if options.submit:
        print_line(_submit(command))
    return 0


def _submit(command: list[str]) -> str:
    """What the cluster's command answers."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_S, check=True)
    except subprocess.TimeoutExpired:
        raise SubmitError(f"`{' '.join(command)}` gave no answer within {SUBMIT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise SubmitError(f"`{' '.join(command)}` ended with {error.returncode}: {error.stderr.strip()}") from None
    return done.stdout.strip()
