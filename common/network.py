"""This host's end of a connection: which of its addresses, and which of its interfaces, leads to another host."""

from __future__ import annotations

import socket


def address_towards(host: str, port: int) -> str:
    """This host's own address on the route to `host`. Connecting a datagram socket sends nothing. Raises OSError: no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The name of this host's interface that has `address`; empty where none has."""
    import psutil  # inference servers import this module, and need only the function above

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""
