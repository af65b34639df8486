"""What the pages of one server share: looks at the files of the runs, and answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from slipstream.common.fsio import write_atomic
from slipstream.configs import RUN_CONFIG
from slipstream.dashboard import feed as feed_module
from slipstream.dashboard.feed import ChangeFeed, SharedAnswers
from slipstream.dashboard.runs import ENDED, RunFolder
from slipstream.errors import StoreError
from slipstream.tests.runs import WAIT_S

QUIET_S = 0.05


@pytest.fixture
def runs(tmp_path: Path) -> RunFolder:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RUN_CONFIG).touch()
    return RunFolder(tmp_path, ENDED)


def written(runs: RunFolder, name: str) -> None:
    """A change of the run that no look finds half of."""
    write_atomic(runs.root / name / "metrics.jsonl", b"{}\n")


async def test_one_look_tells_every_listener_of_a_change(runs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "LOOK_S", 0.01)
    feed = ChangeFeed(runs)
    async with asyncio.timeout(WAIT_S), feed.listening(), feed.listening():
        assert await feed.after(0, WAIT_S) == 1
        before = dict(feed.numbers)
        assert before.keys() == {"first", "second"}
        assert await feed.after(1, QUIET_S) == 1
        told = [asyncio.create_task(feed.after(1, WAIT_S)) for _ in range(2)]
        written(runs, "first")
        assert await asyncio.gather(*told) == [2, 2]
        assert feed.numbers["first"] > before["first"]
        assert feed.numbers["second"] == before["second"]
        waits = asyncio.create_task(feed.after(2, WAIT_S))
        await asyncio.sleep(0)
        await feed.close()
        assert await waits == 2


def test_the_more_answers_cost_the_less_often_files_are_looked_at() -> None:
    assert [feed_module.pause_s(spent_s) for spent_s in (0.0, 0.01, 0.02, 0.05, 1.0)] == [2.0, 2.0, 4.0, 10.0, 10.0]


async def test_what_answers_have_cost_delays_the_next_look(runs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(spent_s: float) -> float:
        asked.append(spent_s)
        return 0.01

    asked = list[float]()
    monkeypatch.setattr(feed_module, "pause_s", computed)
    feed = ChangeFeed(runs)
    async with asyncio.timeout(WAIT_S), feed.listening():
        await feed.after(0, WAIT_S)
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass  # an answer
        written(runs, "first")
        await feed.after(1, WAIT_S)
        written(runs, "first")
        await feed.after(2, WAIT_S)
    assert max(asked) >= 0.05


async def test_what_was_found_for_the_pages_does_not_wait_for_the_next_look(
    runs: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "LOOK_S", 10 * WAIT_S)
    feed = ChangeFeed(runs)
    async with asyncio.timeout(WAIT_S), feed.listening():
        await feed.after(0, WAIT_S)
        written(runs, "first")
        feed.look_now()
        assert await feed.after(1, WAIT_S) == 2
        assert await feed.after(2, QUIET_S) == 2


async def test_nothing_is_looked_at_while_no_page_listens(runs: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "LOOK_S", 0.01)
    feed = ChangeFeed(runs)
    async with asyncio.timeout(WAIT_S):
        async with feed.listening():
            await feed.after(0, WAIT_S)
        written(runs, "first")
        assert await feed.after(1, QUIET_S) == 1
        async with feed.listening():  # the first look is at once
            assert await feed.after(1, WAIT_S) == 2


async def test_a_look_that_fails_is_the_error_of_each_listener(
    runs: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(runs, "runs", refused)
    feed = ChangeFeed(runs)
    async with asyncio.timeout(WAIT_S), feed.listening():
        with pytest.raises(PermissionError):
            await feed.after(0, WAIT_S)


async def test_equal_questions_have_one_answer_until_the_run_has_changed(
    runs: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "LOOK_S", 0.01)
    monkeypatch.setattr(feed_module, "SHARED_S", WAIT_S)
    reads, go = list[int](), asyncio.Event()

    async def read() -> bytes:
        reads.append(len(reads))
        mine = reads[-1]
        await go.wait()
        return b"%d" % mine

    feed = ChangeFeed(runs)
    shared = SharedAnswers(feed)
    async with asyncio.timeout(WAIT_S):
        asked = [asyncio.create_task(shared.get("now", "first", read)) for _ in range(3)]
        asked.append(asyncio.create_task(shared.get("curves", "first", read)))
        await asyncio.sleep(0)
        async with feed.listening():
            await feed.after(0, WAIT_S)
            asked += [
                asyncio.create_task(shared.get("now", "first", read)) for _ in range(2)
            ]  # after the change was told
            await asyncio.sleep(0)
            go.set()
            assert await asyncio.gather(*asked) == [b"0", b"0", b"0", b"1", b"2", b"2"]
            assert await shared.get("now", "first", read) == b"2"
            written(runs, "second")
            await feed.after(1, WAIT_S)
            assert await shared.get("now", "first", read) == b"2"
            written(runs, "first")
            await feed.after(2, WAIT_S)
            assert await shared.get("now", "first", read) == b"3"
            monkeypatch.setattr(feed_module, "SHARED_S", 0.0)
            assert await shared.get("now", "first", read) == b"4"
            monkeypatch.setattr(feed_module, "SHARED_S", WAIT_S)
            assert await shared.get("now", "first", read) == b"4"
        assert await shared.get("now", "first", read) == b"5"  # nothing says any more whether the run has changed


async def test_the_error_of_a_read_is_that_of_all_who_share_it(runs: RunFolder) -> None:
    async def read() -> bytes:
        raise StoreError("damaged")

    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    shared = SharedAnswers(ChangeFeed(runs))
    found = await asyncio.gather(*(shared.get("now", "first", read) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in found] == ["damaged", "damaged"]
    waits = asyncio.create_task(shared.get("tokens", "first", never))
    await asyncio.sleep(0)
    await shared.close()
    with pytest.raises(asyncio.CancelledError):
        await waits
