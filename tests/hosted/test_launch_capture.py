"""What a listener between the hosts of a run can read: every frame is captured during start, run, restarts and resume, and none of
them holds a private key or a token of any process. Four hosts, each a network namespace with a Ray node."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.chaos.hosts import Hosts
from slipstream.rpc.security import make_pair
from slipstream.tests import forkgate
from slipstream.tests.hosts import CLUSTER, HostedRun, needs_namespaces
from slipstream.tests.patient_env import PATIENT
from slipstream.tests.runs import check_accounts, tiny_policy
from slipstream.tests.secrets_search import (
    forms,
    found_in,
    processes_of_run,
    secret_in_memory,
    secrets_of_roles,
    supervisor_key,
)

LOOK_S = 0.5
"""Between two looks for the secrets of processes: each lives for seconds."""


def test_a_secret_is_found_however_it_is_written() -> None:
    secret, token = make_pair().secret, "5b" * 32
    for one in (secret, token):
        written = list(forms(one))
        assert len(written) > 12
        for form in written:
            assert found_in(b"before " + form + b" after", (secret, token)) == [one]
    assert found_in(b"nothing of the kind", (secret, token)) == []


CAPTURE = """
import signal, socket, struct, sys
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # ETH_P_ALL
frames.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
frames.bind(("eth0", 0))
statistics = 263, 6, 8  # PACKET_STATISTICS of SOL_PACKET: frames, and those that were dropped
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(struct.unpack("II", frames.getsockopt(*statistics))[1])))
print("listening", flush=True)
with open(sys.argv[1], "wb", 0) as file:
    while True:
        frame, address = frames.recvfrom(1 << 17)
        if address[2] != socket.PACKET_OUTGOING:
            file.write(frame)
"""
"""Run in a namespace: writes what arrives at eth0 to the file, frame after frame; at its end it says how many were dropped."""


@contextlib.contextmanager
def captured(hosts: Hosts, folder: Path) -> Iterator[list[Path]]:
    """Files with every frame that reaches a host from another: each that passes between hosts once."""
    assert hosts.namespaces is not None
    files, listening = [folder / f"host-{host}.frames" for host in range(len(hosts))], []
    for host, file in enumerate(files):
        command = hosts.namespaces.command(host, [sys.executable, "-c", CAPTURE, str(file)])
        listening.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        said = listening[-1].stdout
        assert said is not None
        assert said.readline() == b"listening\n"
    try:
        yield files
    finally:
        for one in listening:
            one.terminate()
        dropped = [one.communicate(timeout=30)[0] for one in listening]
    assert dropped == [b"0\n"] * len(listening)


class SecretCollector:
    """Remembers the secrets of all processes that a run has while the context lasts."""

    def __init__(self, run_dir: Path) -> None:
        self.secrets: dict[str, str] = {}
        self._run_dir = run_dir
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> SecretCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.secrets |= secrets_of_roles(self._run_dir)

    def add_supervisor(self, pid: int) -> None:
        """The key of the supervisor, process `pid`."""
        _, _, variables = next(processes_of_run(self._run_dir))
        secret = secret_in_memory(pid, supervisor_key(variables))
        assert secret is not None
        self.secrets[secret] = f"key of the supervisor {pid}"


def kill(run: HostedRun, *roles: str) -> None:
    """Kill roles, and wait for the next process of each."""
    before = {role: run.roles()[role][1] for role in roles}
    for process in before.values():
        process.kill()

    def again() -> bool:
        found = run.roles()
        return all(role in found and found[role][1].pid != process.pid for role, process in before.items())

    run.until(again, "the roles again")


@pytest.mark.full
@needs_namespaces
@pytest.mark.timeout(1200)  # each wait has a deadline of its own
def test_no_frame_between_hosts_holds_a_secret(four: Hosts, tmp_path: Path) -> None:
    planted = make_pair().secret
    policy = tiny_policy(tmp_path / f"policy-{planted.encode().hex()}")  # a path, which all are given through Ray
    # Few roles of each kind, and weights stay on their host: else they would be most of the traffic, and they hold nothing to find.
    # One worker is on another host than the server.
    settings = (
        "rollout.engine.kind=transformers",
        "rollout.engine.replicas=1",
        "rollout.workers=2",
        "learner.backend.ranks=1",
        "learner.checkpoint_every=2",
        "launch.heartbeat_s=60",
    )
    arguments = (f"model.path={policy}", *CLUSTER, *settings, *PATIENT)
    run_dir = tmp_path / "run"
    collector = SecretCollector(run_dir)
    with forkgate.gated(), captured(four, tmp_path) as files:
        with collector, HostedRun(four, run_dir, "chaos", *arguments, executed=True) as run:
            run.until_steps(2)
            assert run.places() == {"buffer": 0, "engine-0": 1, "learner-0": 1, "worker-0": 1, "worker-1": 2}
            collector.add_supervisor(run.process.pid)
            kill(run, "worker-1", "engine-0", "learner-0", "buffer")
            run.until_steps(1)
            run.call("replicas", str(run_dir), "list")
            run.stop()
            run._command("resume", str(run_dir))
            run.until_steps(2)
            collector.add_supervisor(run.process.pid)
            run.stop()
        check_accounts(run_dir)
    owners = sorted(collector.secrets.values())
    assert {"token for requests", "token for control"} <= set(owners)
    assert sum(owner.startswith("TLS key of engine") for owner in owners) >= 3
    for role in ("buffer", "learner-0", "worker-1", "engine-0"):
        assert owners.count(f"key of {role}") >= 3, owners  # the first, the restarted, the resumed
    assert sum(owner.startswith("key of the supervisor") for owner in owners) == 2
    frames = [file.read_bytes() for file in files]
    assert sum(map(len, frames)) > 1 << 20
    assert any(found_in(data, (planted,)) for data in frames)
    leaked = {collector.secrets[secret] for data in frames for secret in found_in(data, collector.secrets)}
    assert leaked == set()
    for log in (run_dir / "logs").iterdir():
        assert found_in(log.read_bytes(), collector.secrets) == [], log
    for file in (run_dir / "config.yaml", run_dir / "metrics.jsonl"):
        assert found_in(file.read_bytes(), collector.secrets) == []
