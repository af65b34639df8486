"""The frames between the host and a program inside a sandbox. Requests are marshalled tuples, answers are lists of bytes: both are
framed by their length, and so is each part of an answer. The text of this file stands before that of a program that uses it."""

import marshal
import os


def exactly(fd, count):
    data = bytearray()  # files of a hundred MiB come in thousands of pieces
    while len(data) < count:
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            os._exit(0)  # the host has closed the sandbox, or ended
        data += piece
    return bytes(data)


def request_of(fd):
    return marshal.loads(exactly(fd, int.from_bytes(exactly(fd, 4), "big")))


def body_of(parts):
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def error_parts(error):
    """The answer to a request that an OSError has ended."""
    return [b"error", str(error.errno or 0).encode(), (error.strerror or str(error)).encode()]


def answer(fd, *parts):
    body = body_of(parts)
    data = memoryview(len(body).to_bytes(4, "big") + body)
    while data:
        data = data[os.write(fd, data) :]
