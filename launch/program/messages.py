"""What a program and the supervisor of its run tell each other: JSON, a line each, over the supervisor's stdin and stdout.

program                                  supervisor
   │── BeginRun ─────────────────────────────>│  checks the config, starts the other roles
   │<──────────────────────────── StartRank ──│  rank 0 of the learner is to begin, in the program
   │<───────────────────────────── StopRank ──│  and is to end: what SIGTERM is to a role
   │── LeaveRun ─────────────────────────────>│  the program wants no more steps: as an interrupt of `slipstream train`
   │── RankEnded ────────────────────────────>│  as the end of a process
   │<───────────────────────────── RunEnded ──│  the last message; then the supervisor's process ends
"""

from __future__ import annotations

import msgspec

from ...configs import Config


class BeginRun(msgspec.Struct, frozen=True, tag=True):
    config: Config
    resume: bool  # continue the run in `run.dir` where there is one
    show: bool  # one line per step and event on stderr


class LeaveRun(msgspec.Struct, frozen=True, tag=True):
    pass


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    status: int


class StartRank(msgspec.Struct, frozen=True, tag=True):
    environment: dict[str, str]  # the variables of its role


class StopRank(msgspec.Struct, frozen=True, tag=True):
    pass


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    kind: str = ""  # the class of the error in `slipstream.errors`; empty where all is done
    text: str = ""  # of the error, or what `slipstream train` prints at the end


FromProgram = BeginRun | LeaveRun | RankEnded
FromSupervisor = StartRank | StopRank | RunEnded


def encode_line(message: FromProgram | FromSupervisor) -> bytes:
    return msgspec.json.encode(message) + b"\n"
