"""A taskset of the verifiers library for tests, found by the interpreter that has it: doubles of small numbers."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Double(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class MiniTaskset(vf.Taskset[Double, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            yield Double(Data(prompt=f"{number} + {number}?", answer=str(2 * number)), self.config.task)


__all__ = ["MiniTaskset"]
