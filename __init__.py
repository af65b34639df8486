"""Slipstream: asynchronous, staleness-bounded reinforcement learning for language-model agents.

The folders follow one trajectory: `envs` and `agents` act, `rollout` generates, `buffer` keeps, `learner` improves,
`weightsync` sends the new policy back; `launch` starts it all and `monitor` shows it.

This file stays light: vLLM imports it in every engine process through the plugin entry point. `slipstream.Run`, a run as a program,
is imported where it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launch.program import Run as Run

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "Run":
        from .launch.program import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
