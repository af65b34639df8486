"""Placements that are lost: the Ray launcher on a real cluster of several nodes, all of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from slipstream.errors import ConfigError, DeadlineExceeded
from slipstream.launch.launchers import ray as ray_launcher
from slipstream.launch.launchers.local import PlacementLost
from slipstream.launch.launchers.ray import RayLauncher, RayProcess
from slipstream.launch.launchers.shared_folder import folder_proof, missing_proof, require_shared

WAIT_S = 60.0

ROLE = "from slipstream.common.process import set_parent_death_signal; set_parent_death_signal(); import time; time.sleep(600)"
"""What a role runs: it sleeps for as long as its actor lives."""

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 5}
"""Ray sees within a second that a node is lost."""

QUIET = {"include_log_monitor": False}
"""Of each node: a process less that takes a second to start. No program asks for the logs that it sends."""


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A cluster whose only node has no room, so that every role is on a node that can be lost."""
    cluster = Cluster(initialize_head=True, head_node_args={**QUIET, "num_cpus": 0, "_system_config": QUICK})
    yield cluster
    cluster.shutdown()


@pytest.fixture
async def cluster(head: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """That one; the nodes that a test adds go with it."""
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    yield head
    ray_launcher.ray.shutdown()
    for node in [*head.worker_nodes]:
        await asyncio.to_thread(head.remove_node, node, allow_graceful=False)
    await asyncio.to_thread(head.wait_for_nodes)


@pytest.fixture
async def launcher(cluster: Cluster, tmp_path: Path) -> AsyncIterator[RayLauncher]:
    launcher = RayLauncher(tmp_path, 0, many_hosts=True)
    yield launcher
    await launcher.close()


async def start(launcher: RayLauncher, role: str) -> RayProcess:
    process = await launcher.start(role, [sys.executable, "-c", ROLE], {})
    assert isinstance(process, RayProcess)
    assert psutil.pid_exists(process.pid)
    return process


async def restart(launcher: RayLauncher, role: str) -> RayProcess:
    """As the supervisor does it when the place of a role is lost."""
    with pytest.raises(PlacementLost, match=f"the place of {role} at .* is lost"):
        await start(launcher, role)
    await launcher.move(role)
    return await start(launcher, role)


async def test_placements_that_are_lost(
    cluster: Cluster, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        first = cluster.add_node(**QUIET, num_cpus=1)
        placement = (await launcher.place({"engine-0": 0}))["engine-0"]
        process = await start(launcher, "engine-0")

        # The actor ends: another one takes its bundle.
        os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
        assert await process.wait() == -9
        assert process.lost
        process = await restart(launcher, "engine-0")

        # The actor is stopped: ending its process takes seconds all the same.
        with monkeypatch.context() as hurried:
            hurried.setattr(ray_launcher, "END_S", 1.0)
            actor = psutil.Process(process.pid).parent()
            assert actor is not None
            actor.suspend()
            await process.terminate()
            await process.kill()
            assert await process.wait() == -9

        # The node is lost: the role continues on another.
        process = await restart(launcher, "engine-0")
        cluster.add_node(**QUIET, num_cpus=1)
        await asyncio.to_thread(cluster.remove_node, first, allow_graceful=False)
        assert await process.wait() == -9
        process = await restart(launcher, "engine-0")
        await process.terminate()
        assert await process.wait() == -signal.SIGTERM
        assert not process.lost

        # It leaves: the next role takes its bundle. A second release changes nothing.
        await launcher.release("engine-0")
        await launcher.release("engine-0")
        assert (await launcher.place({"engine-1": 0}))["engine-1"].host == placement.host
        await start(launcher, "engine-1")


async def test_a_node_that_is_lost_for_good(
    cluster: Cluster, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        lost = cluster.add_node(**QUIET, num_cpus=1)
        await launcher.place({"engine-0": 0})
        process = await start(launcher, "engine-0")
        cluster.add_node(**QUIET, num_cpus=1)
        await launcher.place({"engine-1": 0})
        other = await start(launcher, "engine-1")
        await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
        assert await process.wait() == -9
        with monkeypatch.context() as hurried:
            hurried.setattr(ray_launcher, "PLACE_S", 1.0)
            hurried.setattr(ray_launcher, "START_S", 1.0)
            hurried.setattr(ray_launcher, "END_S", 1.0)
            for _ in range(2):  # named each time
                with pytest.raises(PlacementLost, match=r"the place of engine-0 at .* is lost"):
                    await start(launcher, "engine-0")
                with pytest.raises(
                    PlacementLost, match=r"the place of engine-0 at .* is lost, and Ray had no other within 1 s"
                ):
                    await launcher.move("engine-0")
                states = {table["state"] for table in placement_group_table().values()}
                assert "PENDING" in states
                assert "RESCHEDULING" not in states  # Ray would try it again without a pause
            await launcher.release("engine-0")
            assert psutil.pid_exists(other.pid)
            # Its bundle is on no node and is not reused: the next role is refused, because there is no room.
            with pytest.raises(DeadlineExceeded, match="room for 1 roles"):
                await launcher.place({"engine-2": 0})
        await launcher.release("engine-1")
        await launcher.place({"engine-3": 0})  # a new actor imports Ray: more than a second on a busy machine
        await start(launcher, "engine-3")


async def test_only_a_role_that_the_others_find_again_moves_to_another_host(
    cluster: Cluster, launcher: RayLauncher
) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        lost = cluster.add_node(**QUIET, num_cpus=3)
        placements = await launcher.place({"reward": 0, "engine-0": 0, "worker-0": 0})
        processes = [await start(launcher, role) for role in placements]
        cluster.add_node(**QUIET, num_cpus=3, node_ip_address="127.0.0.2")
        await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
        assert await asyncio.gather(*(process.wait() for process in processes)) == [-9] * 3
        await restart(launcher, "worker-0")
        assert (await launcher.move("engine-0")).host == "127.0.0.2"
        with pytest.raises(
            PlacementLost, match=rf"another at 127\.0\.0\.2, but the others know it at {placements['reward'].host}"
        ):
            await launcher.move("reward")

        # Two places on one host are vacant. A replica that spans hosts takes over one of them, and a new one on another host.
        for role in ("worker-0", "engine-0"):
            await launcher.release(role)
        cluster.add_node(**QUIET, num_cpus=1, node_ip_address="127.0.0.3")
        parts = await launcher.place({"engine-1": 0, "engine-1.1": 0})
        assert {name: place.host for name, place in parts.items()} == {
            "engine-1": "127.0.0.2",
            "engine-1.1": "127.0.0.3",
        }


async def test_hosts_that_reach_each_other_pass_the_check_of_links(cluster: Cluster, launcher: RayLauncher) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        cluster.add_node(**QUIET, num_cpus=1)
        cluster.add_node(**QUIET, num_cpus=1, node_ip_address="127.0.0.2")
        placements = await launcher.place({"buffer": 0, "worker-0": 0})
        assert len({placement.host for placement in placements.values()}) == 2
        await launcher.check_links()
        await launcher.check_links()  # no port is kept


NODE = (
    f"mount -t tmpfs none $0 && exec {sys.executable} -m ray.scripts.scripts start --block --disable-usage-stats --num-cpus=2 "
    "--node-ip-address=127.0.0.2 --address=$1"
)
"""A Ray node that has an empty folder at `$0`, as a host that does not mount what the others share."""


def private_node(run: Path, cluster: Cluster) -> list[str]:
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", NODE, str(run), str(cluster.address)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
async def test_a_host_that_does_not_share_the_folder_of_the_run_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    cluster.add_node(**QUIET, num_cpus=1)
    launcher = RayLauncher(run / "logs", 0, many_hosts=True)
    node = await asyncio.create_subprocess_exec(
        *private_node(run, cluster), stdout=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        async with asyncio.timeout(4 * WAIT_S):
            await asyncio.to_thread(cluster.wait_for_nodes)
            monkeypatch.setattr(ray_launcher, "PLACE_S", 2 * WAIT_S)
            with pytest.raises(
                ConfigError, match=rf"run\.dir: {run} .*not seen by 127\.0\.0\.2, the host of .*No such file"
            ):
                await launcher.place({"worker-0": 0, "worker-1": 0, "worker-2": 0})
            assert list(run.iterdir()) == [run / "logs"]
    finally:
        await launcher.close()
        os.killpg(node.pid, signal.SIGTERM)
        await node.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
async def test_a_role_waits_for_a_host_to_share_the_folder_of_the_run(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    first = cluster.add_node(**QUIET, num_cpus=1)
    launcher = RayLauncher(run / "logs", 0, many_hosts=True)
    node = None
    try:
        async with asyncio.timeout(4 * WAIT_S):
            await launcher.place({"worker-0": 0})
            process = await start(launcher, "worker-0")
            node = await asyncio.create_subprocess_exec(
                *private_node(run, cluster), stdout=asyncio.subprocess.DEVNULL, start_new_session=True
            )
            await asyncio.to_thread(cluster.remove_node, first, allow_graceful=False)
            assert await process.wait() == -9
            moving = asyncio.create_task(launcher.move("worker-0"))
            while "another is of no use" not in caplog.text:
                assert not moving.done()
                await asyncio.sleep(0.1)
            mounting = ["nsenter", "--target", str(node.pid), "--mount", "umount", "--lazy", str(run)]
            assert await (await asyncio.create_subprocess_exec(*mounting)).wait() == 0
            assert (await moving).host == "127.0.0.2"
    finally:
        await launcher.close()
        if node is not None:
            os.killpg(node.pid, signal.SIGTERM)
            await node.wait()


def test_what_is_said_of_hosts_that_do_not_share_a_folder(tmp_path: Path) -> None:
    with folder_proof(tmp_path) as proof:
        assert missing_proof(proof) == ""
        other = msgspec.structs.replace(proof, content="another host's")
        assert missing_proof(other).endswith(": it reads another file of that name")
        absent = missing_proof(msgspec.structs.replace(proof, path=f"{proof.path}-"))
        assert absent.endswith(": No such file or directory")
    assert list(tmp_path.iterdir()) == []
    require_shared(tmp_path, "10.0.0.1", {"buffer": ("10.0.0.1", ""), "worker-0": ("10.0.0.2", "")})
    blind = {"engine-0": ("10.0.0.1", ""), "worker-0": ("10.0.0.2", absent), "worker-1": ("10.0.0.2", absent)}
    with pytest.raises(
        ConfigError, match=r"10\.0\.0\.1 wrote there is not seen by 10\.0\.0\.2, the host of worker-0, worker-1 \("
    ):
        require_shared(tmp_path, "10.0.0.1", blind)
    with pytest.raises(ConfigError, match=f"^--out: {tmp_path} is not the same folder on all hosts"):
        require_shared(tmp_path, "10.0.0.1", blind, "--out")


STOPPED = """
import asyncio, os, signal
from pathlib import Path
from slipstream.launch.launchers.ray import RayLauncher

async def main() -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    launcher = RayLauncher(Path("logs"), 0, many_hosts=True)
    await launcher.place({})
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        await asked.wait()
    await asyncio.sleep(5)
    await launcher.close()
    print("ended in good order")

asyncio.run(main())
"""


async def test_a_run_that_is_terminated_has_longer_than_the_three_seconds_of_ray(
    cluster: Cluster, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STOPPED]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(2 * WAIT_S):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert output == b"ended in good order\n"
    assert b"SIGTERM received" not in errors
