"""The verifier of files that the policy made: tests that the policy has never seen score them.

Invariants:
- The tests run in a new sandbox, into which only the named files are copied: whatever else the policy did to its own, such as
  a reward file that it wrote or a folder that it closed, has no effect.
- What the tests leave that is no reward between 0 and 1 earns 0. A sandbox that was ended from outside is a ToolError.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from ..sandbox import Sandbox, SandboxPool, local_pool

LONGEST = 64  # characters of a reward file


async def score_files(
    made: Sandbox,
    paths: Sequence[str],
    tests: Mapping[str, bytes],
    command: Sequence[str],
    *,
    reward_file: str = "",
    pool: SandboxPool | None = None,
) -> float:
    """Copy files of the policy's sandbox to a new one, add the tests and run them. Programs of the policy that the tests
    execute can still deceive them; compare what they print with values that stay outside (`code`) where that is possible.

    Args:
        made: the policy's sandbox.
        paths: files in it, relative to its home; those that are missing are left out.
        tests: contents of files by their paths; they replace files of the policy.
        command: what runs in the new sandbox's home.
        reward_file: where the command writes a number from 0 to 1; without, exit status 0 is 1.

    Raises:
        ToolError: a sandbox could not be opened, or was ended from outside.
    """
    found = {path: content for path in paths if (content := await _read(made, path)) is not None}
    if reward_file in paths:
        raise ValueError(f"{reward_file} is where the tests write, and cannot be a file of the policy")
    return await score_contents(found, tests, command, reward_file=reward_file, pool=pool)


async def score_contents(
    files: Mapping[str, bytes],
    tests: Mapping[str, bytes],
    command: Sequence[str],
    *,
    reward_file: str = "",
    pool: SandboxPool | None = None,
) -> float:
    """As `score_files`, of files by their paths: what an agent left in the folder of its task (`Message.files`). One at the place
    of `reward_file` is left out."""
    fresh = await (pool or local_pool()).open()
    try:
        try:
            for path, content in files.items():
                if not reward_file or posixpath.normpath(path) != posixpath.normpath(reward_file):
                    await fresh.write(path, content)
            for path, content in tests.items():
                await fresh.write(path, content)
        except OSError:  # a file of the policy stands where another has to be, or all are more than the disk
            return 0.0
        ran = await fresh.run(command)
        if not reward_file:
            return float(ran.ok)
        written = await _read(fresh, reward_file) if ran.ended == "exited" else None
        return _reward(written)
    finally:
        await fresh.close()


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read(path)
    except OSError:
        return None


def _reward(written: bytes | None) -> float:
    try:
        reward = float((written or b"")[:LONGEST].decode())
    except ValueError:
        return 0.0
    return reward if 0 <= reward <= 1 else 0.0
