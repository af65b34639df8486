"""The process behind the verifiers' `in_process`: `python -m slipstream.envs.verifiers.call_server FD` calls one function after
another."""

from __future__ import annotations

import os
import pickle
import pkgutil
import resource
import socket
import sys

from ...common.process import set_parent_death_signal
from .process_pool import BEGUN, FAILED, FRAME, RESULT, failure

MEMORY = 4 << 30  # bytes that a call may allocate: a runaway one ends before the host's memory does


def main() -> None:
    set_parent_death_signal()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    with connection, connection.makefile("rb") as requests:

        def answer(kind: bytes, body: bytes = b"") -> None:
            connection.sendall((1 + len(body)).to_bytes(FRAME, "big") + kind + body)

        while size := requests.read(FRAME):
            try:
                function, arguments = pickle.loads(requests.read(int.from_bytes(size, "big")))
                if isinstance(function, str):
                    function = pkgutil.resolve_name(function)
                answer(BEGUN)
                result = pickle.dumps(function(*arguments))
            except BaseException as error:
                answer(FAILED, failure(error))
            else:
                answer(RESULT, result)


if __name__ == "__main__":
    main()
