"""A stand-in for Kubernetes with KubeRay's operator, which runs the containers of a RayJob as processes of this machine.

What is real: the manifest, Ray, the supervisor and all its roles. What is a stand-in: a pod is a process group with an address of
the loopback network, without an image and without limits; the mount of the config is a folder, whose path replaces that in the
entrypoint, and a volume is the folder of its path; the entrypoint is started with RAY_ADDRESS, as Ray's job supervisor does, but
without Ray's dashboard, which needs ray[default].
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
from slipstream.launch.launchers.local import free_ports
from slipstream.launch.submit.kubernetes import CONFIG_DIR
from slipstream.tests import forkgate

HEAD_POD, WORKER_POD = "127.0.0.2", "127.0.0.{}"
JOIN_S = 120.0


class FakeKubeRay:
    def __init__(self, manifest: Path, folder: Path) -> None:
        config_map, _, job = yaml.safe_load_all(manifest.read_text())
        self.spec: Mapping[str, Any] = job["spec"]
        self.folder = folder
        folder.mkdir()
        for name, text in config_map["data"].items():
            (folder / name).write_text(text)

    @contextlib.contextmanager
    def attempt(self, output: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]]]]:
        """The entrypoint on a cluster that is made for it, and the pods, the head's first."""
        cluster, (port,) = self.spec["rayClusterSpec"], free_ports(1, HEAD_POD)
        address, pods = f"{HEAD_POD}:{port}", list[subprocess.Popen[bytes]]()
        sessions = tempfile.mkdtemp(prefix="k-")  # Ray's sockets need a short path
        head = ["--head", f"--port={port}", f"--temp-dir={sessions}", "--include-dashboard=false"]
        groups = [(cluster["headGroupSpec"], head)]
        groups += [(g, [f"--address={address}"]) for g in cluster["workerGroupSpecs"] for _ in range(g["replicas"])]
        # A pod has no file with a token of Ray, as this user may have.
        ours = {"RAY_TMPDIR": sessions, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        environment = os.environ | ours
        folders = (*forkgate.programs(), str(Path(sys.executable).parent), environment["PATH"])
        environment["PATH"] = os.pathsep.join(folders)
        try:
            with output.open("ab") as log:

                def start(command: list[str], **more: str) -> subprocess.Popen[bytes]:
                    return subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment | more,
                        start_new_session=True,
                    )

                for i, (group, options) in enumerate(groups):
                    parameters = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
                    ray = [
                        sys.executable,
                        "-m",
                        "slipstream.chaos.ray_node",
                        "start",
                        "--block",
                        "--include-log-monitor=false",
                    ]
                    pods.append(start([*ray, f"--node-ip-address={WORKER_POD.format(2 + i)}", *options, *parameters]))
                    _await_listener(HEAD_POD, port, pods[0], output)
                entrypoint = self.spec["entrypoint"].replace(CONFIG_DIR, str(self.folder))
                driver = start(["bash", "-c", entrypoint], RAY_ADDRESS=address)
                pods.append(driver)
                yield driver, pods[:-1]
        finally:
            for pod in reversed(pods):
                delete(pod)
            shutil.rmtree(sessions, ignore_errors=True)


def delete(pod: subprocess.Popen[bytes]) -> None:
    """End the processes of a pod at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        main = psutil.Process(pod.pid)
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    pod.wait()


def _await_listener(host: str, port: int, head: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            assert head.poll() is None, f"the head ended:\n{output.read_text()[-5000:]}"
            assert time.monotonic() < deadline, f"nothing listens at {host}:{port} within {JOIN_S} s"
            time.sleep(0.2)
