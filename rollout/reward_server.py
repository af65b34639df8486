"""How the server of the reward model is started: upstream's vLLM, as for engines, with weights that nobody pushes.

Invariants:
- A server listens where it is told and nowhere else.
- A judge takes whatever context its KV cache has room for; a classifier takes any episode, or does not start.
"""

from __future__ import annotations

from ..configs.reward import Classifier, ModelReward
from ..configs.schema import Config
from ..errors import ConfigError
from . import vllm_server
from .reward import SERVED_AS

FITTING = -1
"""To vLLM: the model's own context, or the longest that fits into the KV cache."""


def model_of(config: Config) -> ModelReward:
    """The section of the model that is to be served."""
    assert isinstance(config.reward, ModelReward), "a reward server was asked for, and the config has no reward model"
    return config.reward


def command(config: Config, host: str, port: int) -> list[str]:
    """The command line of a server that listens on `port` of `host`.

    Raises:
        ConfigError: vLLM is not installed, or `reward.memory` is neither a size nor, on a GPU, a share of its memory.
    """
    reward = model_of(config)
    cpu = serves_on_cpu()
    classifies = isinstance(reward, Classifier)
    arguments = {
        "model": reward.path,
        "served-model-name": SERVED_AS,
        "runner": "pooling" if classifies else "generate",
        "host": host,
        "port": port,
        "dtype": config.model.dtype,
        "seed": config.seed,
        "max-model-len": config.agent.max_tokens if classifies else FITTING,
        **vllm_server.memory(reward.memory, cpu, "reward.memory"),
    }
    return vllm_server.command_line(arguments, cpu=cpu)


def environment(config: Config) -> dict[str, str]:
    """What the server needs in its environment besides the caller's own."""
    return vllm_server.common_environment(model_of(config).path, ranks=1) | {"PYTHONSAFEPATH": "1"}


def serves_on_cpu() -> bool:
    """Whether it computes on CPU. Raises ConfigError where vLLM is not installed."""
    try:
        return vllm_server.serves_on_cpu()
    except ConfigError:
        raise ConfigError(
            "reward.kind: a reward model is served by vLLM, which is not installed; install slipstream-rl[cpu] or "
            "slipstream-rl[cuda], or use reward.kind=environment"
        ) from None
