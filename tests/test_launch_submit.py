"""Jobs for Slurm and for Kubernetes: what is written, what is refused, and a run whose job is requeued."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import psutil
import pytest
import yaml
from jsonschema import Draft202012Validator
from slipstream.configs import Config, dump, load
from slipstream.errors import ConfigError
from slipstream.launch.cli import submit
from slipstream.launch.submit.job import Nodes, make_job, parse_time, plan_nodes
from slipstream.launch.submit.kubernetes import Pods, manifest, parse_volume
from slipstream.launch.submit.slurm import batch_script
from slipstream.tests import forkgate
from slipstream.tests.fake_kuberay import FakeKubeRay, delete
from slipstream.tests.fake_slurm import FakeSlurm
from slipstream.tests.kuberay import RAY_JOB
from slipstream.tests.runs import SMALL, WAIT_S, check_accounts, leftovers, metrics

MANY = "launch.kind=ray_cluster"
GPUS = (
    "learner.backend.device=cuda",
    "learner.backend.ranks=4",
    "rollout.engine.replicas=2",
    "rollout.engine.options.tensor_parallel_size=4",
)
PODS = Pods("registry.example/slipstream:1", "training", (parse_volume("runs:/runs"),), ("hub",))


def config_of(*keys: str) -> Config:
    return load("quickstart", (MANY, *keys))


def script_of(*keys: str, time: str = "04:00:00", **options: Any) -> str:
    config = config_of(*keys)
    return batch_script(
        make_job(config, name="mine", nodes=plan_nodes(config, gpus=8, memory="64GiB"), time=time), **options
    )


def documents(*keys: str, gpus: int = 8, pods: Pods = PODS, time: str = "") -> list[dict[str, Any]]:
    config = config_of("run.dir=/runs/mine", *keys)
    return list(
        yaml.safe_load_all(manifest(make_job(config, name="", nodes=plan_nodes(config, gpus=gpus), time=time), pods))
    )


def command(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    submit = [sys.executable, "-m", "slipstream.launch.cli", "submit", *words]
    return subprocess.run(submit, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


# --- nodes --------------------------------------------------------------------------------------------------------


def test_as_few_nodes_as_the_gpus_fit_on():
    config = config_of(*GPUS)  # 2 replicas of 4 GPUs, 4 ranks of one
    assert plan_nodes(config, gpus=8) == Nodes(2, 7, 8)  # the 4 ranks, and the 3 roles without GPUs
    assert plan_nodes(config, gpus=4).count == 3
    assert plan_nodes(config, nodes=4, gpus=8) == Nodes(4, 7, 8)
    assert plan_nodes(config, nodes=3, cpus=64, gpus=8, memory="1GiB") == Nodes(3, 64, 8, 1 << 30)
    small = config_of("learner.backend.device=auto")
    assert plan_nodes(small, nodes=2) == Nodes(2, 3, 0)  # 5 roles


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 0}, ("--gpus-per-node: 0", "learner.backend.device=cuda")),
        ({"gpus": 2}, ("--gpus-per-node", "engine-0 needs 4", "tensor_parallel_size", "4 and more")),
        ({"gpus": 8, "nodes": 1}, ("--nodes: 1", "learner-3", "need 12 GPUs", "2 and more")),
        ({"gpus": 8, "cpus": 2}, ("--cpus-per-node: 2", "9 roles", "5 and more")),
        ({"gpus": 8, "memory": "64G"}, ("--memory", "'64G'", "GiB")),
    ],
)
def test_nodes_that_do_not_fit(options: dict[str, Any], said: tuple[str, ...]):
    with pytest.raises(ConfigError) as refused:
        plan_nodes(config_of(*GPUS), **options)
    assert all(part in str(refused.value) for part in said)


def test_the_time_is_long_enough_to_be_interrupted():
    assert (parse_time("1-02:03:04"), parse_time("30:00:00")) == (93784, 108000)
    for wrong in ("60", "1:60:00", "two hours", "1-2"):
        with pytest.raises(ConfigError, match=r"--time: .*DAYS"):
            parse_time(wrong)
    config = config_of("launch.heartbeat_s=60")
    job = make_job(config, name="", nodes=plan_nodes(config), time="2-00:00:00")
    assert (job.interrupt_s, job.time, job.name) == (140, "48:00:00", "quickstart")
    with pytest.raises(
        ConfigError, match=r"--time: 00:05:00 is too short: .* 140 s before the end.* allowed are 440 s"
    ):
        make_job(config, name="", nodes=plan_nodes(config), time="00:05:00")
    with pytest.raises(ConfigError, match=r"launch.kind: local .*launch.kind=ray_cluster"):
        make_job(load("quickstart"), name="", nodes=plan_nodes(config), time="")


# --- Slurm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        (GPUS, {"interface": "ib0", "options": ["--partition=gpu,big", "--account=rl", "--exclusive"]}),
        ((), {"time": ""}),
    ],
)
def test_a_script_that_bash_and_shellcheck_accept(
    keys: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    script = tmp_path / "mine.sbatch"
    script.write_text(script_of(*keys, **options))
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for check in (
        ["bash", "-n"],
        [str(shellcheck), "--shell=bash", "--enable=all", "--exclude=SC2154,SC2250,SC2292,SC2310,SC2311,SC2312,SC2329"],
    ):
        done = subprocess.run([*check, str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stdout


def test_a_script_asks_for_what_the_config_needs(tmp_path: Path) -> None:
    text = script_of(*GPUS, options=["--partition=gpu"])
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert asked == {
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=7",
        "--gpus-per-node=8",
        "--mem=65536M",
        "--time=04:00:00",
        "--signal=B:USR1@120",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        "--partition=gpu",
    }
    kept = tmp_path / "config.yaml"
    kept.write_text(text.split("END_OF_THE_CONFIG'\n")[1].split("END_OF_THE_CONFIG")[0])
    assert load(str(kept)) == config_of(*GPUS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interface": "ib0; rm -rf /"}, "--interface: 'ib0; rm -rf /' is not allowed"),
        ({"options": ["--partition=a b"]}, "--sbatch: '--partition=a b' is not of the form"),
        ({"options": ["-p"]}, "--sbatch: '-p' is not of the form"),
        ({"options": ["--x=1\nrm -rf /"]}, "--sbatch: .* is not of the form"),
    ],
)
def test_options_of_slurm_that_are_no_words(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        script_of(**options)


def test_a_loss_that_is_nowhere_is_named_before_a_job_is_written(policy: Path, tmp_path: Path) -> None:
    loss = "learner.algorithm.loss={kind: python, function: 'nowhere_at_all:loss'}"
    with pytest.raises(ConfigError, match=r"learner\.algorithm\.loss\.function: cannot import 'nowhere_at_all'"):
        submit._check_files(config_of(f"model.path={policy}", f"run.dir={tmp_path / 'run'}", loss))


def test_submitting_to_slurm(policy: Path, tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    words = ["slurm", "quickstart", MANY, f"model.path={policy}", "run.dir=runs/mine", "--nodes=2", "--time=01:00:00"]
    done = command(*words, "--submit", "--partition=cpu", cwd=tmp_path, env=slurm.environment)
    assert done.returncode == 0, done.stderr
    (number,) = slurm.queue
    assert done.stdout.splitlines() == [
        "mine.sbatch: 2 nodes with 3 CPUs and 0 GPUs each",
        f"Submitted batch job {number}",
    ]
    assert slurm.job(number)["partition"] == "cpu"
    text = (tmp_path / "mine.sbatch").read_text()
    assert f"cd {shlex.quote(str(tmp_path))}" in text
    assert f"dir: {tmp_path}/runs/mine" in text

    def refused(*words: str, env: dict[str, str] | None = None) -> str:
        done = command(*words, cwd=tmp_path, env=env or slurm.environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        return done.stderr

    assert "--out: mine.sbatch exists" in refused(*words)
    assert "launch.kind: local" in refused("slurm", "quickstart", f"model.path={policy}")
    assert "model.path: 'nowhere' is no folder" in refused("slurm", "quickstart", MANY, "model.path=nowhere")
    without = {**slurm.environment, "PATH": "/nowhere"}
    assert "--submit: there is no program sbatch" in refused(*words, "--submit", "--out=again", env=without)
    kept = tmp_path / "runs" / "mine" / "config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text(dump(config_of(f"model.path={policy}")))
    assert "mine is not empty; resume it with `slipstream submit slurm" in refused(*words)
    assert "seed=1: the job resumes runs/mine with its own settings" in refused("slurm", "runs/mine", "seed=1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.sbatch", "runs", "slurm"]
    done = command("slurm", "runs/mine", "--out=again.sbatch", cwd=tmp_path, env=slurm.environment)
    assert done.stdout == "again.sbatch: 1 node with 5 CPUs and 0 GPUs each; submit it with `sbatch again.sbatch`\n", (
        done
    )


PROGRAM = """#!/bin/bash
case "$*" in
  *" ray.scripts.scripts "*--head*) exec {python} -c 'import os, socket, time
