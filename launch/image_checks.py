"""Which parts of a run take the images of a model that sees some, and what is refused with such a model.

Invariants:
- A part that would leave out an image unseen is refused by one line, before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..common.modelscope import is_on_modelscope
from ..configs import Config
from ..configs.algorithm import Dpo, named_references, needs_critic
from ..configs.backends import FROZEN_VISION, Megatron
from ..configs.engine_checks import FP8
from ..configs.engines import Transformers, Vllm, is_quantized
from ..configs.reward import ModelReward
from ..configs.sft import SftConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    from renderers import Renderer

    from ..envs import Observation

IMAGE_ENGINES = (Transformers, Vllm)  # kinds of engines that take images
OPTIONS = ("recompute", FROZEN_VISION)  # of the learner's backend that compute images
RENDERER = "qwen3-vl"  # the chat format that shows images


def check_images(config: Config) -> None:
    """Raises ConfigError where the model of `model.path` sees images and a part of the run takes none, or where it sees none and a
    key is about them."""
    from ..learner.model import has_images

    if not has_images(config.model.path):
        if FROZEN_VISION in config.learner.backend.options:
            raise ConfigError(
                f"learner.backend.options=[{FROZEN_VISION}]: {config.model.path!r} sees no images and has no vision tower; leave "
                "it out"
            )
        return
    for problem in _problems(config):
        raise ConfigError(f"{problem}: {config.model.path!r} sees images")
    from ..common.image_processor import ImageProcessor

    if (merge := ImageProcessor(config.model.path).merge_size) < 1:
        raise ConfigError(
            f"model.path: the image processor of {config.model.path!r} has merge_size={merge}; allowed are 1 and more"
        )


def _problems(config: Config) -> Iterator[str]:
    """What is refused with a model that sees images, and what is allowed."""
    from ..learner.model import has_images
    from ..rollout.engines.registry import kind_of

    learner, engine = config.learner, config.rollout.engine
    chosen = learner.backend
    if is_on_modelscope(config.model.path):
        yield "model.path names a model of ModelScope; allowed are a folder and a name on Hugging Face's hub"
    if not isinstance(engine, IMAGE_ENGINES) and not isinstance(config, SftConfig):  # which starts no engine
        allowed = " and ".join(str(kind.__struct_config__.tag) for kind in IMAGE_ENGINES)
        yield f"rollout.engine.kind={kind_of(engine)} is not given images with token ids here; allowed are {allowed}"
    if is_quantized(engine) and not isinstance(config, SftConfig):
        yield f"{FP8} has no vision tower; leave it out"
    if isinstance(chosen, Megatron):
        yield "learner.backend.kind=megatron has no vision tower; allowed is fsdp2"
        return
    for option in chosen.options:
        if option not in OPTIONS:
            yield f"learner.backend.options=[{option}] does not reach a vision tower; allowed are {', '.join(OPTIONS)}"
    if chosen.lora_rank:
        yield f"learner.backend.lora_rank={chosen.lora_rank} has no adapters for a vision tower; allowed is 0"
    if chosen.context_parallel > 1:
        yield f"learner.backend.parallel.context={chosen.context_parallel} splits no images; allowed is 1"
    if needs_critic(learner.algorithm):
        yield (
            f"learner.algorithm.advantage.kind={learner.algorithm.advantage.__struct_config__.tag} trains a second model, which "
            "sees none; allowed are kinds without one, such as grpo"
        )
    for kind, ranks in learner.aux_models.items():
        if ranks:
            yield f"learner.aux_models.{kind}={ranks}: ranks of their own are sent no images; allowed is 0"
    for key, path in named_references(learner.algorithm).items():
        if not has_images(path):
            yield f"{key}: {path!r} sees no images; allowed are models that do"
    if isinstance(config, SftConfig) and config.sft.preferences and not isinstance(config.sft.loss, Dpo):
        yield "sft.preferences trains a classifier of text; allowed are sft.messages, demonstrations, and sft.loss.kind=dpo"
    if isinstance(config.reward, ModelReward):
        yield f"reward.kind={config.reward.__struct_config__.tag} scores text; allowed is environment"


def check_opening(config: Config, renderer: Renderer, name: str, opening: Observation) -> None:
    """Raises ConfigError where the environment `name` opens with images and the chat format or the model shows none, or several
    ranks would be fine-tuned on them."""
    from ..learner.model import has_images

    if not any(message.images for message in opening.messages):
        return
    if not has_images(config.model.path):
        raise ConfigError(
            f"model.path: {config.model.path!r} sees no images, and {name} shows some; allowed are models that see images"
        )
    ranks = config.learner.backend.ranks
    if isinstance(config, SftConfig) and ranks > 1 and not (config.sft.messages or config.sft.preferences):
        raise ConfigError(
            f"learner.backend.ranks={ranks}: {name} shows images, and conversations with images are fine-tuned by one rank; "
            "allowed is 1"
        )
    if not getattr(renderer, "supports_process_multimodal", False):
        raise ConfigError(
            f"agent.renderer: {config.agent.renderer!r} shows no images, and {name} has some; allowed is {RENDERER}"
        )
