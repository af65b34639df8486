"""Runs over several hosts, each a network namespace of this machine with a Ray node: ranks meet across hosts, lost hosts are
replaced, networks are slow and break."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slipstream.chaos.audit import audit
from slipstream.chaos.hosts import RESOLVER, Hosts, Namespaces
from slipstream.chaos.switch import LinkState, has_ended
from slipstream.errors import ConfigError
from slipstream.launch.supervisor.factory import CLIENT_FACTORY
from slipstream.tests import forkgate
from slipstream.tests.hosts import CLUSTER, HostedRun, needs_namespaces
from slipstream.tests.patient_env import PATIENT
from slipstream.tests.runs import WAIT_S, check_accounts, leftovers, metrics, slipstream

pytestmark = [needs_namespaces, pytest.mark.timeout(1200)]  # each wait has a deadline of its own
log = logging.getLogger(__name__)

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(1 << 20):
        connection.sendall(data)
"""
"""Sends back what it gets."""

CLIENT = """
import socket, sys, time
try:
    connection = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
    began = time.monotonic()
    connection.sendall(b"?")
    connection.recv(1)
    print(time.monotonic() - began)
except OSError as error:
    print(type(error).__name__)
"""
"""Prints the seconds of one round trip."""

RANK = "from slipstream.tests.ranks import add_up; add_up()"


