"""A socket as the service and its clients use it."""

from __future__ import annotations

from typing import NamedTuple

import zmq
import zmq.asyncio


class Door(NamedTuple):
    """One socket twice: `ready` is awaited, `plain` read and written without asyncio's future for each message.

    Who sends on `plain` reads it, too, before he waits on `ready`: sending may take note of what came, and nothing wakes him then.
    """

    plain: zmq.Socket[bytes]
    ready: zmq.asyncio.Socket

    @classmethod
    def of(cls, socket: zmq.asyncio.Socket) -> Door:
        return cls(zmq.Socket.shadow(socket), socket)

    def read(self) -> list[bytes] | None:
        """The next message; None where there is none."""
        try:
            return self.plain.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
