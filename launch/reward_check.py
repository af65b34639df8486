"""Checks the model that `reward` names, by its config and tokenizer; weights are not read."""

from __future__ import annotations

from typing import Any

from ..configs import Config
from ..configs.reward import Classifier, Judge, ModelReward, fields_of
from ..errors import ConfigError
from .run_inputs import RunInputs

KEY = "reward.path"

HEADS = {Classifier: "ForSequenceClassification", Judge: "ForCausalLM"}  # the ending of the architecture's name


def check_reward_model(inputs: RunInputs) -> str:
    """A description of the reward. Raises ConfigError where the model is missing, has another architecture, several labels, too
    few positions for an episode, another tokenizer than the policy (classifier) or no chat template (judge); where the judge's
    template needs a reference that an environment does not have; or where vLLM is not installed."""
    config, reward = inputs.config, inputs.config.reward
    if not isinstance(reward, ModelReward):
        return "the environment's own"
    from ..learner.model import check_files
    from ..rollout import reward_server
    from ..rollout.engines import registry as servers

    reward_server.command(config, servers.LOOPBACK, 0)
    model: Any = check_files(reward.path, KEY)
    ending, kind = HEADS[type(reward)], str(reward.__struct_config__.tag)
    built = ", ".join(getattr(model, "architectures", None) or ("nothing",))
    if not built.endswith(ending):
        raise ConfigError(
            f"{KEY}: {reward.path!r} is {built}; reward.kind={kind} needs a model that ends with {ending}"
        )
    if isinstance(reward, Classifier):
        _check_classifier(config, reward, model)
    elif isinstance(reward, Judge):
        _check_judge(inputs, reward)
    return f"{kind} {reward.path} on {'CPU' if reward_server.serves_on_cpu() else 'GPU'}"


def _check_classifier(config: Config, reward: Classifier, model: Any) -> None:
    from ..learner.model import load_tokenizer

    if model.num_labels != 1:
        raise ConfigError(f"{KEY}: {reward.path!r} has {model.num_labels} labels; a reward is one number, allowed is 1")
    positions = model.get_text_config(decoder=True).max_position_embeddings
    if config.agent.max_tokens > positions:
        raise ConfigError(
            f"agent.max_tokens: {config.agent.max_tokens} is more than the {positions} positions of {reward.path}, which "
            "scores whole episodes"
        )
    if load_tokenizer(reward.path).get_vocab() != load_tokenizer(config.model.path).get_vocab():
        raise ConfigError(
            f"{KEY}: {reward.path!r} has another tokenizer than model.path {config.model.path!r}, and a classifier reads the "
            "policy's tokens; take one of the same model family, or reward.kind=judge"
        )


def _check_judge(inputs: RunInputs, reward: Judge) -> None:
    from ..learner.model import load_tokenizer

    if not load_tokenizer(reward.path).chat_template:
        raise ConfigError(f"{KEY}: {reward.path!r} has a tokenizer without a chat template; a judge is asked in a chat")
    if "reference" not in fields_of(reward.template):
        return
    for part in inputs.train:
        if "reference" not in part.source.task(0).payload:
            raise ConfigError(
                f'reward.template: {{reference}} needs payload["reference"] in every task, and task 0 of {part.name} has none'
            )
