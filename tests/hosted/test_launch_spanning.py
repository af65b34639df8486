"""Replicas whose server spans several hosts: what such a config means, and the real server over two network namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from slipstream.chaos.hosts import Hosts
from slipstream.configs import Config, load
from slipstream.configs.engine_checks import nodes_of
from slipstream.errors import ConfigError, Interrupted, RoleDied
from slipstream.launch.engine_server import serve_engine
from slipstream.launch.launchers.links import pairs_that_talk
from slipstream.launch.launchers.packing import pack
from slipstream.launch.resources import needed_gpus, ranks_of
from slipstream.launch.supervisor.processes import role_names
from slipstream.launch.work_folder import work_folder
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.access import ServerFiles
from slipstream.rollout.engines.launch_common import ServerNode
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.tests import forkgate
from slipstream.tests.hosts import CLUSTER, HostedRun, needs_namespaces
from slipstream.tests.runs import SMALL, check_accounts, leftovers, metrics

PARTS = ["engine-0", "engine-0.1", "engine-1", "engine-1.1"]


def spanning(*words: str, ranks: int = 4, nodes: int = 2) -> Config:
    options = f"rollout.engine.options={{tensor_parallel_size: {ranks}, nnodes: {nodes}}}"
    return load("quickstart", [options, "rollout.engine.kind=vllm", *words])


def test_a_replica_is_a_process_for_each_host_with_its_share_of_the_gpus() -> None:
    config = spanning("rollout.engine.replicas=2")
    assert [name for name in role_names(config) if name.startswith("engine")] == PARTS
    assert ranks_of(config.rollout.engine) == 4
    assert needed_gpus(config, engines=True, learners=False) == dict.fromkeys(PARTS, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), ""),
        (
            ("rollout.engine.options.nnodes=3",),
            "rollout.engine.options.nnodes=3 with tensor_parallel_size=4: each host has as many ranks; allowed are 1, 2, 4",
        ),
        (("rollout.engine.options.nnodes=true",), "nnodes=True with tensor_parallel_size=4: each host has as many ranks"),
        (("rollout.engine.kind=sglang",), "allowed is rollout.engine.kind=vllm, or nnodes=1"),
        (("launch.kind=colocated", "weightsync.transport=shared"), "nnodes=2 with launch.kind=colocated"),
        (("evaluation.every=10",), "nnodes=2 with evaluation.every=10: the server of such evaluations has one host"),
        (("rollout.engine.replicas={https://box1:8000: box1.json}",), "`slipstream serve` is one process; allowed is 1"),
        (
            ("rollout.engine.options.distributed_executor_backend=ray",),
            "distributed_executor_backend='ray' with nnodes: Slipstream starts the process of each host; allowed is mp",
        ),
        (("launch.kind=ray_cluster", "weightsync.transport=shared"), "weightsync.transport=shared is one copy in one host's"),
    ],
)  # fmt: skip
def test_what_such_a_replica_cannot_be_is_one_line(words: tuple[str, ...], said: str) -> None:
    if not said:
        assert nodes_of(spanning(*words).rollout.engine) == 2
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        spanning(*words)


def test_such_a_server_is_not_started_by_hand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nnodes=2: `slipstream serve` is the process of one host; allowed is 1"):
        serve_engine(spanning(), "https://localhost:8000", str(tmp_path / "keys"), print)


def test_the_processes_of_a_server_differ_in_their_rank_and_only_the_first_takes_requests(tmp_path: Path) -> None:
    def words(rank: int) -> tuple[str, dict[str, str]]:
        files = None if rank else ServerFiles(str(tmp_path), tls=True)
        node = ServerNode(rank, "10.0.0.1", 29501)
        line = servers.command(spanning(), f"10.0.0.{rank + 1}", 8000, seed=7, files=files, node=node)
        found = (word.partition("=") for word in line if word.startswith("--"))
        return line[line.index("-m") + 1], {name: value for name, _, value in found}

    (head, first), (follower, second) = words(0), words(1)
    assert (head, follower) == (vllm_server.MODULE, "slipstream.rollout.engines.vllm.follower")
    assert first.keys() - second.keys() == {"--middleware", "--ssl-certfile", "--ssl-keyfile"}
    assert {name for name in second if first[name] != second[name]} == {"--node-rank", "--host"}
    meeting = {"--nnodes": "2", "--master-addr": "10.0.0.1", "--master-port": "29501", "--tensor-parallel-size": "4"}
    assert meeting.items() <= second.items()


def test_the_interface_of_a_host_is_that_of_its_address_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found = servers.environment(spanning(), "127.0.0.1")
    assert (found["VLLM_HOST_IP"], found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == (
        "127.0.0.1",
        "lo",
        "ib0",
    )
    assert "VLLM_HOST_IP" not in servers.environment(spanning())


def test_its_processes_get_different_hosts_as_long_as_there_are_any() -> None:
    free = {"a": {"CPU": 4.0, "GPU": 8.0}, "b": {"CPU": 4.0, "GPU": 8.0}}
    hosts = pack({part: {"CPU": 1.0, "GPU": 2.0} for part in PARTS}, free, {})
    assert hosts["engine-0"] != hosts["engine-0.1"]
    assert hosts["engine-1"] != hosts["engine-1.1"]
    both = {part: {"CPU": 1.0} for part in PARTS[:2]}
    assert pack(both, {"a": {"CPU": 2.0}}, {}) == dict.fromkeys(both, "a")


def test_its_hosts_must_reach_each_other_and_only_the_first_is_reached_by_others() -> None:
    hosts = {"supervisor": "a", "worker-0": "b", "learner-0": "f"} | dict(zip(PARTS, "bcde", strict=True))
    pairs = set(pairs_that_talk(hosts))
    assert {("engine-0", "engine-0.1"), ("engine-0.1", "engine-0"), ("engine-1.1", "engine-1")} <= pairs
    assert ("engine-1", "engine-0.1") not in pairs
    assert {client for client, server in pairs if server == "engine-1.1"} == {"engine-1", "learner-0"}
    assert {client for client, server in pairs if server == "engine-0"} == {"supervisor", "learner-0", "engine-0.1"}


def test_eval_and_rate_work_in_a_folder_that_their_hosts_share(tmp_path: Path) -> None:
    one, several = spanning(), spanning("launch.kind=ray_cluster")
    with work_folder(one, "eval", tmp_path) as here, work_folder(several, "rate", tmp_path) as shared:
        assert here.parent != tmp_path
        assert shared.parent == tmp_path
        assert [path.name for path in shared.iterdir()] == ["logs"]
    with pytest.raises(Interrupted), work_folder(several, "eval", tmp_path):
        raise Interrupted("stopped")
    assert list(tmp_path.iterdir()) == []
    assert not here.exists()
    with pytest.raises(RoleDied), work_folder(several, "eval", tmp_path) as failed:
        raise RoleDied("see its log")
    assert (failed / "logs").is_dir()


# --- the real server ------------------------------------------------------------------------------------------------


@pytest.fixture
def gated() -> Iterator[None]:
    with forkgate.gated():
        yield


def tree(process: psutil.Process) -> set[psutil.Process]:
    return {process, *process.children(recursive=True)}


@pytest.mark.full
@needs_namespaces
@pytest.mark.timeout(1200)
def test_a_server_over_two_hosts_is_pushed_to_and_comes_back_whole(
    gated: None, four: Hosts, policy: Path, tmp_path: Path
) -> None:
    options = "rollout.engine.options={tensor_parallel_size: 2, nnodes: 2}"
    words = (f"model.path={policy}", "rollout.engine.kind=vllm", options, *SMALL, *CLUSTER)
    with HostedRun(four, tmp_path / "run", "quickstart", *words) as run:

        def listed() -> dict[str, Any]:
            (row,) = json.loads(run.call("replicas", str(run.run_dir), "list", "--json"))
            return row

        run.until_steps(3)
        places = run.places()
        assert places["engine-0"] != places["engine-0.1"]
        for number, part in enumerate(("engine-0.1", "engine-0"), start=1):
            victim = run.roles()[part][1]
            before = {one for name in PARTS[:2] for one in tree(run.roles()[name][1])}
            assert len(before) >= 4  # of each host its process and its rank, and the head's engine core
            os.kill(victim.pid, signal.SIGKILL)
            back = {"incarnation": number, "state": "serving"}
            run.until(lambda back=back: back.items() <= listed().items(), f"{part} to be back after a kill", every=1.0)
            assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in before)
            run.until_steps(2)
        assert run.places()["engine-0.1"] == places["engine-0.1"]
        run.stop()
    assert leftovers(run.run_dir) == []
    check_accounts(run.run_dir)
    rows = metrics(run.run_dir)
    assert max(row["canary"] for row in rows) < 1e-3  # what both ranks compute is what the learner does
    assert len({row["version"] for row in rows}) >= 7
    assert re.search(r"engine-0\.1 ended with SIGKILL.*; restart 1 of", run.log.read_text())
