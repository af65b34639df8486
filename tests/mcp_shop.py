"""A small MCP server with state, for tests: `python mcp_shop.py [http PORT]`."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")
stock = {"apple": 3}


@server.tool()
def buy(item: str, count: int = 1) -> str:
    "Buy items."
    if item not in stock:
        raise ValueError(f"no {item}")
    stock[item] -= count
    return f"{count} {item}, {stock[item]} left"


@server.tool()
def slow(seconds: float) -> str:
    "Sleep."
    time.sleep(seconds)
    return "awake"


@server.tool()
def crash() -> str:
    "Die."
    os._exit(3)


if sys.argv[1:2] == ["http"]:
    server.run("streamable-http", port=int(sys.argv[2]))
else:
    server.run("stdio")
