"""This host's end of a connection: which of its addresses, and which of its interfaces, leads to another host."""

from __future__ import annotations

import socket

ANY = ("0.0.0.0", "::")  # addresses that stand for all of a host's


def name_to_open(host: str) -> str:
    """How another host writes `host`, on which this one listens, in a URL."""
    name = socket.gethostname() if host in ANY else host
    return f"[{name}]" if ":" in name else name


def address_towards(host: str, port: int) -> str:
    """This host's own address on the route to `host`. Connecting a datagram socket sends nothing. Raises OSError: no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def collective_interface(address: str) -> dict[str, str]:
    """Environment variables by which gloo, NCCL and HCCL use the interface that has `address`; none where none has it."""
    if not (interface := interface_of(address)):
        return {}
    exactly = f"={interface}"  # not all whose names begin like it
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": exactly, "HCCL_SOCKET_IFNAME": exactly}


def interface_of(address: str) -> str:
    """The name of this host's interface that has `address`; empty where none has."""
    import psutil  # inference servers import this module, and need only `address_towards`

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""
