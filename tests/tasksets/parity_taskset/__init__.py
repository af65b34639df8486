"""A taskset of the verifiers library for tests: rewards answers of odd length, whatever they are; task 2 is always right, 3 is
never, and scoring task 4 raises."""

import verifiers.v1 as vf

SURE = {2: 1.0, 3: 0.0}


class Data(vf.TaskData):
    number: int


class Parity(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def odd(self, trace) -> float:
        if self.data.number == 4:
            raise ValueError("there is no score")
        if self.data.number in SURE:
            return SURE[self.data.number]
        return float(len(trace.last_reply or "") % 2)


class ParityTaskset(vf.Taskset[Parity, vf.TasksetConfig]):
    def load(self):
        for number in range(5):
            yield Parity(Data(prompt=f"Task {number}", number=number), self.config.task)


__all__ = ["ParityTaskset"]
