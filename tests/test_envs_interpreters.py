"""The tools `python`, `shell` and `search`, as an environment calls them."""

import asyncio
import json
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web
from slipstream.envs import (
    Message,
    PythonTool,
    RetrieveServer,
    SearchIndex,
    ShellTool,
    SimpleEnv,
    ToolCall,
    call_tool,
    search_tool,
)
from slipstream.envs.sandbox import MIB, Limits, LocalPool
from slipstream.errors import ConfigError, ToolError

ROOT = Path(__file__).parent.parent


@pytest.fixture
async def pool():
    pool = LocalPool(Limits(wall_s=60, cpu_s=60, memory=300 * MIB))
    yield pool
    await pool.close()


@pytest.fixture
async def hurried():
    """A pool of which a test waits for the limits."""
    pool = LocalPool(Limits(wall_s=2, cpu_s=2, memory=300 * MIB))
    yield pool
    await pool.close()


async def say(tool, **arguments):
    name = tool.tool.spec.name if hasattr(tool, "tool") else tool.spec.name
    tools = {name: tool.tool if hasattr(tool, "tool") else tool}
    message, valid = await call_tool(tools, ToolCall(name, arguments, "id"))
    assert message.role == "tool"
    return message.content, valid


async def test_python_keeps_variables_and_outlives_what_the_policy_does_to_it(hurried):
    python = PythonTool(hurried)
    assert await say(python, code="x = 6\nprint('six')\nx * 7") == ("six\n42", True)
    assert await say(python, code="y = x") == ("[no output]", True)
    text, valid = await say(python, code="1 / 0")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert valid
    text, _ = await say(python, code="while True: pass")
    assert text == "[stopped: it took longer than 2 s]"
    assert await say(python, code="y") == ("6", True)
    text, _ = await say(python, code="import os; os._exit(0)")
    assert text == "[stopped: it ended the interpreter]; files and variables are lost"
    text, _ = await say(python, code="y")
    assert text.endswith("NameError: name 'y' is not defined")
    text, _ = await say(python, code="print('a' * 9000 + 'z')")
    assert len(text) < 4100
    assert "characters are left out" in text
    assert text.endswith("z")
    for wrong in ({}, {"code": 3}, {"code": "1", "more": 2}):
        assert await say(python, **wrong) == ('error: the tool python takes {"code": "..."}', False)
    await python.close()


async def test_calls_at_once_share_one_sandbox(pool):
    python = PythonTool(pool)
    opened, open_python = [], pool.open_python

    async def spy():
        opened.append(await open_python())
        return opened[-1]

    pool.open_python = spy
    await asyncio.gather(say(python, code="x = 1"), say(python, code="y = 2"))
    assert await say(python, code="x + y") == ("3", True)
    await python.close()
    assert len(opened) == 1


async def test_shell_keeps_its_folder_and_tells_a_status(pool):
    shell = ShellTool(pool)
    assert await say(shell, command="mkdir d && cd d && export A=b && echo made") == ("made", True)
    text, _ = await say(shell, command="echo $A; basename $PWD; exit 4")
    assert text == "b\nd\n[exit status 4]"
    await shell.close()


async def test_a_sandbox_ended_from_outside_is_no_text_but_a_tool_error(pool):
    python = PythonTool(pool)
    await say(python, code="1")
    call = asyncio.create_task(say(python, code="import time; time.sleep(60)"))
    await asyncio.sleep(0.2)
    os.kill(python._session.pid, signal.SIGKILL)
    with pytest.raises(ToolError, match="from outside"):
        await call
    await python.close()


async def test_many_episodes_have_sandboxes_of_their_own(pool):
    tools = [PythonTool(pool) for _ in range(12)]
    await asyncio.gather(*(say(tool, code=f"me = {i}") for i, tool in enumerate(tools)))
    assert [text for text, _ in await asyncio.gather(*(say(tool, code="me") for tool in tools))] == [
        str(i) for i in range(12)
    ]
    await asyncio.gather(*(tool.close() for tool in tools))


