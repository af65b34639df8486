"""Rewards from models: real vLLM servers, scores as transformers computes them, and everything else a named failure."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.reward import Classifier, Judge
from slipstream.envs import Message
from slipstream.errors import ConfigError, DeadlineExceeded, EngineError
from slipstream.learner.model import load_tokenizer
from slipstream.rollout.engines.http_client import HttpClient
from slipstream.rollout.reward_model import (
    JudgeChoice,
    JudgeMessage,
    JudgeResponse,
    RewardModel,
    ScoredConversation,
    fill_template,
    judge_request,
    parse_score,
)
from slipstream.tests import rewards, tiny
from slipstream.tests.runs import tiny_policy
from transformers import AutoModelForSequenceClassification

START_S = 200.0


class Servers(NamedTuple):
    """A classifier and a judge that are served, by their folders and URLs."""

    classifier: Path
    classifies: str
    judge: Path
    judges: str


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("rewards")
    policy = tiny_policy(root / "policy")
    classifier, judge = rewards.classifier(root / "classifier", policy), rewards.judge(root / "judge", policy)
    ports = tiny.free_port(), tiny.free_port()
    with (
        rewards.served(rewards.asking("classifier", classifier), ports[0], root / "classifier.log"),
        rewards.served(rewards.asking("judge", judge), ports[1], root / "judge.log"),
    ):
        yield Servers(classifier, f"http://127.0.0.1:{ports[0]}", judge, f"http://127.0.0.1:{ports[1]}")


@contextlib.asynccontextmanager
async def asked(config: Classifier | Judge, url: str, score_s: float = 600.0) -> AsyncIterator[RewardModel]:
    """A client of a server that answers."""
    health = HttpClient("reward", url, START_S)
    await health.wait_for_answer("/health", START_S)
    await health.close()
    model = RewardModel(config, url, score_s)
    try:
        yield model
    finally:
        await model.close()


def played(*token_ids: int, answer: str = "good") -> ScoredConversation:
    return ScoredConversation(token_ids, (Message("user", "Q"),), (Message("assistant", answer),), "")


async def test_the_score_of_a_classifier_is_that_of_transformers(servers: Servers) -> None:
    config = Classifier(path=str(servers.classifier), weights={"model": 2.0, "environment": 0.5})
    model = AutoModelForSequenceClassification.from_pretrained(servers.classifier, dtype=torch.float32).eval()
    end = load_tokenizer(str(servers.classifier)).eos_token_id
    assert isinstance(end, int)
    seen = set[float]()
    async with asked(config, servers.classifies) as reward:
        for ids in (
            [5, 9, 11, end],
            [200],
            [3 + i % 300 for i in range(8, 264)],
        ):  # the last as long as an episode gets
            with torch.no_grad():
                expected = float(model(torch.tensor([ids]), use_cache=False).logits[0, 0])
            by_step, score = await reward.rewards([1.0, 4.0], played(*ids))
            assert score == pytest.approx(expected, abs=1e-4)
            assert by_step == pytest.approx((0.5, 2.0 + 2.0 * expected), abs=2e-4)
            assert (await reward.rewards([], played(*ids)))[0] == pytest.approx((2.0 * expected,), abs=2e-4)
            seen.add(round(score, 2))
    assert len(seen) == 3


async def test_a_classifier_refuses_what_is_longer_than_an_episode(servers: Servers) -> None:
    async with asked(Classifier(path=str(servers.classifier)), servers.classifies) as reward:
        with pytest.raises(EngineError, match="answered 400"):
            await reward.rewards([], played(*[8] * 257))


async def test_a_judge_is_read_by_a_strict_rule(servers: Servers) -> None:
    config = Judge(path=str(servers.judge), template=rewards.TEMPLATE, max_tokens=24)
    async with asked(config, servers.judges) as reward:
        assert (await reward.rewards([], played(answer="good")))[1] == 0.75
        assert (await reward.rewards([], played(answer="bad")))[1] == 0.25
        for answer, said in (("odd", "Score: high"), ("proud", "Score: 7")):
            with pytest.raises(EngineError, match=rf"the judge ended with {said}, not with `Score: X`"):
                await reward.rewards([], played(answer=answer))
    short = RewardModel(msgspec.structs.replace(config, max_tokens=2), servers.judges, 600.0)
    with pytest.raises(EngineError, match=r"was cut off \(length\); raise reward.max_tokens"):
        await short.rewards([], played(answer="good"))
    await short.close()


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 0.5", 0.5),
        ("It is right.\n\nscore:1\n \n", 1.0),
        ("Score: 0", 0.0),
        ("Score: 0.5.", None),
        ("Score: 0.5\nI am sure.", None),
        ("The score: 0.5", None),
        ("Score: 1.01", None),
        ("Score: -0.5", None),
        ("Score: nan", None),
        ("Score: ٣", None),
        ("0.5", None),
        ("", None),
    ],
)
def test_what_counts_as_a_score(text: str, score: float | None) -> None:
    answer = JudgeResponse([JudgeChoice(JudgeMessage(text), "stop")])
    if score is None:
        with pytest.raises(EngineError, match="the judge ended with"):
            parse_score(answer)
    else:
        assert parse_score(answer) == score
    with pytest.raises(EngineError, match="cut off"):
        parse_score(JudgeResponse([JudgeChoice(JudgeMessage(text), "length")]))


def test_the_text_of_an_episode_is_no_template() -> None:
    shown = fill_template(
        '{question} {answer} {"a": 1} {reference}', {"question": "{answer}", "answer": "x", "reference": "r"}
    )
    assert shown == '{answer} x {"a": 1} r'
    config = Judge(path="j", template="{conversation}")
    said = (Message("assistant", "one"), Message("user", "More?"), Message("assistant", "two"))
    (message,) = msgspec.json.decode(
        msgspec.json.encode(
            judge_request(config, ScoredConversation((), (Message("user", "Q"),), said, ""))["messages"]
        )
    )
    assert message["content"] == "user: Q\n\nassistant: one\n\nuser: More?\n\nassistant: two"


async def test_a_server_that_is_not_there_or_does_not_answer_is_a_named_failure() -> None:
    gone = RewardModel(Classifier(path="c"), f"http://127.0.0.1:{tiny.free_port()}", 0.5)
    with pytest.raises(DeadlineExceeded, match=r"an episode waited 0\.5 s for its reward; .*rollout\.episode_s"):
        await gone.rewards([], played(8))
    await gone.close()


async def test_a_server_that_hangs_is_waited_for_no_longer_than_the_deadline(servers: Servers) -> None:
    async with asked(Classifier(path="c"), servers.classifies) as reward:
        first = (await reward.rewards([], played(8, 9)))[1]
    async with asked(Classifier(path="c"), servers.classifies, 1.0) as reward:
        processes = _processes(servers.classifies)
        for process in processes:
            process.suspend()
        began = time.monotonic()
        try:
            with pytest.raises(DeadlineExceeded, match="for its reward"):
                await reward.rewards([], played(8, 9))
        finally:
            for process in processes:
                process.resume()
        assert time.monotonic() - began < 30  # it hangs for ever
    async with asked(Classifier(path="c"), servers.classifies) as reward:
        assert (await reward.rewards([], played(8, 9)))[1] == pytest.approx(first, abs=1e-5)


async def test_what_is_no_number_is_a_named_failure(servers: Servers) -> None:
    async with asked(Classifier(path="c"), servers.classifies) as reward:
        with pytest.raises(EngineError, match="the reward server at"):
            await reward.rewards([], played(8, rewards.POISON, 9))


async def test_a_server_that_dies_is_waited_for(servers: Servers, tmp_path: Path) -> None:
    """One that takes the request and dies, and comes back as a real one at the same address."""
    port = tiny.free_port()
    dying = (
        "import socket as s; l = s.create_server(('127.0.0.1', %d)); print(flush=True); c, _ = l.accept(); c.recv(9999)"
    )
    first = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-S", "-c", dying % port], stdout=subprocess.PIPE
    )
    assert first.stdout is not None
    first.stdout.readline()
    reward = RewardModel(Classifier(path="c"), f"http://127.0.0.1:{port}", START_S)
    with rewards.served(rewards.asking("classifier", servers.classifier), port, tmp_path / "log"):
        assert (await reward.rewards([], played(8, 9)))[1] < 1e6
    assert first.wait(60) == 0
    await reward.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward.kind=classifier",), "reward"),
        (
            ("reward.kind=classifier", "reward.path=x", "reward.weights.model=0"),
            "reward.weights.model: 0 asks a model for nothing",
        ),
        (("reward.kind=classifier", "reward.path=x", "reward.template=y"), "template"),
        (
            ("reward.kind=classifier", "reward.path=x", "rollout.engine.memory=much"),
            "rollout.engine.memory: 'much' is not a size",
        ),
        (
            ("reward.kind=judge", "reward.path=x", "reward.template={anwser}"),
            "{anwser} is unknown; allowed are {question}",
        ),
        (("reward.kind=judge", "reward.path=x", "reward.template={question}"), "name {answer} or {conversation}"),
        (("reward.kind=oracle",), "environment, classifier, judge"),
        (
            ("reward.kind=classifier", "reward.path=x", "buffer.max_staleness=0"),
            "less than rollout.episode_s=600 + 600 for a score; allowed is learner.batch_s >= 1200",
        ),
    ],
)
def test_bad_input_is_one_line(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def _processes(url: str) -> list[psutil.Process]:
    port = url.rpartition(":")[2]
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    (server,) = [child for child in running if f"--port={port}" in child.cmdline()]
    return [server, *server.children(recursive=True)]
