"""Slipstream: asynchronous, staleness-bounded reinforcement learning for language-model agents.

The folders follow one trajectory: `envs` and `agents` act, `rollout` generates, `buffer` keeps, `learner` improves,
`weightsync` sends the new policy back; `launch` starts it all and `monitor` shows it.

This file stays light: vLLM imports it in every engine process through the plugin entry point.
"""

__version__ = "0.1.0"
