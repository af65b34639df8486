"""Connections whose other end vanished without a word: a host that is gone, a cable that was pulled."""

from __future__ import annotations

import zmq
import zmq.asyncio

LOST_S = 5
"""A silent connection is probed after this long; without an answer it is closed after twice as long."""


def keep_alive(socket: zmq.Socket | zmq.asyncio.Socket) -> None:
    """Have TCP notice. Call before `socket` is bound or connected.

    libzmq has heartbeats of its own. With them libzmq 4.3.5 aborts the process (`stream_engine_base.cpp`: `!_io_error`) when one
    falls due on a connection that broke while nothing more could be read from it, as when its socket is being closed.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, LOST_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, LOST_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 1)
    socket.setsockopt(zmq.TCP_MAXRT, 2000 * LOST_S)
