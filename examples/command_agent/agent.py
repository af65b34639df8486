"""A command-line agent of the standard library alone, which knows nothing of Slipstream: `agent.py [--shell] QUESTION` prints its
answer. Its model is at $OPENAI_BASE_URL; the tools of the task are those of the MCP server at $SLIPSTREAM_MCP_URL, where there is
one. With `--shell` it also offers a shell in the folder in which it was started."""

import json
import os
import subprocess
import sys
import urllib.request

TURNS = 8  # longest conversation
OUTPUT = 2000  # characters of a command's output that the model reads
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a bash command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def post(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def mcp(method: str, **parameters: object) -> dict:
    """The result of a call of the MCP server."""
    answer = post(os.environ["SLIPSTREAM_MCP_URL"], {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters})
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    return answer["result"]


def run(command: str) -> str:
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout[-OUTPUT:] or f"exit status {done.returncode}"


def call(name: str, arguments: dict) -> str:
    """What the model is told of its call of a tool."""
    if name == "shell" and "--shell" in sys.argv:
        return run(str(arguments.get("command", "")))
    return mcp("tools/call", name=name, arguments=arguments)["content"][0]["text"]


def tools() -> list[dict]:
    found = mcp("tools/list")["tools"]
    specs = [{"name": t["name"], "description": t["description"], "parameters": t["inputSchema"]} for t in found]
    own = [SHELL] if "--shell" in sys.argv else []
    return [*({"type": "function", "function": spec} for spec in specs), *own]


def main() -> None:
    offered = tools()
    messages: list[dict] = [{"role": "user", "content": sys.argv[-1]}]
    for _ in range(TURNS):
        body = {"model": "policy", "messages": messages, "tools": offered}
        reply = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)["choices"][0]["message"]
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        for one in reply["tool_calls"]:
            told = call(one["function"]["name"], json.loads(one["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": told})
    sys.stdout.write(messages[-1]["content"] or "")


main()
