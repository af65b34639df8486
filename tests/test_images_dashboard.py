"""Images on the dashboard: their files, and where they are in a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from slipstream.buffer.trajectory import Segment
from slipstream.common.images import PlacedImage, digest_of
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.runs import RunFolder
from slipstream.dashboard.texts import TokenTexts
from slipstream.tests.dashboard_runs import DashboardRun
from slipstream.tests.dashboards import IDLE
from slipstream.tests.seeing import picture

RED = picture("red")
NAME = f"{digest_of(RED)}.png"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DashboardRun]:
    made = DashboardRun(tmp_path / "run")
    made.record(1)
    made.store.images.write({NAME: RED})
    yield made
    made.close()


async def test_a_file_is_sent_by_its_name_and_no_other_file_is(run: DashboardRun) -> None:
    async with DashServer(RunFolder(run.folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        async with client.get(f"{server.url}api/runs/run/images/{NAME}") as answer:
            assert (answer.status, answer.content_type, await answer.read()) == (200, "image/png", RED)
        for name, status in [(f"{'0' * 64}.png", 409), ("config.yaml", 404), ("..%2Fconfig.yaml", 404)]:
            async with client.get(f"{server.url}api/runs/run/images/{name}") as answer:
                assert answer.status == status, name


def test_a_conversation_names_the_file_in_the_place_of_the_tokens(run: DashboardRun) -> None:
    begin, end = (run.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    ids = [*run.tokenizer.encode("see ").ids, begin, end, end, begin, *run.tokenizer.encode(" and say").ids]
    image = PlacedImage(5, 7, digest_of(RED), "png", 2, 4)
    texts = TokenTexts(run.folder, "")
    (message,) = texts.messages(ids, [], [Segment(0, len(ids), "user")], images=[image])
    assert (message.text, message.cut) == (f"see [images/{NAME[:2]}/{NAME}] and say", False)
    (cut,) = texts.messages(ids, [], [Segment(0, len(ids), "user")], cut=8, images=[image])
    assert (cut.text, cut.cut) == ("see [ima", True)
