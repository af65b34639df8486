"""Scores of files: what the policy did to its own sandbox, to the tests or to the reward file earns nothing."""

import asyncio
import contextlib
import functools
import os
import signal

import pytest
from slipstream.envs.sandbox import Limits, LocalPool
from slipstream.envs.verifiers import score_files
from slipstream.errors import ToolError

TEST = b'if [ "$(cat answer.txt 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > reward.txt\n'

POLICIES = {
    "echo 42 > answer.txt": 1.0,
    "echo 41 > answer.txt": 0.0,
    "true": 0.0,
    "echo 1 > reward.txt": 0.0,
    "echo 1 > reward.txt; chmod 0 reward.txt": 0.0,
    "echo 1 > reward.txt; chmod 0 .": 0.0,
    "echo 'echo 1 > reward.txt' > test.sh; chmod 444 test.sh": 0.0,
    "mkdir test.sh reward.txt": 0.0,
    "mkdir answer.txt": 0.0,
    "ln -s /dev/zero answer.txt": 0.0,
    "mkfifo answer.txt": 0.0,
    "echo 42 > answer.txt; (while true; do echo 1 > reward.txt; done) & true": 1.0,
}


@pytest.fixture
async def pool():
    pool = LocalPool(Limits(wall_s=5))
    yield pool
    await pool.close()


async def played(pool, command):
    box = await pool.open()
    await box.run(("/bin/sh", "-c", command))
    return box


async def test_only_the_answer_counts(pool):
    async def score(command):
        box = await played(pool, command)
        try:
            tests = {"test.sh": TEST}
            return await score_files(
                box, ["answer.txt"], tests, ("/bin/sh", "test.sh"), reward_file="reward.txt", pool=pool
            )
        finally:
            await box.close()

    rewards = await asyncio.gather(*map(score, POLICIES))
    assert dict(zip(POLICIES, rewards, strict=True)) == POLICIES


@pytest.mark.parametrize("written", ["", "nan", "inf", "2", "-1", "1e30", "yes", "1 1", "\\377"])
async def test_what_is_no_reward_earns_nothing(pool, written):
    box = await pool.open()
    command = ("/usr/bin/printf", written)
    tests = {"test.sh": f"/usr/bin/printf '{written}' > reward.txt".encode()}
    assert await score_files(box, [], tests, ("/bin/sh", "test.sh"), reward_file="reward.txt", pool=pool) == 0.0
    assert await score_files(box, [], {}, command, pool=pool) == 1.0  # without a file the exit status counts
    assert await score_files(box, [], {}, ("/bin/false",), pool=pool) == 0.0
    await box.close()


async def test_a_sandbox_ended_from_outside_is_no_reward(pool):
    box = await played(pool, "echo 42 > answer.txt")
    os.kill(box.pid, signal.SIGKILL)
    score = functools.partial(score_files, box, ["answer.txt"], {"test.sh": TEST}, ("/bin/sh", "test.sh"), pool=pool)
    with contextlib.suppress(ToolError):
        await score()  # it may still answer while it is ending
        await asyncio.sleep(1)
    with pytest.raises(ToolError, match="from outside"):
        await score()
    await box.close()
    with pytest.raises(ValueError, match="where the tests write"):
        await score_files(box, ["r"], {}, ("/bin/true",), reward_file="r", pool=pool)