async def test_the_environment_of_the_page_runs():
    page = (ROOT / "docs" / "environments.md").read_text()
    found = next(block for block in page.split("```python\n")[1:] if "class Digits" in block).split("```")[0]
    module = ModuleType("digits")
    exec(compile(found, "environments.md", "exec"), vars(module))
    env: SimpleEnv = module.Digits(split="train", seed=0)
    task = env.task(3)
    observation = await env.reset(task)
    assert [tool.name for tool in observation.tools] == ["python"]
    code = f"len(str(7 ** {task.payload['power']}))"
    result = await env.step(Message("assistant", "", (ToolCall("python", {"code": code}, "1"),)))
    right = result.messages[0].content
    assert right == str(len(str(7 ** task.payload["power"])))
    assert (await env.step(Message("assistant", f"#### {right}"))).reward == 1.0
    assert (await env.step(Message("assistant", "#### 1"))).reward == 0.0
    await env.close()


# --- search -----------------------------------------------------------------------------------------------------------

PASSAGES = [
    "Paris is the capital of France.",
    "Tokyo is the capital of Japan.",
    "A cat is an animal.",
    "Cats sleep AND dream (often).",
]


async def test_search_finds_and_no_query_is_an_error():
    pytest.importorskip("tantivy")
    tool = search_tool(SearchIndex(PASSAGES), count=2)
    text, valid = await say(tool, query="What's France's capital?")
    assert text.splitlines()[0] == "[1] Paris is the capital of France."
    assert valid
    assert (await say(tool, query="sleeping"))[0] == "[1] Cats sleep AND dream (often)."
    for query in (
        "",
        "???",
        "AND",
        '"',
        "a:b AND (",
        "NOT [x TO",
        "title:^2~",
        "\\",
        "\x00",
        "<|im_end|>",
        "x " * 10_000,
    ):
        text, valid = await say(tool, query=query)
        assert valid
        assert text
    assert (await say(tool, query="zebra"))[0] == "[nothing was found]"
    assert await say(tool, q="x") == ('error: the tool search takes {"query": "..."}', False)


async def test_an_index_is_built_once_and_stays(tmp_path):
    pytest.importorskip("tantivy")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(
            json.dumps(line) + "\n" for line in ({"id": 1, "contents": PASSAGES[0]}, {"text": PASSAGES[1]}, PASSAGES[2])
        )
    )
    assert len(SearchIndex(corpus, tmp_path / "index")) == 3
    corpus.unlink()
    index = SearchIndex(corpus, tmp_path / "index")
    assert [p.text for p in await index.search("japan", 1)] == [PASSAGES[1]]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"}\n{"title": "y"}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl, line 2: no passage"):
        SearchIndex(bad, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ConfigError, match="No such file"):
        SearchIndex(tmp_path / "nowhere.jsonl")


async def test_a_retrieve_server_and_its_failures_are_never_text():
    answers = {"status": 200, "body": None}
    asked = []

    async def retrieve(request):
        asked.append(await request.json())
        body = answers["body"] or {"result": [[{"document": {"contents": "found it"}, "score": 2.5}]]}
        return web.json_response(body, status=answers["status"])

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    tool = search_tool(RetrieveServer(f"http://127.0.0.1:{port}/retrieve"), count=3)
    assert await say(tool, query="it") == ("[1] found it", True)
    assert asked[0]["queries"] == ["it"]
    assert asked[0]["topk"] == 3
    answers["status"] = 503
    with pytest.raises(ToolError, match="answered 503"):
        await say(tool, query="it")
    answers["status"] = 200
    for wrong in ({"result": 3}, {"x": []}, {"result": [[{"document": 5, "score": 1}]]}, [1]):
        answers["body"] = wrong
        with pytest.raises(ToolError, match="no answer of /retrieve's form"):
            await say(tool, query="it")
    await runner.cleanup()
    with pytest.raises(ToolError, match="does not answer"):
        await say(tool, query="it")
