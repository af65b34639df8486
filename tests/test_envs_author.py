"""`slipstream env new`, `play` and `bench`, as the author of an environment uses them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from slipstream.configs import load
from slipstream.envs import Message, ToolSpec
from slipstream.errors import EngineError
from slipstream.launch import env_play
from slipstream.launch.cli.main import main

LAKE = ("quickstart", "env={kind: gymnasium, id: FrozenLake-v1, arguments: {is_slippery: false}}")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_what_new_writes_is_short_and_its_test_plays_all_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "new", "word_length"]) == 0
    assert capsys.readouterr().out.startswith("wrote word_length.py, word_length.yaml and test_word_length.py")
    assert len((tmp_path / "word_length.py").read_text().splitlines()) <= 30
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, "test_word_length.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
    assert main(["env", "new", "word_length"]) == 2
    assert "word_length.py, word_length.yaml, test_word_length.py exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["my-env", "class", "1st", "MyEnv", "../x"])
def test_a_name_that_is_no_modules_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "new", name]) == 2
    assert "is no name of a module" in capsys.readouterr().err


def test_a_person_plays_by_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    moves = ["hello", "/act {right}", *(f'/act {{"action": {action}}}' for action in (1, 1, 2, 1, 2, 2)), "not read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(moves)))
    assert main(["env", "play", *LAKE]) == 0
    shown = capsys.readouterr().out
    assert "tool act: Take an action." in shown
    assert "call the tool act" in shown
    assert "the arguments are no JSON object" in shown
    assert shown.endswith("reward 1, turns 8, invalid 2\nthe episode is done\nthe rewards are 1 in all\n")


def test_the_end_of_the_input_ends_the_episode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["env", "play", *LAKE]) == 0
    assert capsys.readouterr().out.endswith("the rewards are 0 in all\n")
    assert main(["env", "play", "quickstart", "--part", "nothing"]) == 2


async def test_a_model_plays_over_an_openai_api() -> None:
    asked: list[dict] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy"}]})

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) > 6:
            return web.Response(status=500, text="out of memory")
        action = (1, 1, 2, 1, 2, 2)[len(asked) - 1]
        function = {"name": "act", "arguments": json.dumps({"action": action})}
        call = {"id": f"c{len(asked)}", "type": "function", "function": function}
        return web.json_response(
            {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
        )

    app, told = web.Application(), list[str]()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        player = env_play.model(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "", told.append)
        config = load(*LAKE[:1], LAKE[1:])
        assert await env_play.play(env_play.part_of(config, ""), config, 0, player, told.append) == 1.0
        with pytest.raises(EngineError, match="did not answer: ValueError: status 500: out of memory"):
            await env_play.play(env_play.part_of(config, ""), config, 0, player, told.append)
    finally:
        await runner.cleanup()
    assert asked[0]["model"] == "policy"
    assert asked[0]["tools"][0]["function"]["name"] == "act"
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][2]["tool_call_id"] == "c1"
    assert any(line.startswith('assistant:  /act {"action": 2}') for line in told)


def test_a_line_is_a_message_or_a_call() -> None:
    tools = (ToolSpec("act", "", {}),)
    assert env_play.spoken("hm", tools) == Message("assistant", "hm")
    assert env_play.spoken("/act", ()) == Message("assistant", "/act")
    assert env_play.spoken("/act", tools).tool_calls[0].arguments == {}
    assert env_play.spoken("/act [1]", tools).malformed
    assert env_play.spoken('/act {"x": 1}', tools).tool_calls[0].arguments == {"x": 1}


def test_bench_measures_resets_steps_and_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["env", "bench", *LAKE, "--concurrent", "1", "4", "--seconds", "0.2"]
    assert main([*arguments, "--json"]) == 0
    one, four = json.loads(capsys.readouterr().out)
    assert (one["concurrent"], four["concurrent"]) == (1, 4)
    for row in (one, four):
        assert row["episodes"] >= row["concurrent"]
        assert row["step"]["per_s"] > row["reset"]["per_s"] > 0
        assert 0 < row["step"]["p50"] <= row["step"]["p95"] <= row["step"]["p99"]
    assert main(arguments) == 0
    assert "FrozenLake-v1, scripted policies" in capsys.readouterr().out
    assert main(["env", "bench", *LAKE, "--concurrent", "0"]) == 2


def test_bench_names_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fails.py").write_text(
        "from slipstream.envs import Message, Observation, SimpleEnv, Task\n"
        "class Fails(SimpleEnv):\n"
        "    def task(self, index): return Task(str(index))\n"
        "    async def reset(self, task): return Observation((Message('user', 'x'),))\n"
        "    async def step(self, message): raise RuntimeError('no sandbox')\n"
    )
    assert main(["env", "bench", "quickstart", "env={kind: python, factory: 'fails:Fails'}", "--seconds", "0.1"]) == 1
    assert "EnvError: Fails: step raised RuntimeError: no sandbox" in capsys.readouterr().err
