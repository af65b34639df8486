"""A taskset of the verifiers library for tests, found by the interpreter that has it: doubles of small numbers."""

import verifiers.v1 as vf
from verifiers.v1.env import Env

stopped = []  # environments whose servers have ended
_stop = Env.stop


async def _said(env: Env) -> None:
    stopped.append(env)
    await _stop(env)


Env.stop = _said  # the library calls it when its servers end


class Data(vf.TaskData):
    answer: str


class Double(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def serving(self, trace) -> float:
        return float(not stopped)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class MiniTaskset(vf.Taskset[Double, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            yield Double(Data(prompt=f"{number} + {number}?", answer=str(2 * number)), self.config.task)


__all__ = ["MiniTaskset"]
