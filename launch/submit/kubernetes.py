"""The manifest of a run for KubeRay: a RayJob, the config that it mounts, and a policy that only its own pods may connect to them.

Invariants:
- Paths in the config are those of the containers. The run's folder is on a volume, so that the next attempt resumes the run.
- KubeRay makes a new cluster for each attempt. An attempt that fails, or whose time is over, is followed by another one, `retries`
  times.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import msgspec
import yaml

from ...configs import dump
from ...configs.yaml_text import Dumper
from ...errors import ConfigError
from .job import OBJECT_STORE, Job

LONGEST_NAME = 47  # KubeRay's limit for a RayJob: it derives the names of services and pods
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")  # RFC 1123
RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")
CONFIG_DIR, CONFIG_FILE = "/etc/slipstream", "config.yaml"
HEAD_PORTS = {
    "gcs-server": 6379,
    "dashboard": 8265,
    "client": 10001,
}  # of Ray, as KubeRay's service of the head expects them
LABEL = "slipstream/run"

Manifest = dict[str, Any]  # what `yaml.dump` writes; its schema is KubeRay's


class Volume(msgspec.Struct, frozen=True):
    """A PersistentVolumeClaim, mounted in every pod."""

    claim: str
    path: str


class Pods(msgspec.Struct, frozen=True):
    """What the pods of a job are made of."""

    image: str
    namespace: str = ""
    volumes: tuple[Volume, ...] = ()
    secrets: tuple[str, ...] = ()  # whose entries become environment variables
    retries: int = 3
    gpu_resource: str = ""  # by which the cluster counts GPUs; empty is that of the accelerator's vendor


def parse_volume(text: str) -> Volume:
    """`CLAIM:PATH`. Raises ConfigError naming `--volume`."""
    claim, _, path = text.partition(":")
    if not NAME.fullmatch(claim) or not PurePosixPath(path).is_absolute():
        raise ConfigError(f"--volume: {text!r} is not of the form CLAIM:/PATH, for example runs:/runs")
    return Volume(claim, path)


def manifest(job: Job, pods: Pods) -> str:
    """The documents for `kubectl create`, as YAML. Raises ConfigError."""
    _check(job, pods)
    metadata = {"name": job.name, "labels": {LABEL: job.name}} | (
        {"namespace": pods.namespace} if pods.namespace else {}
    )
    documents: list[Manifest] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CONFIG_FILE: dump(job.config)}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": _policy(job)},
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": _ray_job(job, pods)},
    ]
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _check(job: Job, pods: Pods) -> None:
    names = {"--name": job.name, "--namespace": pods.namespace} | {f"--secret {name}": name for name in pods.secrets}
    for flag, value in names.items():
        if value and (not NAME.fullmatch(value) or len(value) > LONGEST_NAME):
            raise ConfigError(
                f"{flag}: {value!r} is not allowed; allowed are up to {LONGEST_NAME} small letters, digits and -, with a letter or "
                "digit at both ends"
            )
    if not pods.image.strip() or re.search(r"\s", pods.image):
        raise ConfigError(f"--image: {pods.image!r} is no name of an image, for example registry.example/slipstream:1")
    if pods.gpu_resource and not RESOURCE.fullmatch(pods.gpu_resource):
        raise ConfigError(f"--gpu-resource: {pods.gpu_resource!r} is not of the form VENDOR/NAME, as amd.com/gpu is")
    if pods.retries < 0:
        raise ConfigError(f"--retries: {pods.retries} is negative; allowed are 0 and more")
    folder, paths = PurePosixPath(job.config.run.dir), [volume.path for volume in pods.volumes]
    if not any(folder.is_relative_to(path) for path in paths):
        raise ConfigError(
            f"run.dir: {folder} is on no volume ({', '.join(paths) or '--volume names none'}), and would be lost with its pod; "
            "allowed is an absolute path below that of a --volume CLAIM:/PATH"
        )


def entrypoint(job: Job) -> str:
    """The command of the supervisor, which KubeRay has Ray start on the head. An attempt whose time is over is interrupted as by
    SIGTERM, and the run resumed by the next attempt."""
    command = ["slipstream", "train", f"{CONFIG_DIR}/{CONFIG_FILE}", "--resume"]
    if job.time_s is not None:
        seconds = job.time_s - job.interrupt_s
        command = ["timeout", "--signal=TERM", f"--kill-after={job.interrupt_s}", str(seconds), *command]
    return shlex.join(command)


def _ray_job(job: Job, pods: Pods) -> Manifest:
    head = {"rayStartParams": _start_parameters(job), "template": _pod(job, pods, "ray-head", HEAD_PORTS)}
    cluster: Manifest = {"rayVersion": version("ray"), "headGroupSpec": head}
    if others := job.nodes.count - 1:
        count = {"replicas": others, "minReplicas": others, "maxReplicas": others}
        worker = {"rayStartParams": _start_parameters(job), "template": _pod(job, pods, "ray-worker", {})}
        cluster["workerGroupSpecs"] = [{"groupName": "workers", **count, **worker}]
    limit = {} if job.time_s is None else {"activeDeadlineSeconds": job.time_s * (pods.retries + 1)}
    return {
        "entrypoint": entrypoint(job),
        "backoffLimit": pods.retries,
        **limit,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }


def _start_parameters(job: Job) -> dict[str, str]:
    name, gpus = job.accelerator.resource, job.nodes.gpus
    # KubeRay pastes the value into a shell's command.
    devices = {"num-gpus": str(gpus)} if name == "GPU" else {"resources": json.dumps(json.dumps({name: gpus}))}
    return {"num-cpus": str(job.nodes.cpus), **devices, "object-store-memory": str(OBJECT_STORE)}


def _pod(job: Job, pods: Pods, name: str, ports: dict[str, int]) -> Manifest:
    nodes = job.nodes
    resources = {"cpu": str(nodes.cpus)}
    resources |= {"memory": str(nodes.memory)} if nodes.memory else {}
    resources |= {pods.gpu_resource or job.accelerator.kubernetes: str(nodes.gpus)} if nodes.gpus else {}
    mounts = {"config": CONFIG_DIR, "shared-memory": "/dev/shm"} | {f"claim-{v.claim}": v.path for v in pods.volumes}
    container: Manifest = {
        "name": name,
        "image": pods.image,
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }
    if ports:
        container["ports"] = [{"name": port, "containerPort": number} for port, number in ports.items()]
    if pods.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in pods.secrets]
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": job.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # of NCCL, engines and Ray; the default is 64 MiB
        *({"name": f"claim-{v.claim}", "persistentVolumeClaim": {"claimName": v.claim}} for v in pods.volumes),
    ]
    return {"metadata": {"labels": {LABEL: job.name}}, "spec": {"containers": [container], "volumes": volumes}}


def _policy(job: Job) -> Manifest:
    """Pods of the job accept connections from each other. Others, such as KubeRay's operator, reach the dashboard alone, by which
    the operator starts the run."""
    own = {"podSelector": {"matchLabels": {LABEL: job.name}}}
    dashboard = {"ports": [{"port": HEAD_PORTS["dashboard"], "protocol": "TCP"}]}
    return {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}, dashboard]}
