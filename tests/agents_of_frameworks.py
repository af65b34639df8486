"""Agents as the users of other frameworks write them; run as `python agents_of_frameworks.py NAME` by an interpreter that has the
framework, with the endpoint's variables (`OPENAI_BASE_URL`, `OPENAI_API_KEY`). It prints the answer."""

import asyncio
import os
import sys

QUESTION = "What is 1 + 2?"


def openai_agents(kind, *, streamed=False):
    import openai

    import agents

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    model = getattr(agents, f"OpenAI{kind}Model")(model="policy", openai_client=openai.AsyncOpenAI())
    agent = agents.Agent(name="adder", instructions="Be good.", model=model, tools=[add])

    async def run():
        if not streamed:
            return (await agents.Runner.run(agent, QUESTION)).final_output
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def smolagents_model():
    from smolagents import OpenAIServerModel

    return OpenAIServerModel(
        model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )


def smolagents_code():
    from smolagents import CodeAgent

    return CodeAgent(tools=[], model=smolagents_model(), max_steps=4, verbosity_level=0).run(QUESTION)


def smolagents_tools():
    from smolagents import ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: the other
        """
        return a + b

    return ToolCallingAgent(tools=[add], model=smolagents_model(), max_steps=4, verbosity_level=0).run(QUESTION)


def langgraph():
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    graph = create_react_agent(ChatOpenAI(model="policy"), [add], prompt="Be good.")
    return asyncio.run(graph.ainvoke({"messages": [("user", QUESTION)]}))["messages"][-1].content


AGENTS = {
    "openai-agents, Responses": lambda: openai_agents("Responses"),
    "openai-agents, Chat": lambda: openai_agents("ChatCompletions"),
    "openai-agents, streamed": lambda: openai_agents("Responses", streamed=True),
    "langgraph": langgraph,
    "smolagents, code": smolagents_code,
    "smolagents, tools": smolagents_tools,
}

if __name__ == "__main__":
    sys.stdout.write(f"answer: {AGENTS[sys.argv[1]]()}\n")
