"""Images in the buffer: one file each, on the disk before the trajectory that names it, and fetched by learner ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from slipstream.buffer import image_files
from slipstream.buffer import messages as m
from slipstream.buffer.client import BufferClient
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.evaluation_episodes import EvaluationEpisodes
from slipstream.buffer.image_files import ImageFiles
from slipstream.buffer.messages import Lease
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory
from slipstream.common.images import PlacedImage, digest_of
from slipstream.configs.schema import Buffer
from slipstream.errors import StateError
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import mark_served
from slipstream.tests.seeing import picture
from slipstream.tests.stores import opened
from slipstream.tests.test_buffer_service import SOON, serving

CONFIG = Buffer(max_staleness=2, groups_per_batch=1, group_size=2)
RED, BLUE = picture("red"), picture("blue")


def seeing(episode: str, data: bytes, branch: int = 0) -> Trajectory:
    """An episode whose first token is an image."""
    one = trajectory(episode, branch)
    assert not one.loss_mask[0]
    return msgspec.structs.replace(one, images=(PlacedImage(0, 1, digest_of(data), "png", 2, 2),))


def kept(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "images").glob("*/*")}


async def test_an_image_is_kept_once_and_fetched(tmp_path: Path, address: str) -> None:
    async with (
        serving(tmp_path / "buffer.sqlite", address, CONFIG),
        BufferClient(address, "learner") as learner,
        BufferClient(address, "worker-0") as worker,
    ):
        mark_served(learner, await learner.recover(0))
        await worker.register()
        lease = await worker.lease()
        for member, data in enumerate((RED, RED)):
            episode = lease.episode(member)
            files = {digest_of(data): data, digest_of(b"unused"): b"unused"}
            await worker.deliver(episode, {0: SAMPLED}, FINISHED, (seeing(episode, data),), (), files)
        assert kept(tmp_path) == {f"{digest_of(RED)}.png": RED}
        batch = await learner.take(0, SOON)
        images = [image for group in batch.groups for one in group for image in one.images]
        assert len(images) == 2
        assert await learner.images(images) == {digest_of(RED): RED}
        with pytest.raises(StateError, match=r"the image .*png is not in"):
            await learner.images([PlacedImage(0, 1, digest_of(BLUE), "png", 2, 2)])
    assert ImageFiles(tmp_path).sizes() == (1, len(RED))


async def test_images_are_fetched_in_parts(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply has as many of the first files as fit, at least one."""
    colors = ("red", "blue", "green", "white", "gray")
    named = {f"{digest_of(data)}.png": data for data in map(picture, colors)}
    files, sizes = ImageFiles(tmp_path), [len(data) for data in named.values()]
    files.write(named)
    for most, count in ((1, 1), (sizes[0] + sizes[1], 2), (sizes[0] + sizes[1] + 1, 2), (sum(sizes), 5)):
        monkeypatch.setattr(image_files, "REPLY_BYTES", most)
        assert [one.tobytes() for one in files.first(named)] == list(named.values())[:count]
    monkeypatch.setattr(image_files, "REPLY_BYTES", sizes[0] + sizes[1])
    wanted = [PlacedImage(0, 1, digest_of(data), "png", 2, 2) for data in named.values()]
    async with serving(tmp_path / "buffer.sqlite", address, CONFIG), BufferClient(address, "learner") as learner:
        assert await learner.images(wanted) == {digest_of(data): data for data in named.values()}


def test_folders_of_files_that_are_there_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have renamed a file and be killed before it syncs the folder."""
    files, name = ImageFiles(tmp_path), f"{digest_of(RED)}.png"
    files.write({name: RED})
    synced: list[Path] = []
    monkeypatch.setattr(image_files, "fsync_directory", synced.append)
    files.write({name: RED})
    assert synced == [files.path(name).parent, tmp_path / "images", tmp_path]
    files.write({})
    assert len(synced) == 3


async def test_an_episode_whose_image_did_not_come_is_refused(tmp_path: Path, address: str) -> None:
    async with (
        serving(tmp_path / "buffer.sqlite", address, CONFIG),
        BufferClient(address, "learner") as learner,
        BufferClient(address, "worker-0") as worker,
    ):
        mark_served(learner, await learner.recover(0))
        await worker.register()
        lease = await worker.lease()
        episode = lease.episode(0)
        sent = EncodedTrajectory.of(seeing(episode, RED))
        other = (np.frombuffer(BLUE, dtype=np.uint8),)
        request = m.DeliverEpisode("worker-0", episode, {0: SAMPLED}, FINISHED, (sent,), images=other)
        with pytest.raises(StateError, match="is named and did not come"):
            await worker.connections["buffer"].request(request, m.Ack, SOON)
        assert kept(tmp_path) == {}
        await worker.deliver(episode, {0: SAMPLED}, FINISHED, (seeing(episode, RED),), (), {digest_of(RED): RED})
        failed = seeing(lease.episode(1), BLUE)
        outcome = Outcome("failed", "tool", "it broke")
        await worker.deliver(lease.episode(1), {0: SAMPLED}, outcome, (), (failed,), {digest_of(BLUE): BLUE})
    assert set(kept(tmp_path).values()) == {RED, BLUE}
    with opened(tmp_path / "buffer.sqlite") as store:
        (one,) = store.trajectories(lease.group_id)
        assert one.images[0].digest == digest_of(RED)


def test_a_file_that_a_killed_process_left_is_no_image(tmp_path: Path) -> None:
    files, name = ImageFiles(tmp_path), f"{digest_of(RED)}.png"
    files.path(name).parent.mkdir(parents=True)
    files.path(name).with_name(f".{name}.1").write_bytes(RED[:10])
    files.write({name: RED})
    assert files.read(name) == RED
    assert files.sizes() == (1, len(RED))


def test_images_of_evaluations_are_kept_too(tmp_path: Path) -> None:
    with EvaluationEpisodes(tmp_path, 1 << 30) as episodes:
        first = episodes.reserve("step 1", 1)
        lease = Lease(first, 0, (0,), 0, 0)
        one = seeing(lease.episode(0), RED)
        episodes.record("step 1", lease, 0, FINISHED, (one,), (), {digest_of(RED): RED})
    assert not episodes.dropped
    assert kept(tmp_path) == {f"{digest_of(RED)}.png": RED}
