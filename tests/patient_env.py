"""The environment of `slipstream chaos` at the pace of a slow tool, for runs that go on while a test waits: they leave the cores to
what happens meanwhile, and to other tests."""

from __future__ import annotations

import asyncio

from slipstream.chaos.env import FlakyEnv
from slipstream.envs import Message, StepResult

TURN_S = 0.8

PATIENT = ("env.factory=slipstream.tests.patient_env:PatientEnv", "rollout.max_episodes=16")
"""Of a run of the preset `chaos`: two groups, a batch, are played at a time."""


class PatientEnv(FlakyEnv):
    """Each turn takes `TURN_S` seconds at least."""

    async def step(self, message: Message) -> StepResult:
        await asyncio.sleep(TURN_S)
        return await super().step(message)
