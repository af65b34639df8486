"""`slipstream sft`: conversations become tokens or one clear line; one rank, two and a split model learn the same; none is left."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from slipstream.agents import load_renderer, render_demonstration
from slipstream.configs import SftConfig, load
from slipstream.envs import Message, Observation, parts_of
from slipstream.errors import ConfigError, PolicyError
from slipstream.launch.cli.main import main
from slipstream.launch.init_model import init_model
from slipstream.launch.sft import RESULT_FILE, make_examples
from slipstream.learner import checkpoint
from slipstream.learner.model import load_tokenizer
from slipstream.learner.sft import SftResult
from slipstream.tests.plain import SHAPE
from slipstream.tests.runs import WAIT_S, Background, leftovers
from transformers import AutoModelForCausalLM

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
CALL = {"function": {"name": "calculator", "arguments": {"expression": "1 + 2"}}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, config = tmp_path_factory.mktemp("model") / "policy", load("quickstart")
    sources = [part.source for part in parts_of(config.env, "train", 0)]
    init_model(folder, sources=sources, agent=config.agent, shape=SHAPE, samples=64)
    return folder


def configured(policy: Path, *overrides: str) -> SftConfig:
    return load("quickstart", [f"model.path={policy}", *overrides], SftConfig)


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def openai(message: Message, *, text: bool) -> dict:
    """A message as data sets have it, arguments of calls as text or as they are."""
    calls = [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": call.name, "arguments": json.dumps(call.arguments) if text else call.arguments},
        }
        for call in message.tool_calls
    ]
    said = {"role": message.role, "content": message.content or None if calls else message.content}
    return said | ({"tool_calls": calls} if calls else {})


@pytest.fixture(scope="module")
def demonstrations(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the environment demonstrates, as a file of conversations."""
    config, lines = configured(policy), []
    (part,) = parts_of(config.env, "train", config.seed)
    rng = random.Random(config.seed)
    for index in range(40):
        opening, messages = part.source.demonstration(part.source.task(index), rng)
        tools = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in opening.tools]
        said = [openai(message, text=index % 2 == 0) for message in (*opening.messages, *messages)]
        lines.append({"messages": said, "tools": tools, "source": "the environment"})
    return written(tmp_path_factory.mktemp("data") / "conversations.jsonl", *lines)


def test_conversations_of_a_file_are_what_the_environment_demonstrates(policy: Path, demonstrations: Path) -> None:
    """Token for token and with the same mask, several turns with calls of a tool among them."""
    config = configured(policy, "sft.demonstrations=40")
    shown = [(list(ids), list(mask)) for ids, mask in make_examples(config)[0]]
    read, _ = make_examples(configured(policy, f"sft.messages={demonstrations}"))
    assert [(list(ids), list(mask)) for ids, mask in read] == shown
    turns = [sum(b and not a for a, b in itertools.pairwise(mask)) for _, mask in shown]
    assert {1, 2} <= set(turns)


