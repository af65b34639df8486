"""A run as a program: train until the policy is good enough, with one's own code between the steps.

    python examples/until_good_enough.py quickstart model.path=models/quickstart run.dir=runs/enough

`run.step` does what `slipstream train` does with a batch: the optimizer step, the commit, the push to the engines. Between
two batches the program may do what it likes: here it says how long the longest episode was, has batches from which nothing can be
learned replaced, and leaves when the mean reward of the last steps is high enough. Run it again to go on.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from slipstream import Run
from slipstream.configs import Config, load

ENOUGH, STEPS = 0.9, 5  # mean reward, over how many steps
PATIENCE = 20  # batches in a row without a difference between rewards


async def train(config: Config, enough: float = ENOUGH, steps: int = STEPS) -> list[float]:
    """The mean rewards of the steps, until those of the last `steps` are at least `enough`, or `learner.steps` are done."""
    rewards, skipped = list[float](), 0
    last = deque[float](maxlen=steps)
    async with Run(config, resume=True) as run:
        async for batch in run:
            earned = {row.reward for group in batch.groups for row in group}
            if len(earned) == 1 and skipped < PATIENCE:
                skipped += 1
                await run.discard(batch)
                continue
            longest = max(len(row) for group in batch.groups for row in group)
            metrics = await run.step(batch)
            if metrics is None:
                continue
            skipped = 0
            rewards.append(metrics.reward_mean)
            last.append(metrics.reward_mean)
            sys.stdout.write(f"step {metrics.step:3}  reward {metrics.reward_mean:.3f}  longest {longest} tokens\n")
            if len(last) == steps and sum(last) / steps >= enough:
                break
    sys.stdout.write(run.summary or "good enough: the run can be resumed\n")
    return rewards


if __name__ == "__main__":
    asyncio.run(train(load(sys.argv[1], sys.argv[2:])))
