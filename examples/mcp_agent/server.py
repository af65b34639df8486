"""An MCP server with one tool, as it could come from anywhere: the prices of a shop. Each episode starts one for itself."""

from mcp.server.mcpserver import MCPServer

PRICES = {
    "apple": 2,
    "bread": 3,
    "candle": 5,
    "jar": 4,
    "knife": 11,
    "lamp": 17,
    "pillow": 13,
    "rope": 8,
    "soap": 1,
    "towel": 9,
}

server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    """The price of an item."""
    return f"One {item} costs {PRICES[item]}." if item in PRICES else f"There is no {item}."


if __name__ == "__main__":
    server.run()
