"""Names of the processes of a replica. The first has the replica's own; where its server spans hosts, each other host has one, too.

engine-0        answers requests, on the first host
engine-0.1      computes with it, on the second
"""

from __future__ import annotations

SEPARATOR = "."


def processes_of(replica: str, hosts: int) -> list[str]:
    """The processes of a replica over so many hosts, its own first."""
    return [replica, *(f"{replica}{SEPARATOR}{host}" for host in range(1, hosts))]


def replica_of(process: str) -> str:
    """The replica that a process belongs to. Any other role is its own."""
    return process.partition(SEPARATOR)[0]


def node_rank(process: str) -> int:
    """Which of its replica's hosts a process is on, from 0."""
    return int(process.partition(SEPARATOR)[2] or 0)
