"""Combinations of config keys under `learner.algorithm`, and of these with `buffer`, that are each allowed and together another
algorithm, or none; see `checks.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .algorithm import (
    GROUPLESS,
    REFILLABLE,
    SELF_CORRECTING,
    AutoCorrection,
    ClipCov,
    Distillation,
    Dpo,
    DualClipDecoupledPpo,
    DualClipPpo,
    Gae,
    Kl,
    KlCov,
    KlInLoss,
    KlInReward,
    Masked,
    NoAdvantage,
    NoCorrection,
    Prime,
    PythonFunction,
    ReinforcePP,
    Rejected,
    Sppo,
    Truncated,
    TurnLevel,
    Uncorrected,
)
from .backends import REPLAY, Megatron
from .divergence import REFERENCE_KEY
from .environments import Mixture, traced_sections
from .reward import ModelReward
from .schema import Config
from .section import Section

PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

UNTRACED: dict[str, tuple[tuple[type[Section], ...], str]] = {
    "advantage": (
        (ReinforcePP, TurnLevel, Gae, Prime),
        "a trace is compared with the other answers to its task, as a whole",
    ),
    "loss": ((Sppo, ClipCov, KlCov, Dpo), "the loss needs answers that the policy sampled"),
    "kl": ((KlInReward, Distillation), "the divergence is estimated at tokens that the policy sampled"),
}
"""Kinds of sections of an algorithm that expert traces have no meaning in, and why."""


def group_problems(config: Config) -> Iterator[str]:
    """Of groups and batches with an advantage."""
    buffer, algorithm = config.buffer, config.learner.algorithm
    if algorithm.minibatches > buffer.groups_per_batch:
        yield (
            f"learner.algorithm.minibatches={algorithm.minibatches} is more than buffer.groups_per_batch="
            f"{buffer.groups_per_batch}: there would be steps of less than a group; allowed are 1 to {buffer.groups_per_batch}"
        )
    if buffer.group_size == 1 and not isinstance(algorithm.advantage, GROUPLESS):
        kinds = ", ".join(str(section.__struct_config__.tag) for section in GROUPLESS)
        yield (
            f"buffer.group_size=1: learner.algorithm.advantage.kind={algorithm.advantage.__struct_config__.tag} compares the "
            f"members of a group; allowed are 2 and more, or an advantage of kind {kinds}"
        )
    if buffer.group_size == 1 and buffer.filter not in ("none", "untruncated"):
        yield f"buffer.filter={buffer.filter} with buffer.group_size=1: there is one to choose; allowed are none and untruncated"
    # Of equal rewards there is no pair.
    pairs = isinstance(algorithm.advantage, NoAdvantage) and isinstance(algorithm.loss, Dpo)
    if buffer.dynamic_sampling and not (isinstance(algorithm.advantage, REFILLABLE) or pairs):
        kinds = ", ".join(str(section.__struct_config__.tag) for section in REFILLABLE)
        yield (
            "buffer.dynamic_sampling=true would discard groups that teach: "
            f"learner.algorithm.advantage.kind={algorithm.advantage.__struct_config__.tag} learns from groups of equal rewards, "
            f"too; allowed with it are {kinds}, and none with learner.algorithm.loss.kind=dpo"
        )
    if buffer.dynamic_sampling and (imitation := algorithm.terms["imitation"]):
        yield (
            f"buffer.dynamic_sampling=true would discard groups that teach: learner.algorithm.terms.imitation={imitation:g} learns "
            "from groups that earned the same above 0, too; allowed with it is 0"
        )
    if buffer.dynamic_sampling and isinstance(algorithm.kl, Distillation):
        yield (
            "buffer.dynamic_sampling=true would discard groups that teach: learner.algorithm.kl.kind=distillation learns from "
            "groups of equal rewards, too; allowed with it is false"
        )
    if algorithm.overlong >= config.agent.max_tokens:
        yield (
            f"learner.algorithm.overlong={algorithm.overlong} leaves no length unpunished: it is a part of agent.max_tokens="
            f"{config.agent.max_tokens}; allowed are 0 to {config.agent.max_tokens - 1}"
        )


def loss_problems(config: Config) -> Iterator[str]:
    """Of the loss, its correction and its divergence."""
    yield from _correction(config)
    yield from _algorithm(config)
    yield from _references(config)
    yield from _teacher(config)
    yield from _preference(config)


def trace_problems(config: Config) -> Iterator[str]:
    """Of expert traces."""
    for section in traced_sections(config.env):
        yield from _traces(f"{section}.traces", config)


def _traces(traced: str, config: Config) -> Iterator[str]:
    for name, (kinds, why) in UNTRACED.items():
        chosen = getattr(config.learner.algorithm, name)
        if isinstance(chosen, kinds):
            tag = chosen.__struct_config__.tag
            refused = ", ".join(str(kind.__struct_config__.tag) for kind in kinds)
            yield f"{traced} with learner.algorithm.{name}.kind={tag}: {why}; allowed are all but {refused}"
    if config.buffer.dynamic_sampling:
        yield (
            f"{traced} with buffer.dynamic_sampling=true, which discards the groups of equal rewards that a trace has most to "
            "teach; allowed is false"
        )
    if isinstance(config.reward, ModelReward):
        yield (
            f"{traced} with reward.kind={config.reward.__struct_config__.tag}: traces are graded before the run starts, by their "
            "environment; allowed is environment"
        )
    if REPLAY in config.learner.backend.options:
        yield f"{traced} with learner.backend.options=[{REPLAY}]: no engine recorded the experts of a trace; leave one of them out"


def _correction(config: Config) -> Iterator[str]:
    """Of one correction with one loss."""
    algorithm, staleness = config.learner.algorithm, config.buffer.max_staleness
    loss, correction = algorithm.loss, algorithm.correction
    key, kind = "learner.algorithm.correction", loss.__struct_config__.tag
    own = ", ".join(str(section.__struct_config__.tag) for section in SELF_CORRECTING)
    refused = isinstance(correction, NoCorrection) and not isinstance(correction, Uncorrected)
    if refused and staleness > 0 and not isinstance(loss, (*SELF_CORRECTING, Dpo)):
        yield (
            f"{key}.kind=none with buffer.max_staleness={staleness}: learner.algorithm.loss.kind={kind} would take tokens of "
            f"older policies for the learner's own; set {key}.kind to auto, truncated, masked or rejected, or "
            f"learner.algorithm.loss.kind to one that corrects by itself ({own}), or buffer.max_staleness=0; "
            f"an ablation sets {key}.kind=uncorrected"
        )
    if isinstance(correction, Truncated) and isinstance(loss, SELF_CORRECTING):
        yield (
            f"{key}.kind=truncated would weigh tokens twice: the ratio of learner.algorithm.loss.kind={kind} is to the policy "
            "that sampled and holds the weight; allowed with it are auto, none, masked and rejected"
        )
    if isinstance(correction, Masked | Rejected) and not correction.bounds[0] < 1 < correction.bounds[1]:
        yield (
            f"{key}.bounds={_list(correction.bounds)} leave no loss to tokens of the learner's own policy, whose weight is 1; "
            "allowed are a low below 1 and a high above 1"
        )
    weights = correction.weights if isinstance(correction, Rejected) else None
    for name, weighed in ((key, correction), (f"{key}.weights", weights)):
        if isinstance(weighed, Truncated) and weighed.bounds[0] > weighed.bounds[1]:
            yield f"{name}.bounds={_list(weighed.bounds)}: the first is the lower one; allowed is a high of at least the low"
    if weights and isinstance(loss, SELF_CORRECTING):
        yield (
            f"{key}.weights would weigh tokens twice: the ratio of learner.algorithm.loss.kind={kind} is to the policy that "
            "sampled and holds the weight; allowed with it is null"
        )


def _algorithm(config: Config) -> Iterator[str]:
    """What would be another algorithm than the one that is named, or none."""
    algorithm, key = config.learner.algorithm, "learner.algorithm"
    loss, advantage, kl = algorithm.loss, algorithm.advantage, algorithm.kl
    if isinstance(kl, KlInLoss) and kl.estimator == "k1":
        yield (
            "learner.algorithm.kl.estimator=k1 with kl.kind=loss: its gradient is 0 on average and holds the policy nowhere; "
            "allowed there are k2 and k3"
        )
    if isinstance(advantage, Gae) and advantage.critic_warmup >= config.learner.steps:
        yield (
            f"{key}.advantage.critic_warmup={advantage.critic_warmup} leaves none of learner.steps={config.learner.steps} for the "
            f"policy; allowed are 0 to {config.learner.steps - 1}"
        )
    if isinstance(loss, Sppo) and algorithm.mean == "sequence_mean":
        yield (
            f"{key}.aggregation=sequence_mean with {key}.loss.kind=sppo would weigh a sequence by 1 / its length, which is not "
            "SPPO; allowed are auto, sequence_sum, token_mean and fixed_length"
        )
    if isinstance(loss, DualClipPpo | DualClipDecoupledPpo) and loss.clip[2] <= 1 + loss.clip[1]:
        yield (
            f"{key}.loss.clip={_list(loss.clip)}: the third bounds the ratio where the advantage is negative; allowed is more than "
            f"1 + the second, {1 + loss.clip[1]:g}"
        )
    if isinstance(loss, ClipCov | KlCov) and not 0 < loss.held["share"] <= 1:
        yield f"{key}.loss.held.share={loss.held['share']:g}: a share of the step's tokens; allowed are more than 0, up to 1"
    if isinstance(loss, ClipCov) and loss.held["low"] > loss.held["high"]:
        yield f"{key}.loss.held: low={loss.held['low']:g} is above high={loss.held['high']:g}, and no token is between them"
    if isinstance(loss, KlCov) and not any(loss.held[name] for name in ("abs", "k2", "k3")):
        yield f"{key}.loss.held: abs, k2 and k3 are 0, and nothing holds the tokens; allowed is at least one above 0"
    for name, section in (("advantage", advantage), ("loss", loss)):
        if isinstance(section, PythonFunction) and not PYTHON_NAME.fullmatch(section.function):
            yield f"{key}.{name}.function: {section.function!r} is not of the form package.module:name"
    if isinstance(advantage, Gae) and advantage.lam.get("by_length") == 0:
        yield f"{key}.advantage.lam.by_length=0 divides by zero; allowed are more than 0, up to 1; VAPO has 0.05"
    if isinstance(kl, Kl) and isinstance(kl.coefficient, dict) and len(kl.coefficient) < 2:
        yield f"{key}.kl.coefficient: an adaptive one needs both, for example {{start: 0.2, target: 6}}; else it is a number"


def _teacher(config: Config) -> Iterator[str]:
    """Of a teacher, and of rewards that do not count."""
    algorithm, key = config.learner.algorithm, "learner.algorithm"
    kl = algorithm.kl
    none = isinstance(algorithm.advantage, NoAdvantage) and not algorithm.terms["imitation"]
    if none and not isinstance(kl, Distillation) and not isinstance(algorithm.loss, Dpo):
        yield (
            f"{key}.advantage.kind=none leaves nothing to learn from; allowed with it are {key}.kl.kind=distillation, "
            f"{key}.loss.kind=dpo and {key}.terms.imitation above 0"
        )
    if isinstance(algorithm.advantage, NoAdvantage) and isinstance(kl, KlInReward):
        yield f"{key}.kl.kind=reward with {key}.advantage.kind=none, which reads no reward; allowed are none, loss and distillation"
    if algorithm.overlong and isinstance(algorithm.advantage, NoAdvantage) and not isinstance(algorithm.loss, Dpo):
        yield f"{key}.overlong={algorithm.overlong} with {key}.advantage.kind=none, which reads no reward; allowed is 0"
    if not isinstance(kl, Distillation):
        return
    if not all(kl.references.values()):
        yield f"{key}.kl.reference: distillation needs a teacher; name its folder or its name on the hub"
    if not isinstance(kl.estimator, str) and len(kl.estimator) != 1:
        yield (
            f"{key}.kl.estimator: {{{', '.join(kl.estimator)}}}: a teacher is followed by one divergence; allowed are sampled, "
            "{reverse: 32} and {forward: 32}, or another number of tokens"
        )
    if kl.top and isinstance(config.learner.backend, Megatron):
        yield (
            f"{key}.kl.estimator with learner.backend.kind=megatron, which gives log-probs of the sampled tokens only; allowed "
            "with it is sampled, and any with fsdp2"
        )
    if isinstance(algorithm.advantage, Prime):
        yield (
            f"{key}.kl.kind=distillation with {key}.advantage.kind=prime: process rewards are relative to the policy before the "
            f"first step, and {key}.kl.reference is a teacher; allowed are other advantages"
        )
    if isinstance(algorithm.loss, Sppo):
        yield (
            f"{key}.kl.kind=distillation with {key}.loss.kind=sppo, whose advantage is one of a whole sequence: a teacher judges "
            "tokens; allowed are other losses"
        )


def _references(config: Config) -> Iterator[str]:
    """Of reference policies, one for each environment of a mixture."""
    kl, env = config.learner.algorithm.kl, config.env
    if not isinstance(kl, Kl) or not isinstance(kl.reference, dict):
        return
    if not isinstance(env, Mixture):
        yield (
            f"{REFERENCE_KEY}: one for each environment is for a mixture, and env.kind={env.__struct_config__.tag} is one "
            "environment; allowed is one model"
        )
        return
    names = ", ".join(env.parts)
    for name in kl.reference:
        if name not in env.parts:
            yield f"{REFERENCE_KEY}.{name}: env.parts has no environment of this name; allowed are {names}"
    for name in env.parts:
        if name not in kl.reference:
            yield f"{REFERENCE_KEY}: {name} of env.parts has no model; it needs one for each of {names}, or one for all"


def _preference(config: Config) -> Iterator[str]:
    """Of a loss that compares the best with the worst of a group."""
    algorithm, key = config.learner.algorithm, "learner.algorithm"
    if not isinstance(algorithm.loss, Dpo):
        return
    loss, advantage = f"{key}.loss.kind=dpo", algorithm.advantage.__struct_config__.tag
    if not isinstance(algorithm.advantage, NoAdvantage):
        yield f"{key}.advantage.kind={advantage} with {loss}, which reads no advantage; allowed is none"
    if config.buffer.filter != "best_worst":
        yield f"buffer.filter={config.buffer.filter} with {loss}, which compares two of each group; allowed is best_worst"
    if algorithm.mean != "sequence_sum":
        yield f"{key}.aggregation={algorithm.mean} with {loss}, a mean over pairs; allowed are auto and sequence_sum"
    if not isinstance(algorithm.correction, AutoCorrection | NoCorrection):
        kind = algorithm.correction.__struct_config__.tag
        yield f"{key}.correction.kind={kind} with {loss}: a pair compares whichever policy made it; allowed are auto and none"
    if isinstance(algorithm.kl, Distillation | KlInReward):
        kind = algorithm.kl.__struct_config__.tag
        yield f"{key}.kl.kind={kind} with {loss}, which reads neither advantages nor rewards; allowed are none and loss"
    if algorithm.overlong:
        yield f"{key}.overlong={algorithm.overlong} with {loss}, which compares what episodes earned, without shaping; allowed is 0"
    for name, count in (("minibatches", algorithm.minibatches), ("epochs", algorithm.epochs)):
        if count > 1:
            yield f"{key}.{name}={count} with {loss}: margins are those before the batch's step; allowed is 1"


def _list(numbers: tuple[float, ...]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"
