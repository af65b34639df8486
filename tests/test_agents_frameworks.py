"""Agents of other frameworks, in an interpreter of theirs, over the gateway: what is trained on is what was sampled."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from slipstream.agents.gateway import Gateway
from slipstream.tests.servers import needs, python_of
from slipstream.tests.sessions import Script, call, session_of

PROGRAM = Path(__file__).parent / "agents_of_frameworks.py"

pytestmark = [pytest.mark.full, needs("agents")]

TURNS = (call("add", a=1, b=2), "  Hmm,\n" + call("add", a=3, b=3) + "\n" + call("add", a=4, b=5), "The result is 15. ")
CODE = ("Thought: compute.\n<code>\nx = 1 + 2\nprint(x)\n</code>", "Thought: done.\n<code>\nfinal_answer(x)\n</code>")
CALLS = (call("add", a=1, b=2), call("final_answer", answer="3"))


async def played(name, script, session):
    """What the agent printed at last."""
    async with Gateway() as gateway, gateway.endpoint(session, None) as endpoint:
        quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}
        process = await asyncio.create_subprocess_exec(
            str(python_of("agents")), str(PROGRAM), name, env=os.environ | dict(endpoint.environ) | quiet,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode().rpartition("answer: ")[2].strip()


@pytest.mark.parametrize(
    ("name", "said", "answer", "branches"),
    [
        ("openai-agents, Responses", TURNS, "The result is 15.", 1),
        ("openai-agents, Chat", TURNS, "The result is 15.", 1),
        ("openai-agents, streamed", TURNS, "The result is 15.", 1),
        ("langgraph", TURNS, "The result is 15.", 1),
        ("smolagents, tools", CALLS, "3", 2),  # it shows the policy its own calls as text
    ],
    ids=("responses", "chat", "streamed", "langgraph", "smolagents"),
)
async def test_every_token_that_an_agent_with_tools_sampled_is_trained_on(
    tokenizer, renderer, name, said, answer, branches
):
    script = Script(tokenizer, said.__getitem__)
    session = session_of(renderer, tokenizer, script, max_tokens=20_000, max_tokens_per_turn=500)
    assert await played(name, script, session) == answer
    assert script.asked == len(said)
    assert script.check_exact(session) == branches


async def test_what_a_stop_text_cuts_off_is_not_trained_on_and_the_rest_is(tokenizer, renderer):
    """smolagents' code agent stops at `</code>`, and shows its own replies in another form in the next turn."""
    script = Script(tokenizer, CODE.__getitem__)
    session = session_of(renderer, tokenizer, script, max_tokens=20_000, max_tokens_per_turn=500)
    assert await played("smolagents, code", script, session) == "3"
    assert script.asked == len(CODE)

    def kept(sampled):
        return next(sampled[:n] for n in range(1, len(sampled) + 1) if "</code>" in tokenizer.decode(list(sampled[:n])))

    before = sum(len(sampled) for _, sampled in script.log)
    script.log = [(prompt, kept(sampled)) for prompt, sampled in script.log]
    assert sum(len(sampled) for _, sampled in script.log) < before
    assert script.check_exact(session) > 1