host, port = os.environ["HEAD"], int(os.environ["PORT"])
listener = socket.create_server((host, port)); time.sleep(600)' ;;
  *" ray.scripts.scripts "*) exec sleep 600 ;;
esac
[[ "$*" == *" train "*" --resume" && -n "$RAY_ADDRESS" && -n "$RAY_AUTH_TOKEN" ]] || exit 99
trap 'exit 130' TERM
echo "$RAY_ADDRESS" > {folder}/trains
[ {status} = waits ] || exit {status}
sleep 600 & wait
"""
"""Stands in for Python: a Ray head that only listens, Ray nodes that sleep, and a run that ends with a status, or with a signal."""


@pytest.mark.parametrize(
    ("run_ends", "sent", "down", "status", "requeued"),
    [
        ("0", None, False, 0, False),
        ("waits", signal.SIGUSR1, False, 130, True),  # its time is nearly over
        ("waits", signal.SIGTERM, False, 130, False),  # scancel, or a preemption, after which Slurm requeues
        ("1", None, False, 1, False),
        ("1", None, True, 1, True),  # a node is lost
        ("2", None, True, 2, False),
    ],
)
def test_which_jobs_are_requeued(
    run_ends: str, sent: signal.Signals | None, down: bool, status: int, requeued: bool, tmp_path: Path
) -> None:
    slurm, program, trains = FakeSlurm(tmp_path / "slurm"), tmp_path / "python", tmp_path / "trains"
    program.write_text(PROGRAM.format(python=sys.executable, folder=tmp_path, status=run_ends))
    program.chmod(0o755)
    script = tmp_path / "job.sbatch"
    text = script_of("learner.backend.device=auto", f"run.dir={tmp_path}/run", time="01:00:00")
    script.write_text(
        text.replace(f"PYTHON={sys.executable}", f"PYTHON={program}").replace("#SBATCH --nodes=1", "#SBATCH --nodes=2")
    )
    done = subprocess.run(["sbatch", str(script)], env=slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (number,) = slurm.queue
    if down:
        slurm.mark_down("127.0.0.3")
    with slurm.started(number, restarts=0) as shell:
        if sent is not None:
            deadline = time.monotonic() + WAIT_S
            while not trains.exists():
                assert shell.poll() is None, slurm.output(number).read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            shell.send_signal(sent)
        assert shell.wait(WAIT_S) == status, slurm.output(number).read_text()
    assert slurm.requeued(number) == requeued
    assert trains.read_text().startswith("127.0.0.2:")
    assert ("is requeued, to resume" in slurm.output(number).read_text()) == requeued


def until_step(run: Path, step: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """Wait for a step of a run, whose files offer nothing to await."""
    deadline = time.monotonic() + WAIT_S
    while not any(row["step"] >= step for row in metrics(run)):
        assert process.poll() is None, f"the job ended before step {step}:\n{output.read_text()[-5000:]}"
        assert time.monotonic() < deadline, f"no step {step} within {WAIT_S} s:\n{output.read_text()[-5000:]}"
        time.sleep(0.2)


def ray_nodes_of(run: Path) -> set[str]:
    """The raylets under which the roles of a run are."""
    raylets = set[str]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if f'"run_dir":"{run}"' in environment.get("SLIPSTREAM_JOB", ""):
                raylets.add(environment["RAY_RAYLET_PID"])
    return raylets


@pytest.fixture
def gated() -> Iterator[None]:
    """Supervisors and roles are forked."""
    with forkgate.gated():
        yield


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_job_of_slurm_is_requeued_before_its_time_is_over(gated: None, policy: Path, tmp_path: Path) -> None:
    """Slurm and its nodes are stand-ins, see fake_slurm.py; the script, Ray and the run are real. A signal as Slurm sends it before
    the end of the time comes after the second step, and the job starts again."""
    slurm, run = FakeSlurm(tmp_path / "slurm"), tmp_path / "run"
    keys = (
        *SMALL,
        MANY,
        f"model.path={policy}",
        f"run.dir={run}",
        "rollout.engine.kind=transformers",
        "learner.steps=15",
    )
    done = command(
        "slurm", "quickstart", *keys, "--nodes=2", "--time=01:00:00", "--submit", cwd=tmp_path, env=slurm.environment
    )
    assert done.returncode == 0, done.stderr
    (number,) = slurm.queue
    script = slurm.folder / f"job-{number}.sh"
    script.write_text(script.read_text().replace(f"PYTHON={sys.executable}", f"PYTHON={forkgate.python()}"))
    output = slurm.output(number)
    with slurm.started(number, restarts=0) as shell:
        until_step(run, 2, shell, output)
        assert len(ray_nodes_of(run)) == 2
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(WAIT_S) == 130, output.read_text()[-5000:]
    assert slurm.requeued(number)
    steps = len(metrics(run))
    assert 2 <= steps < 15
    with slurm.started(number, restarts=1) as shell:
        assert shell.wait(WAIT_S) == 0, output.read_text()[-5000:]
    assert not slurm.requeued(number)
    said = output.read_text()
    assert f"trains in {run}" in said
    assert f"job {number} is requeued, to resume {run}" in said
    assert f"resumes {run}" in said
    assert sorted(row["step"] for row in metrics(run)) == list(range(1, 16))
    check_accounts(run)
    assert leftovers(run) == []
    shutil.rmtree(f"/tmp/slipstream-{number}", ignore_errors=True)  # Ray's logs, which a node keeps


# --- Kubernetes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "gpus"), [(GPUS, 8), ((), 0)])
def test_a_manifest_that_kubernetes_accepts(keys: tuple[str, ...], gpus: int) -> None:
    """Of KubeRay's own kind its fields are checked, as its documentation lists them, and the pods in it as Kubernetes' pods."""
    config_map, policy, job = documents(*keys, gpus=gpus, time="10:00:00")
    for document in (config_map, policy):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    Draft202012Validator(RAY_JOB).validate(job)
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_a_manifest_asks_for_what_the_config_needs(tmp_path: Path) -> None:
    config_map, policy, job = documents(*GPUS, time="10:00:00")
    kept = tmp_path / "config.yaml"
    kept.write_text(config_map["data"]["config.yaml"])
    assert load(str(kept)) == config_of("run.dir=/runs/mine", *GPUS)
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], job["metadata"]["namespace"]) == (
        3,
        144_000,
        "training",
    )
    assert spec["entrypoint"] == (
        "timeout --signal=TERM --kill-after=120 35880 slipstream train /etc/slipstream/config.yaml --resume"
    )
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], cluster["rayVersion"]) == (1, version("ray"))
    for group in (cluster["headGroupSpec"], workers):
        assert group["rayStartParams"] == {"num-cpus": "7", "num-gpus": "8", "object-store-memory": "100000000"}
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "7", "nvidia.com/gpu": "8"}
        assert {"name": "claim-runs", "mountPath": "/runs"} in container["volumeMounts"]
        assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
        assert group["template"]["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    # Without a limit, and on one node.
    (*_, job) = documents(gpus=0)
    assert job["spec"]["entrypoint"] == "slipstream train /etc/slipstream/config.yaml --resume"
    assert not {"activeDeadlineSeconds"} & set(job["spec"])
    assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]


@pytest.mark.parametrize(
    ("device", "pods", "resource", "ray_counts"),
    [
        ("npu", PODS, "huawei.com/Ascend910", {"resources": r'"{\"NPU\": 8}"'}),
        ("xpu", PODS, "gpu.intel.com/xe", {"num-gpus": "8"}),
        ("cuda", msgspec.structs.replace(PODS, gpu_resource="amd.com/gpu"), "amd.com/gpu", {"num-gpus": "8"}),
    ],
)
def test_other_accelerators_have_other_names(
    device: str, pods: Pods, resource: str, ray_counts: dict[str, str], tmp_path: Path
) -> None:
    keys = (*GPUS, f"learner.backend.device={device}")
    cluster = documents(*keys, pods=pods)[-1]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "7", resource: "8"}
        assert group["rayStartParams"] == {"num-cpus": "7", **ray_counts, "object-store-memory": "100000000"}
    text = script_of(*keys)
    (tmp_path / "mine.sbatch").write_text(text)
    assert subprocess.run(["bash", "-n", str(tmp_path / "mine.sbatch")], check=False).returncode == 0
    npu = device == "npu"
    assert ("#SBATCH --gres=npu:8\n" in text, '--resources="{\\"NPU\\": $GPUS}"' in text) == (npu, npu)
    assert ("#SBATCH --gpus-per-node=8\n" in text, '--num-gpus="$GPUS"' in text) == (not npu, not npu)


@pytest.mark.parametrize(
    ("keys", "pods", "said"),
    [
        ((), Pods("image", "", PODS.volumes, (), 3, "amd"), "--gpu-resource: 'amd' is not of the form VENDOR/NAME"),
        ((), Pods("image", "", (parse_volume("data:/data"),)), r"run\.dir: /runs/mine is on no volume \(/data\)"),
        (("run.dir=runs/mine",), PODS, r"run\.dir: runs/mine is on no volume"),
        (("run.dir=/runs/My_Run",), PODS, "--name: 'My_Run' is not allowed"),
        ((f"run.dir=/runs/{'x' * 48}",), PODS, "--name: .* up to 47"),
        ((), Pods("an image", "", PODS.volumes), "--image: 'an image'"),
        ((), Pods("image", "A", PODS.volumes), "--namespace: 'A'"),
        ((), Pods("image", "", PODS.volumes, ("a b",)), "--secret a b: 'a b'"),
        ((), Pods("image", "", PODS.volumes, (), -1), "--retries: -1"),
    ],
)
def test_manifests_that_are_refused(keys: tuple[str, ...], pods: Pods, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        documents(*keys, pods=pods)
    for wrong in ("runs", "runs:runs", ":/runs", "Runs:/runs"):
        with pytest.raises(ConfigError, match="--volume"):
            parse_volume(wrong)


def test_submitting_to_kubernetes(tmp_path: Path) -> None:
    """`kubectl` is a stand-in, which keeps what it is given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    kubectl = programs / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\n[ "$1 $2" = "create -f" ] || exit 1\ncp "$3" taken.yaml\necho rayjob.ray.io/mine created\n'
    )
    kubectl.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    words = ["k8s", "quickstart", MANY, "run.dir=/runs/mine", "--image=image", "--volume=runs:/runs", "--nodes=2"]
    done = command(*words, "--submit", cwd=tmp_path, env=env)
    assert done.stdout.splitlines() == ["mine.yaml: 2 nodes with 3 CPUs and 0 GPUs each", "rayjob.ray.io/mine created"]
    assert len(list(yaml.safe_load_all((tmp_path / "taken.yaml").read_text()))) == 3
    kubectl.write_text("#!/bin/sh\necho 'error: no matches for kind RayJob' >&2\nexit 1\n")
    failed = command(*words, "--submit", "--out=again.yaml", cwd=tmp_path, env=env)
    assert (failed.returncode, failed.stderr) == (
        1,
        "slipstream: SubmitError: `kubectl create -f again.yaml` ended with 1: error: no matches for kind RayJob\n",
    )
    assert shutil.which("kubectl", path=str(programs))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_attempt_of_a_ray_job_resumes_the_run_of_the_one_before(gated: None, policy: Path, tmp_path: Path) -> None:
    """Kubernetes is a stand-in, see fake_kuberay.py; the manifest, Ray and the run are real. All pods are lost after the second
    step; KubeRay makes another cluster, and the run goes on there."""
    run, output = tmp_path / "runs" / "mine", tmp_path / "output"
    keys = (
        *SMALL,
        MANY,
        f"model.path={policy}",
        f"run.dir={run}",
        "rollout.engine.kind=transformers",
        "learner.steps=15",
    )
    pods = ("--image=image", f"--volume=runs:{tmp_path}", "--nodes=2", "--time=01:00:00", "--out=job.yaml")
    done = command("k8s", "quickstart", *keys, *pods, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kuberay = FakeKubeRay(tmp_path / "job.yaml", tmp_path / "k")
    with kuberay.attempt(output) as (driver, pods):
        until_step(run, 2, driver, output)
        assert len(ray_nodes_of(run)) == 2
        for pod in (driver, *pods):
            delete(pod)
    assert leftovers(run) == []
    with kuberay.attempt(output) as (driver, _):
        assert driver.wait(WAIT_S) == 0, output.read_text()[-5000:]
    assert f"resumes {run}" in output.read_text()
    assert max(row["step"] for row in metrics(run)) == 15
    check_accounts(run)
    assert leftovers(run) == []
