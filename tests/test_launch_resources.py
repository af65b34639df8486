"""Who gets which GPU is arithmetic: tried here without one; and which ports are chosen."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.launch.launchers import local
from slipstream.launch.launchers.local import LocalLauncher, Placement, free_ports, keep_port
from slipstream.launch.resources import GpuAssignment, assign_gpus, free_gpus, needed_gpus, ranks_of, role_environment
from slipstream.tests.ranks import reserved_ports

COLOCATED = ("launch.kind=colocated", "weightsync.transport=shared", "buffer.max_staleness=1")


def test_a_gpu_each_while_there_are_enough() -> None:
    config = load(
        "qwen3-0.6b",
        ["learner.backend.ranks=2", "rollout.engine.replicas=2", "rollout.engine.options.tensor_parallel_size=2"],
    )
    wanted = needed_gpus(config, engines=True, learners=True)
    placement = assign_gpus(wanted, 8, "nccl")
    used = [gpu for gpus in placement.gpus.values() for gpu in gpus]
    assert sorted(used) == list(range(6))
    assert placement.gpus["engine-1"] == (4, 5)
    assert placement.backend == "nccl"


def test_one_gpu_is_shared_and_weights_go_through_the_host() -> None:
    placement = assign_gpus(needed_gpus(load("qwen3-0.6b"), engines=True, learners=True), 1, "nccl")
    assert set(placement.gpus.values()) == {(0,)}
    assert placement.backend == "gloo"


@pytest.mark.parametrize("available", [1, 2, 4])
def test_colocated_replicas_have_the_gpus_of_the_learner(available: int) -> None:
    config = load("qwen3-0.6b", [f"learner.backend.ranks={min(2, available)}", "rollout.engine.replicas=2", *COLOCATED])
    wanted = needed_gpus(config, engines=True, learners=True)
    placement = assign_gpus(wanted, available, "nccl", colocated=True)
    numbers = [placement.gpus[f"engine-{i}"] for i in range(2)]
    assert numbers == [(i % available,) for i in range(2)]
    assert numbers[: config.learner.backend.ranks] == [
        placement.gpus[f"learner-{i}"] for i in range(config.learner.backend.ranks)
    ]
    assert placement.backend == "gloo"


def test_a_gpu_shared_by_learner_and_engine_rules_out_nccl() -> None:
    assert (
        assign_gpus({"learner-0": 1, "reward": 1, "engine-0": 1}, 2, "nccl").backend == "gloo"
    )  # learner and engine share one
    assert assign_gpus({"learner-0": 1, "engine-0": 1, "reward": 1}, 2, "nccl").backend == "nccl"
    assert assign_gpus({"learner-0": 1, "reward": 1, "engine-0": 1}, 3, "nccl").backend == "nccl"


@pytest.mark.parametrize(
    ("kind", "more", "ranks"), [("vllm", ("2",), 2), ("sglang", ("2",), 2), ("transformers", (), 1), ("fake", (), 1)]
)
def test_only_kinds_that_split_a_model_want_more_than_one_gpu(kind: str, more: tuple[str, ...], ranks: int) -> None:
    split = [f"rollout.engine.options.tensor_parallel_size={n}" for n in more]
    config = load("quickstart", [f"rollout.engine.kind={kind}", *split])
    assert ranks_of(config.rollout.engine) == ranks
    assert needed_gpus(config, engines=True, learners=False) == {"engine-0": ranks}


def test_a_late_replica_gets_free_gpus_or_is_refused() -> None:
    taken = {"learner-0": (0,), "engine-0": (1, 2), "engine-1": (5,)}
    assert free_gpus(taken, 2, 8) == (3, 4)
    assert free_gpus(taken, 0, 0) == ()
    del taken["engine-0"]  # one that left makes room
    assert free_gpus(taken, 3, 6) == (1, 2, 3)
    with pytest.raises(ConfigError, match=r"another replica wants 4 GPUs of its own, and 3 of 4 are free"):
        free_gpus(taken, 4, 4)


async def test_late_roles_get_the_next_ports_and_gpus(tmp_path: Path) -> None:
    first = reserved_ports(5)[0]
    launcher = LocalLauncher(tmp_path, first, GpuAssignment({"learner-0": (0,), "engine-0": (1,)}, "nccl"), 3)
    spots = await launcher.place({"learner-0": 1, "engine-0": 1, "buffer": 0})
    assert [spot.port for spot in spots.values()] == [first, first + 1, first + 2]
    assert [spot.gpus for spot in spots.values()] == [(0,), (1,), ()]
    assert await launcher.place({"engine-1": 1}) == {"engine-1": Placement("127.0.0.1", first + 3, (2,))}
    with pytest.raises(ConfigError, match="0 of 3 are free"):
        await launcher.place({"engine-2": 1})
    await launcher.release("engine-0")
    assert (await launcher.place({"engine-3": 1}))["engine-3"] == Placement("127.0.0.1", first + 4, (1,))


def test_without_gpus_no_role_asks_for_one() -> None:
    placement = assign_gpus(needed_gpus(load("quickstart"), engines=False, learners=False), 0, "nccl")
    assert placement.gpus == {}
    assert placement.backend == "gloo"


def test_a_replica_that_does_not_fit_is_named() -> None:
    config = load("qwen3-0.6b", ["rollout.engine.options.tensor_parallel_size=4"])
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.options\.tensor_parallel_size: a replica wants 4 GPUs, torch sees 2"
    ):
        assign_gpus(needed_gpus(config, engines=True, learners=True), 2, "nccl")


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("quickstart", ["seed=7"])
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    chosen = role_environment(config, "learner-0")
    assert chosen["OMP_NUM_THREADS"] == "3"
    assert chosen["OMP_WAIT_POLICY"] == "PASSIVE"
    assert chosen["PYTHONHASHSEED"] == "7"


def test_a_port_is_given_to_one_process_though_its_server_does_not_listen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - 400
    code = (
        "from slipstream.launch.launchers import local\n"
        f"local.LOWEST_PORT = {lowest}\n"
        "print(*local.free_ports(20), flush=True)\ninput()"
    )
    monkeypatch.setattr(local, "LOWEST_PORT", lowest)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs, ours = set(map(int, other.stdout.readline().split())), set(free_ports(30))
        assert (len(theirs), len(ours), theirs & ours) == (20, 30, set())
        assert not any(keep_port(port) for port in (*theirs, *ours))
        other.communicate("\n")
    assert all(keep_port(port) for port in theirs)  # they went with it


def test_ports_are_chosen_where_no_outgoing_connection_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert all(local.LOWEST_PORT <= port < above for port in ports)
    assert above < 21_000 or not set(ports) & set(local.RAY_WORKER_PORTS)  # where others are free
    busy = min(ports)  # with most ports above it
    with socket.create_server(("127.0.0.1", busy)):
        monkeypatch.setattr(local, "LOWEST_PORT", above - 1)
        assert free_ports(0) == []
        with pytest.raises(
            ConfigError, match=rf"launch.ports.first: 127.0.0.1 has no 2 free ports from {above - 1} to {above - 1}"
        ):
            free_ports(2)
        monkeypatch.setattr(local, "LOWEST_PORT", busy)
        assert busy not in free_ports(100)


def test_what_a_run_on_cpu_needs_is_known_without_torch() -> None:
    """`slipstream explain` asks for it, and runs beside a run again and again: torch alone is more than all that it computes."""
    code = (
        "import sys; from slipstream.configs import load; from slipstream.launch.resources import gpus_of;"
        "needed = gpus_of(load('quickstart')); print(needed, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "{} False\n"
