"""Makes a Unix socket of the host a TCP port in the sandbox's own network: `relay.py PORT SOCKET PROGRAM ...` carries bytes in a
process of its own, and becomes the program.

The port listens before the program starts. The relay ends with the program's command, as everything in the background does.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import os
import select
import signal
import socket
import sys

CHUNK = 1 << 16
READ, WRITE = select.POLLIN, select.POLLOUT


class End:
    """One side of a connection: what waits to be sent to it, and whether it has said all that it has to say."""

    def __init__(self, side):
        self.side, self.other, self.waiting, self.ended, self.told = side, self, b"", False, False
        side.setblocking(False)


def connect(listener, path, ends):
    """The two ends of a new connection; none where the host does not take it."""
    sides = []
    try:
        sides.append(listener.accept()[0])
        sides.append(socket.socket(socket.AF_UNIX))
        sides[1].connect(path)
    except OSError:
        for side in sides:
            side.close()
        return ()
    one, other = map(End, sides)
    one.other, other.other = other, one
    ends.update({end.side.fileno(): end for end in (one, other)})
    return one, other


def advance(end, event):
    """Send what waits, or receive what the other end takes next."""
    try:
        if end.waiting and event & WRITE:
            end.waiting = end.waiting[end.side.send(end.waiting) :]
        elif not end.ended and not end.other.waiting and event & ~WRITE:
            end.other.waiting = end.side.recv(CHUNK)
            end.ended = not end.other.waiting
        for one in (end, end.other):
            if one.other.ended and not one.waiting and not one.told:
                one.told = True
                one.side.shutdown(socket.SHUT_WR)
    except BlockingIOError:
        pass
    except OSError:
        for one in (end, end.other):
            one.ended, one.waiting = True, b""


def serve(listener, path):
    poll, ends = select.poll(), {}
    poll.register(listener, READ)
    while True:
        for fd, event in poll.poll():
            if fd == listener.fileno():
                changed = connect(listener, path, ends)
            elif fd in ends:
                advance(ends[fd], event)
                changed = ends[fd], ends[fd].other
            else:  # closed by an event before this one
                continue
            over = all(end.ended and not end.waiting for end in changed)
            for end in changed:
                wanted = (0 if end.ended or end.other.waiting else READ) | (WRITE if end.waiting else 0)
                if over or not wanted:  # a side that has hung up is reported whatever is wanted
                    try:
                        poll.unregister(end.side)
                    except KeyError:
                        pass
                else:
                    poll.register(end.side, wanted)
                if over:
                    del ends[end.side.fileno()]
                    end.side.close()


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
    if not os.fork():
        os.setpgid(0, 0)  # out of the way of a program that signals its group
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nothing = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
        serve(listener, sys.argv[2])
    listener.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    except OSError as error:
        os.write(2, f"{sys.argv[3]}: {error.strerror}\n".encode())
        os._exit(127)
