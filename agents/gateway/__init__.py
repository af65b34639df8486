"""The gateway: lets agents that were written elsewhere, for the OpenAI or the Anthropic API, play episodes with the policy."""

from .endpoint import Endpoint as Endpoint
from .mcp import EnvTools as EnvTools
from .server import Gateway as Gateway