def on(
    hosts: Namespaces, host: int, code: str, *arguments: str, resolver: Path | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Code of this package is forked."""
    prefix = ["env", *(f"{name}={value}" for name, value in variables.items())]
    if resolver is not None:
        mounted = f'mount --bind "$0" {RESOLVER} && exec "$@"'
        prefix += ["unshare", "--mount", "--propagation=private", "sh", "-c", mounted, str(resolver)]
    command = hosts.command(host, [*prefix, forkgate.python(), "-c", code, *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def round_trip(hosts: Namespaces, seconds: float) -> str:
    return on(hosts, 1, CLIENT, hosts.address(0), str(seconds)).communicate(timeout=WAIT_S)[0].strip()


def test_links_between_hosts_are_slow_and_break() -> None:
    with Namespaces(2) as hosts:
        server = on(hosts, 0, SERVER, hosts.address(0))
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        hosts.link(LinkState(1, delay_s=0.5))
        assert float(round_trip(hosts, WAIT_S)) >= 1.0
        hosts.link(LinkState(1, up=False))
        assert round_trip(hosts, 1.0) == "TimeoutError"
        hosts.link(LinkState(1, unreachable=(0,)))
        assert round_trip(hosts, 1.0) == "TimeoutError"
        hosts.link(LinkState(1))
        assert any(float(round_trip(hosts, WAIT_S)) < 1.0 for _ in range(20))  # this machine may be slow, too
        assert [process.pid for process in hosts.processes(0)] == [server.pid]
    assert server.wait(WAIT_S) == -9  # it went with its host
    assert hosts._switch.returncode == 0  # which did not wait for this process to ask for its status


def test_ranks_on_two_hosts_meet(tmp_path: Path) -> None:
    """By default gloo listens on the address of the host's name, which is often one of loopback."""
    (resolver := tmp_path / "resolv.conf").touch()  # nothing that a namespace would wait for when it asks for names
    with Namespaces(2) as hosts:
        meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        ranks = [on(hosts, rank, RANK, resolver=resolver, RANK=str(rank), **meeting) for rank in range(2)]
        assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["6.0\n"] * 2


def name_of(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


@pytest.mark.full
def test_hosts_of_a_user_who_may_make_no_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.chaos.hosts.may_make_namespaces", lambda: False)
    with Hosts([1, 1], tmp_path) as hosts:
        before = [set(hosts.processes(host)) for host in range(2)]
        servers = [process for process in before[0] if name_of(process) in ("gcs_server", "raylet")]
        assert all(before)
        assert not before[0] & before[1]
        hosts.kill(1)
        assert all(map(has_ended, before[1]))
        assert len(servers) == 2  # Ray starts others that soon end
        assert not any(map(has_ended, servers))
        hosts.revive()
        with hosts.frozen(1):
            found = [process.status() for process in hosts.processes(1)]
            assert psutil.STATUS_STOPPED in found
            assert set(found) <= {
                psutil.STATUS_STOPPED,
                psutil.STATUS_ZOMBIE,
            }  # one that ended before its parent was stopped
    assert all(map(has_ended, before[0]))


@pytest.fixture(scope="module", autouse=True)
def gated() -> Iterator[None]:
    """Roles are forked. A run whose processes are all started as users start them is in test_docs.py."""
    with forkgate.gated():
        yield


def check_audit(run: Path) -> None:
    assert [(check.name, check.problems) for check in audit(run) if check.wrong] == []


@pytest.mark.full
def test_two_hosts_that_do_not_reach_each_other_are_named_before_anything_starts(
    four: Hosts, policy: Path, tmp_path: Path
) -> None:
    assert four.namespaces is not None
    four.namespaces.link(LinkState(1, unreachable=(2,)))
    with HostedRun(four, tmp_path / "run", "chaos", f"model.path={policy}", *CLUSTER) as run:
        assert run.process.wait(WAIT_S) == ConfigError.exit_code, run.output()
    four.namespaces.link(LinkState(1))
    one, other = four.address(1), four.address(2)
    ends = rf"({one} cannot connect to \S+ at {other}|{other} cannot connect to \S+ at {one}):\d+ \("
    assert re.search(ends, run.output()), run.output()
    assert "started, pid" not in run.output()


LAYOUTS = {
    "megatron, delta": ("learner.backend.kind=megatron", "weightsync.transport=delta"),
    "fsdp2, broadcast, placed models": (
        "learner.algorithm={advantage: {kind: gae, lr: 1e-3}, kl: {kind: loss}}",
        "learner.aux_models={reference: 1, critic: 2}",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_learner_on_two_hosts_pushes_its_weights_across(
    four: Hosts, layout: str, policy: Path, tmp_path: Path
) -> None:
    settings = (*CLUSTER, "rollout.workers=1", *PATIENT, *LAYOUTS[layout])
    with HostedRun(four, tmp_path / "run", "chaos", f"model.path={policy}", *settings) as run:
        run.until_steps(3)
        run.call("replicas", str(run.run_dir), "add", "--wait")
        run.until_steps(2)
        places = run.places()
        assert len({places["learner-0"], places["learner-1"], places["engine-2"]}) == 3
        if "placed" in layout:
            assert places["critic-1"] not in (places["learner-0"], places["learner-1"], places["critic-0"])
        run.stop()
    check_accounts(run.run_dir)


CLOCK = """
import os, time
ahead = float(os.environ["CLOCK_AHEAD_S"])
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + ahead
time.time_ns = lambda: real_ns() + int(ahead * 1e9)
"""
"""Imported by every Python process of a host (`sitecustomize`): its wall clock is ahead, its monotonic clock is not."""

AHEAD_S = 600.0
STEPS = 3
STEP_S = 120.0
"""Longest time for `STEPS` steps in any of it: then roles start anew."""


@pytest.mark.full
def test_networks_as_they_are_and_lost_hosts_which_are_no_lost_run(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 ms and 2 % loss; a host that is cut off for longer than Ray and the supervisor wait for it, one that is frozen for as
    long, one whose clock is ahead. Then a lost host of a replica and a worker, and a lost host of everything but the buffer."""
    monkeypatch.setenv(CLIENT_FACTORY, "slipstream.chaos.audited_client:audited_client")
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    ahead = {"PYTHONPATH": str(tmp_path / "clock"), "CLOCK_AHEAD_S": str(AHEAD_S)}
    core, spare = 1, 2
    clocks = {core: ahead}
    with (
        Hosts([1, 5, 4], tmp_path / "hosts", clocks) as hosts,
        HostedRun(hosts, tmp_path / "run", "chaos", f"model.path={policy}", *CLUSTER, *PATIENT) as run,
    ):
        run.until_steps(2)
        assert run.places()["learner-0"] == core
        assert metrics(run.run_dir)[0]["time"] > time.time() + AHEAD_S / 2
        check_networks(hosts, run, spare)
        run.call("replicas", str(run.run_dir), "add", "--wait")
        engines = {"engine-0": core, "engine-1": core, "engine-2": spare}
        ranks = {"learner-0": core, "learner-1": core}
        places = {"buffer": 0, **engines, **ranks, "worker-0": core, "worker-1": spare}
        run.until(lambda: run.places() == places, f"{places}")
        clocks[spare] = ahead  # so that the learner's next host has the time of its first
        check_lost_hosts(hosts, run, core, spare)
        run.stop()
    assert "is lost with its host" in run.log.read_text()
    check_accounts(run.run_dir)
    check_audit(run.run_dir)


def check_networks(hosts: Hosts, run: HostedRun, spare: int) -> None:
    """The run goes on while links are slow, and while `spare`, the host of a worker, is cut off and frozen until it is missed: a
    silent role after 10 s, a lost host after 15."""
    links, seconds = hosts.namespaces, dict[str, float]()
    assert links is not None

    def misses() -> int:
        return run.log.read_text(errors="replace").count("the place of worker-1 at")

    def waits() -> set[str]:
        return {row["wait"]["waits_for"] for row in json.loads(run.call("waits", str(run.run_dir), "--json"))}

    def worker_after(missed: psutil.Process | None) -> psutil.Process:
        """Another worker than `missed`, on a host that is back. It may end once more: Ray ends its node some time after the node
        reaches the head, which has given it up."""
        found: list[psutil.Process] = []

        def there() -> bool:
            hosts.revive()
            host, worker = run.roles().get("worker-1", (None, missed))
            if host == spare and worker is not None and worker != missed:
                found.append(worker)
            return bool(found)

        run.until(there, "a worker on the host that is back")
        return found[0]

    for host in range(len(hosts)):
        links.link(LinkState(host, delay_s=0.0125, loss=0.01))
    seconds["50 ms and 2 % loss, a round trip"] = run.until_steps(STEPS, STEP_S)
    for host in range(len(hosts)):
        links.link(LinkState(host))

    missed, before = worker_after(None), misses()
    links.link(LinkState(spare, up=False))
    seconds["cut off"] = run.until_steps(STEPS, STEP_S)
    run.until(lambda: misses() > before, "the worker to be missed with its host")
    links.link(LinkState(spare))

    missed, before = worker_after(missed), misses()
    with hosts.frozen(spare):
        seconds["frozen"] = run.until_steps(STEPS, STEP_S)
        run.until(lambda: misses() > before, "the worker to be missed with its host")
        run.until(lambda: any("worker-1" in wait for wait in waits()), "the supervisor to wait for it", every=1.0)
    worker_after(missed)
    times = [row["time"] for row in metrics(run.run_dir)]
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    log.info("seconds for %d steps: %s; at most %.1f s between two", STEPS, seconds, longest)
    assert longest < STEP_S


def check_lost_hosts(hosts: Hosts, run: HostedRun, core: int, spare: int) -> None:
    """They are lost replicas, workers and ranks: the run goes on without `spare`, has it again with more room, and goes on there
    without `core`."""
    hosts.kill(spare)
    log.info("two steps, %.0f s after the host of a worker and an engine was lost", run.until_steps(2, STEP_S))

    def state(worker: str) -> str:
        rows = json.loads(run.call("workers", str(run.run_dir), "list", "--json"))
        return next(row["state"] for row in rows if row["name"] == worker)

    # Ray says that the host is lost some time after it is, and the steps do not wait for it.
    run.until(lambda: state("worker-1") == "waits for a place", "worker-1 to miss its place", every=1.0)
    hosts.cpus[spare] = 9
    hosts.start(spare)
    back = {"worker-1", "engine-2"}
    run.until(lambda: {role for role, host in run.places().items() if host == spare} >= back, "both to be back")
    run.call("workers", str(run.run_dir), "add")
    run.until(lambda: run.places().get("worker-2") == spare, "another worker")
    run.call("workers", str(run.run_dir), "remove", "worker-2")
    run.until(lambda: "worker-2" not in run.places(), "worker-2 to leave")

    run.call("set", str(run.run_dir), "learner.checkpoint_every=1000000")
    run.until_steps(3)  # so that the newest checkpoint is not of the last step
    before = len(metrics(run.run_dir))
    hosts.kill(core)
    began = time.monotonic()
    run.until(lambda: run.places().get("learner-0") == spare, "the learner on another host")
    run.until_steps(1)
    log.info("the learner goes on %.0f s after its host was lost", time.monotonic() - began)
    run.until_steps(2)
    # It went on from a checkpoint.
    assert any(row["version"] > row["step"] for row in metrics(run.run_dir)[before:])


@pytest.mark.full
def test_chaos_on_hosts(policy: Path, tmp_path: Path) -> None:
    """The seed is one whose faults hit a role of every kind and last seconds: those that last longer are in the test above."""
    arguments = ("chaos", "--hosts=3", "--kills=3", "--links=2", "--seed=2101", "--hang=300", "--json")
    done = slipstream(
        "chaos", *arguments, f"model.path={policy}", f"run.dir={tmp_path / 'run'}", check=False, seconds=1500.0
    )
    report = json.loads(done.stdout)
    log.info("%s", json.dumps(report, indent=1))
    assert report["problems"] == []
    assert report["faults"] == {"kill": 3, "stop": 1, "lost": 1, "frozen": 1, "cut": 1, "slow": 1}
    assert leftovers(tmp_path / "run") == []