def test_loss_is_on_every_turn_of_the_assistant_and_on_nothing_else(policy: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, HI, YES, {"role": "user", "content": "no"}, YES]
    path = written(tmp_path / "chats.jsonl", {"messages": messages})
    ((ids, mask),), _ = make_examples(configured(policy, f"sft.messages={path}"))
    tokenizer = load_tokenizer(str(policy))
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "yes<|im_end|>" * 2
    whole = tokenizer.decode(ids)
    assert all(words in whole for words in ("be brief", "hi", "no"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', "JSON|truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ('{"message": []}', "missing required field `messages`"),
        ({"messages": [{"content": "hi"}, YES]}, r"missing required field `role` - at `\$.messages"),
        ({"messages": [{"role": "boss", "content": "hi"}, YES]}, "Invalid enum value 'boss'"),
        ({"messages": [HI, {**YES, "weight": 0}]}, "unknown field `weight`"),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}, "got `array`"),
        ({"messages": []}, "nothing to imitate"),
        ({"messages": [HI]}, "nothing to imitate"),
        ({"messages": [YES]}, r"messages\[0\] is the assistant's"),
        ({"messages": [HI, YES, HI]}, r"messages\[2\] is of role user"),
        ({"messages": [HI, YES, YES]}, r"messages\[1\] and messages\[2\] are both"),
        ({"messages": [HI, {"role": "assistant"}]}, r"messages\[1\] has no content"),
        ({"messages": [{**HI, "tool_calls": [CALL]}, YES]}, "only the assistant may have"),
        (
            {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "no JSON object",
        ),
        ({"messages": [{"role": "user", "content": "word " * 2000}, YES]}, "tokens, more than agent.max_tokens=256"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "utf-8|UTF-8"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(policy: Path, tmp_path: Path, line: object, said: str) -> None:
    path = written(tmp_path / "chats.jsonl", {"messages": [HI, YES]})
    raw = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(path.read_bytes() + b"\n" + raw + b"\n")
    with pytest.raises(ConfigError, match=said) as refused:
        make_examples(configured(policy, f"sft.messages={path}"))
    assert str(refused.value).startswith(f"sft.messages: {path}, line 3: ")
    assert "\n" not in str(refused.value)


def test_a_file_that_holds_nothing_or_is_none_is_named(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name, said in (
        ("empty.jsonl", "sft.messages: {} has no rows"),
        ("none.jsonl", "sft.messages: there is no file {}; did you mean"),
    ):
        path, out = tmp_path / name, tmp_path / "out"
        assert main(["sft", "quickstart", f"model.path={policy}", f"sft.out={out}", f"sft.messages={path}"]) == 2
        line = capsys.readouterr().err
        assert said.format(path) in line
        assert line.count("\n") == 1
        assert not out.exists()


def test_a_demonstration_that_is_longer_than_an_episode_is_named(policy: Path) -> None:
    with pytest.raises(ConfigError, match=r"^env: task 0 of chain_sum: has \d+ tokens, more than agent.max_tokens=30;"):
        make_examples(configured(policy, "sft.demonstrations=4", "agent.max_tokens=30", "agent.max_tokens_per_turn=9"))


def test_a_demonstration_in_which_the_assistant_speaks_twice_is_refused(policy: Path) -> None:
    renderer = load_renderer("qwen3", load_tokenizer(str(policy)), thinking=False)
    with pytest.raises(PolicyError, match="twice in a row"):
        render_demonstration(renderer, Observation((Message("user", "a"),)), [Message("assistant", "b")] * 2)


SMALL = (
    "sft.epochs=1",
    "sft.tokens_per_step=600",
    "sft.held_out=0.2",
    "sft.lr=1e-4",
    "learner.optimizer.clip_norm=1e-3",  # as in plain.py: what AdamW makes of rounding stays small
    "learner.backend.ranks=2",
)

LAYOUTS = {
    "one": ("learner.backend.ranks=1",),
    "two": (),
    "tensor": ("learner.backend.kind=megatron", "learner.backend.device=cpu", "learner.backend.parallel.tensor=2"),
}


@pytest.fixture(scope="module")
def tuned(policy: Path, demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same fine-tuning in every layout, each model in its own folder."""
    root = tmp_path_factory.mktemp("tuned")
    for name, layout in LAYOUTS.items():
        given = (f"model.path={policy}", f"sft.messages={demonstrations}", f"sft.out={root / name}")
        assert main(["sft", "quickstart", *given, *SMALL, *layout]) == 0
    return root


@pytest.mark.parametrize("layout", ["two", "tensor"])
def test_several_ranks_make_the_weights_of_one(tuned: Path, policy: Path, layout: str) -> None:
    one, several = (load_file(tuned / name / "model.safetensors") for name in ("one", layout))
    start = load_file(policy / "model.safetensors")
    assert one.keys() == several.keys() == start.keys()
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 1e-4
    for name in one:
        torch.testing.assert_close(several[name], one[name], atol=1e-6, rtol=0)
    results = [
        msgspec.json.decode((tuned / name / RESULT_FILE).read_bytes(), type=SftResult) for name in ("one", layout)
    ]
    assert [(r.sequences, r.tokens) for r in results] == [(32, results[0].tokens)] * 2
    assert [h.epoch for h in results[1].held_out] == [0, 1]
    for ours, theirs in zip(results[0].held_out, results[1].held_out, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert results[0].held_out[1].loss < results[0].held_out[0].loss
    assert leftovers(tuned) == []


def test_the_reported_loss_is_that_of_the_written_model(tuned: Path, demonstrations: Path) -> None:
    """In transformers, one conversation at a time."""
    config = configured(tuned / "two", f"sft.messages={demonstrations}")
    model = AutoModelForCausalLM.from_pretrained(tuned / "two", dtype=torch.float32).eval()
    sums = []
    for ids, mask in make_examples(config)[0]:
        tokens = torch.tensor(ids)
        with torch.no_grad():
            logp = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = logp[range(len(ids) - 1), tokens[1:]][torch.tensor(mask)[1:]]
        sums.append((-float(chosen.sum()), len(chosen)))
    result = msgspec.json.decode((tuned / "two" / RESULT_FILE).read_bytes(), type=SftResult)
    reported = result.held_out[-1]
    whole = sum(tokens for _, tokens in sums)
    assert 0 < reported.tokens < whole / 3
    # Which were held out is not told: whichever they are, their loss lies among those of single conversations.
    each = [loss / tokens for loss, tokens in sums]
    assert min(each) < reported.loss < max(each)
    assert {path.name for path in tuned.iterdir()} == set(LAYOUTS)


LONG = (*SMALL, "sft.epochs=2000", "learner.backend.device=cpu")


@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_ranks_that_are_stopped_or_die_leave_nothing(
    policy: Path, demonstrations: Path, tmp_path: Path, end: str
) -> None:
    out = tmp_path / "out"
    given = (f"model.path={policy}", f"sft.messages={demonstrations}", f"sft.out={out}", f"run.dir={tmp_path}")
    with Background("sft", "quickstart", *given, *LONG) as going:
        going.until(
            lambda: any("sft step" in log.read_text() for log in tmp_path.glob(".out-*/logs/supervisor.log")), "a step"
        )
        if end == "interrupt":
            going.process.send_signal(signal.SIGINT)
        else:
            going.kill("sft-1")
        output = going.output()
    assert going.process.returncode == (130 if end == "interrupt" else 1), output
    assert leftovers(tmp_path) == []
    assert not out.exists()
    if end == "interrupt":
        assert "no model was written" in output
        assert list(tmp_path.iterdir()) == []
    else:
        assert "RoleDied: sft-1 ended with SIGKILL" in output
        (log,) = tmp_path.glob(".out-*/logs/sft-1.log")
        assert str(log) in output
        assert [path.name for path in log.parent.parent.iterdir()] == ["logs"]


ONE = (*SMALL, "learner.backend.device=cpu", "learner.backend.ranks=1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_one_rank_that_is_stopped_while_it_writes_leaves_nothing_and_can_begin_anew(
    policy: Path,
    demonstrations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    write, seen = checkpoint.write_safetensors, []

    def stop(*given: object) -> None:
        write(*given)
        seen.extend(path for path in tmp_path.rglob("*") if path.is_file())
        os.kill(os.getpid(), number)

    given = (f"model.path={policy}", f"sft.messages={demonstrations}", f"sft.out={tmp_path / 'out'}", *ONE)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_safetensors", stop)
        assert main(["sft", "quickstart", *given]) == 130
    assert "interrupted; no model was written" in capsys.readouterr().err
    assert seen
    assert list(tmp_path.iterdir()) == []
    assert main(["sft", "quickstart", *given]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / RESULT_FILE).is_file()


@pytest.mark.parametrize(
    ("ranks", "room", "what"), [(1, 4096, "model"), (2, 64, "tokens.npz")], ids=["model", "tokens"]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    policy: Path, demonstrations: Path, tmp_path: Path, ranks: int, room: int, what: str
) -> None:
    """No file can grow beyond `room` bytes."""
    out = tmp_path / "out"
    given = (f"model.path={policy}", f"sft.messages={demonstrations}", f"sft.out={out}", *ONE)
    command = [
        sys.executable,
        "-m",
        "slipstream.launch.cli",
        "sft",
        "quickstart",
        *given,
        f"learner.backend.ranks={ranks}",
    ]
    full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (room, room))
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, preexec_fn=full)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"slipstream: LearnerError: {tmp_path}/.out-")
    assert f"/{what} could not be written: " in last
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
