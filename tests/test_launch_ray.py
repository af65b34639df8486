"""Places that are lost: the Ray launcher on a real cluster of several nodes, all of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster
from slipstream.errors import DeadlineExceeded, RoleDied
from slipstream.launch import ray_launcher
from slipstream.launch.ray_launcher import RayLauncher, RayProcess

WAIT_S = 60.0

ROLE = "from slipstream.launch.processes import die_with_parent; die_with_parent(); import time; time.sleep(600)"
"""What runs at the places: nothing, as long as its place lives."""

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 5}
"""Ray sees within a second that a node is lost."""


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Has a head without room, so that every role is on a node that can be lost."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray_launcher.ray.shutdown()
    await asyncio.to_thread(cluster.shutdown)


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


async def test_places_that_are_lost(cluster: Cluster, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        first = cluster.add_node(num_cpus=1)
        spot = (await launcher.place({"engine-0": 0}))["engine-0"]
        process = await start(launcher, "engine-0")

        # The place alone: another comes in its stead.
        os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
        assert await process.wait() == -9
        process = await start(launcher, "engine-0")

        # A place that is stuck, and its node: ending it is a matter of seconds all the same.
        monkeypatch.setattr(ray_launcher, "END_S", 1.0)
        place = psutil.Process(process.pid).parent()
        assert place is not None
        place.suspend()
        await process.terminate()
        await process.kill()
        assert await process.wait() == -9

        # The node: the role goes on at another.
        process = await start(launcher, "engine-0")
        cluster.add_node(num_cpus=1)
        await asyncio.to_thread(cluster.remove_node, first, allow_graceful=False)
        assert await process.wait() == -9
        process = await start(launcher, "engine-0")
        await process.terminate()
        assert await process.wait() == -signal.SIGTERM

        # It leaves; whoever comes next takes its place. To leave twice changes nothing.
        await launcher.release("engine-0")
        await launcher.release("engine-0")
        assert (await launcher.place({"engine-1": 0}))["engine-1"].host == spot.host
        await start(launcher, "engine-1")


async def test_a_node_that_is_lost_for_good(
    cluster: Cluster, launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        lost = cluster.add_node(num_cpus=1)
        await launcher.place({"engine-0": 0})
        process = await start(launcher, "engine-0")
        cluster.add_node(num_cpus=1)
        await launcher.place({"engine-1": 0})
        other = await start(launcher, "engine-1")
        await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
        assert await process.wait() == -9
        monkeypatch.setattr(ray_launcher, "PLACE_S", 3.0)
        monkeypatch.setattr(ray_launcher, "END_S", 1.0)
        with pytest.raises(RoleDied, match=r"the place of engine-0 at .* is lost, and Ray has no other"):
            await start(launcher, "engine-0")
        with pytest.raises(RoleDied, match="is lost, and Ray has no other"):  # named each time
            await start(launcher, "engine-0")
        await launcher.release("engine-0")
        assert psutil.pid_exists(other.pid)
        # What it left lies nowhere and is not for the next, who is told that there is no room.
        with pytest.raises(DeadlineExceeded, match="room for 1 roles"):
            await launcher.place({"engine-2": 0})
        await launcher.release("engine-1")
        await launcher.place({"engine-3": 0})
        await start(launcher, "engine-3")


async def test_only_who_listens_nowhere_goes_on_at_another_host(cluster: Cluster, launcher: RayLauncher) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        lost = cluster.add_node(num_cpus=2)
        spots = await launcher.place({"engine-0": 0, "worker-0": 0})
        engine, worker = await start(launcher, "engine-0"), await start(launcher, "worker-0")
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
        await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
        assert await asyncio.gather(engine.wait(), worker.wait()) == [-9, -9]
        await start(launcher, "worker-0")
        with pytest.raises(
            RoleDied, match=rf"another at 127\.0\.0\.2, but the others know it at {spots['engine-0'].host}"
        ):
            await start(launcher, "engine-0")
