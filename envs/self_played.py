"""Environments that own their loop: they play an episode themselves, with the policy at an endpoint, and report what came of it.

Such a source declares `self_played = True`. Its `reset` returns what reports show of the task. Its `step` is called once, with the
message of `play_message`: it plays the whole episode with OpenAI's API at `endpoint_of` that message, and returns its reward with
`done`.

Invariants:
- What the library reports as an error is an EnvError, whatever reward comes with it. Where the policy's engine was lost, the
  session has remembered that, and the failure is the engine's.
- Replies to the model of the endpoint are trained on; those to models of other names are not.
"""

from __future__ import annotations

import msgspec

from ..errors import EnvError
from .base import Message, ToolCall

PLAY = "play"


class PolicyEndpoint(msgspec.Struct, frozen=True):
    """Where a self-played environment finds the policy: the base URL of an OpenAI API, with /v1, its key, and the model's name."""

    url: str
    key: str
    model: str = "policy"


def play_message(endpoint: PolicyEndpoint) -> Message:
    """The only message that a self-played environment takes."""
    return Message("assistant", "", (ToolCall(PLAY, msgspec.structs.asdict(endpoint), PLAY),))


def endpoint_of(message: Message) -> PolicyEndpoint:
    """Raises EnvError: it is a message of an agent that plays the environment."""
    try:
        (call,) = message.tool_calls
        return msgspec.convert(call.arguments, PolicyEndpoint)
    except ValueError:  # msgspec's, too
        raise EnvError(
            "this environment plays itself and takes no messages; it needs an endpoint of the policy"
        ) from None
