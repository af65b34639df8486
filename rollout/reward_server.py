"""The command line of the reward model's server: upstream's vLLM, as for engines, without weight pushes.

Invariants:
- The server listens only on the given host and port.
- A judge's context is limited by its KV cache; a classifier accepts every episode, or does not start.
"""

from __future__ import annotations

from ..configs.reward import Classifier, ModelReward
from ..configs.schema import Config
from ..errors import ConfigError
from .engines.access import ServerFiles
from .engines.vllm import launch as vllm_server
from .reward_model import SERVED_AS

AUTO_LENGTH = -1  # for vLLM: the model's own context, or the longest that fits into the KV cache


def model_of(config: Config) -> ModelReward:
    assert isinstance(config.reward, ModelReward), "the config has no reward model to serve"
    return config.reward


def command(config: Config, host: str, port: int, files: ServerFiles | None = None) -> list[str]:
    """The command line of a server on `host:port`; `files` as for engines. Raises ConfigError: no vLLM, or not this
    `rollout.engine.memory`."""
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
        "max-model-len": config.agent.max_tokens if classifies else AUTO_LENGTH,
        **vllm_server.memory(config.rollout.engine.memory, cpu),
    }
    return vllm_server.command_line(arguments, cpu=cpu, files=files)


def environment(config: Config) -> dict[str, str]:
    return vllm_server.common_environment(model_of(config).path, ranks=1) | {"PYTHONSAFEPATH": "1"}


def serves_on_cpu() -> bool:
    """Whether the server runs on CPU. Raises ConfigError where vLLM is not installed."""
    try:
        return vllm_server.serves_on_cpu()
    except ConfigError:
        raise ConfigError(
            "reward.kind: a reward model is served by vLLM, which is not installed; run pip install -e .[cpu] or .[cuda], "
            "or use reward.kind=environment"
        ) from None
