"""Combinations of config keys that are each allowed and together impossible: the run would break, so it is not started.

Invariants:
- Only what would break a run is refused. The report advises on what is slow; `slipstream doctor` checks the machine.
- No process is started, no file is read, nothing heavier than the schema is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ..errors import ConfigError
from .algorithm import Dpo, Gae, needs_critic, needs_reference
from .algorithm_checks import PYTHON_NAME as PYTHON_NAME
from .algorithm_checks import group_problems, loss_problems, trace_problems
from .backends import REPLAY, Fsdp2, Megatron, copy_ranks
from .engine_checks import external_problems, option_problems, quantization_problems
from .environments import (
    Dataset,
    EnvironmentKind,
    Harbor,
    LimitedTasks,
    Mixture,
    PythonEnv,
    ReasoningGym,
    parts_by_key,
    traced_sections,
)
from .reward import FIELDS, Judge, ModelReward, fields_of
from .schema import (
    Agent,
    Config,
    ProgramSandbox,
    Transformers,
    Vllm,
    parse_memory,
    parse_size,
)
from .sft import SftConfig
from .suites import suites_of

BF16_NOISE = 0.05  # nats by which log-probs of equal bfloat16 weights differ between implementations now and then
BUILT_IN_AGENTS = ("tool_calling", "single_turn")
COLOCATED_STALENESS = 1  # largest bound where servers sleep during a step: one batch is played while another waits
COMMAND = "command"  # the kind of agent that is a program
SAMPLERS = ("sequential", "pools")
# A port `*` is a free one, for a server.
ADDRESS = re.compile(r"tcp://[^\s/:@]+:(?:\d{1,5}|\*)|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}")
LOOPBACK = re.compile(r"tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\]):")
_PART_NAME = re.compile(r"[\w-]+")


def check(config: Config) -> None:
    """Raises ConfigError with the first impossible combination, naming its keys and what is allowed."""
    for find in (
        *(_values, option_problems, external_problems, quantization_problems, _episode, _harbor, _evaluation),
        *(group_problems, _batch, loss_problems, trace_problems, _backend, _aux_models, _reward, _colocated),
    ):
        for problem in find(config):
            raise ConfigError(problem)


def _values(config: Config) -> Iterator[str]:
    """Values that no combination allows, and pairs of keys of two sections."""
    parse_size("buffer.keep", config.buffer.keep)
    parse_memory(config.rollout.engine.memory)
    paths = {"run.dir": config.run.dir, "model.path": config.model.path}
    if isinstance(config.reward, ModelReward):
        paths["reward.path"] = config.reward.path
    if isinstance(config, SftConfig):
        paths["sft.out"] = config.sft.out
        if isinstance(config.sft.loss, Dpo) and not config.sft.preferences:
            yield "sft.loss.kind=dpo compares answers that are preferred with others; name them in sft.preferences, or use auto"
    for key, path in paths.items():
        if not path.strip():
            yield f"{key}: must not be empty"
    if len(set(config.run.trackers)) < len(config.run.trackers):
        yield f"run.trackers: {', '.join(config.run.trackers)} names a tracker twice"
    if config.run.on_alert and not config.run.on_alert[0]:
        yield 'run.on_alert: names no program; for example ["curl", "-sS", "-d", "@-", "https://example.org/hook"]'
    if 1.0 in config.learner.optimizer.betas:
        yield "learner.optimizer.betas: 1 never forgets and divides by zero; allowed are 0 up to, but not, 1"
    if config.model.dtype == "bfloat16" and config.weightsync.canary_tolerance < BF16_NOISE:
        yield (
            f"weightsync.canary_tolerance={config.weightsync.canary_tolerance:g} with model.dtype=bfloat16 would refuse "
            "pushes that arrived: learner and engine differ by up to 0.1 nats there; "
            f"allowed is {BF16_NOISE:g} and more, 0.2 is usual"
        )
    if config.weightsync.transport == "shared" and config.launch.hosts == "many":
        yield (
            "weightsync.transport=shared is one copy in one host's memory, and launch.kind=ray_cluster spreads replicas over many; "
            "allowed there are broadcast, disk and delta"
        )


def _episode(config: Config) -> Iterator[str]:
    agent = config.agent
    known = (*BUILT_IN_AGENTS, COMMAND)
    if agent.kind not in known and not PYTHON_NAME.fullmatch(agent.kind):
        yield f"agent.kind: {agent.kind!r} is neither of {', '.join(known)}, nor of the form package.module:coroutine"
    yield from _program(agent)
    yield from _environments("env", config.env, agent)
    if agent.max_tokens_per_turn > agent.max_tokens:
        yield (
            f"agent.max_tokens_per_turn={agent.max_tokens_per_turn} is more than agent.max_tokens={agent.max_tokens}, "
            f"the context of a whole episode; allowed are 1 to {agent.max_tokens}"
        )


def _program(agent: Agent) -> Iterator[str]:
    command, sandbox = agent.command, agent.sandbox
    if agent.kind == COMMAND and not (command and command[0]):
        yield 'agent.command: agent.kind=command needs a program, for example ["{python}", "{folder}/agent.py"]'
    if agent.kind != COMMAND and (command or sandbox != ProgramSandbox()):
        yield f"agent.{'command' if command else 'sandbox'}: agent.kind={agent.kind} runs no program; agent.kind=command does"
    if not sandbox.folder and any("{folder}" in argument for argument in command):
        yield "agent.command: {folder} is the folder that agent.sandbox.folder names, and it names none"
    for name in ("memory", "disk"):
        parse_size(f"agent.sandbox.{name}", getattr(sandbox, name))


def _evaluation(config: Config) -> Iterator[str]:
    evaluation, agent, every = config.evaluation, config.agent, config.learner.checkpoint_every
    if evaluation.every % every:
        yield (
            f"evaluation.every={evaluation.every} is no multiple of learner.checkpoint_every={every}: an evaluation is of a "
            f"checkpoint; allowed are {every}, {2 * every}, {3 * every} and so on, or 0 for none"
        )
    if evaluation.every and not suites_of(config):
        yield f"evaluation.every={evaluation.every} with evaluation.tasks=0 plays nothing; allowed there is 0"
    for name, suite in evaluation.suites.items():
        key = f"evaluation.suites.{name}"
        if not _PART_NAME.fullmatch(name):
            yield f"{key}: a name of a suite consists of letters, digits, _ and -"
        if suite.env is not None:
            yield from _environments(f"{key}.env", suite.env, agent)
            for section, part in parts_by_key(suite.env, f"{key}.env").items():
                if part.sampler != "sequential" or (isinstance(part, LimitedTasks) and part.tasks):
                    yield f"{section}: an evaluation plays its tasks in order; sampler and tasks are for training only"
            for section in traced_sections(suite.env, f"{key}.env"):
                yield f"{section}.traces: an evaluation has no groups that they could join; they are for training only"
        longest = suite.max_tokens or agent.max_tokens
        if longest > agent.max_tokens:
            yield (
                f"{key}.max_tokens={longest} is more than agent.max_tokens={agent.max_tokens}, which the servers are started "
                f"for; allowed are 1 to {agent.max_tokens}"
            )
        if (suite.max_tokens_per_turn or 1) > longest:
            yield (
                f"{key}.max_tokens_per_turn={suite.max_tokens_per_turn} is more than the context of a whole episode; "
                f"allowed are 1 to {longest}"
            )
    if not evaluation.keep_best:
        return
    keeping = [f"evaluation.suites.{name}.keep_best" for name, suite in evaluation.suites.items() if suite.keep_best]
    if len(keeping) > 1:
        yield f"{keeping[1]}=true: {keeping[0]} is true already; one checkpoint is kept, by one suite"
    if not evaluation.every:
        yield (
            f"{keeping[0]}=true with evaluation.every=0: only the last checkpoint is evaluated; "
            f"allowed there are {every}, {2 * every} and other multiples of learner.checkpoint_every"
        )


def _environments(key: str, env: EnvironmentKind | Mixture, agent: Agent) -> Iterator[str]:
    if isinstance(env, Mixture) and not env.parts:
        yield f"{key}.parts: a mixture needs at least one environment, for example {{sums: {{kind: reasoning_gym, share: 2}}}}"
    for section, part in parts_by_key(env, key).items():
        if section != key and not _PART_NAME.fullmatch(section.removeprefix(f"{key}.parts.")):
            yield f"{section}: a name of a part consists of letters, digits, _ and -"
        yield from _environment(section, part, agent)


def _environment(key: str, env: EnvironmentKind, agent: Agent) -> Iterator[str]:
    if env.sampler not in SAMPLERS and not PYTHON_NAME.fullmatch(env.sampler):
        yield f"{key}.sampler: {env.sampler!r} is neither of {', '.join(SAMPLERS)}, nor of the form package.module:Class"
    if isinstance(env, PythonEnv) and not PYTHON_NAME.fullmatch(env.factory):
        yield f"{key}.factory: {env.factory!r} is not of the form package.module:Name"
    if env.address and not ADDRESS.fullmatch(env.address):
        yield f"{key}.address: {env.address!r} is not of the form tcp://HOST:PORT"
    elif env.address and not env.keys and not LOOPBACK.match(env.address):
        yield f"{key}.keys: must be set, {env.address} is not on this host; name the file that `slipstream env serve` made"
    if agent.kind not in BUILT_IN_AGENTS and isinstance(env, Dataset) and env.traces:
        yield (
            f"{key}.traces with agent.kind={agent.kind}, which makes its own prompts: a trace answers the task's; allowed are "
            f"{', '.join(BUILT_IN_AGENTS)}"
        )
    if agent.kind == "single_turn" and isinstance(env, ReasoningGym) and env.calculator:
        yield (
            f"agent.kind=single_turn answers once and cannot call the tool of {key}.calculator=true; "
            f"set {key}.calculator=false, or agent.kind=tool_calling"
        )


def _harbor(config: Config) -> Iterator[str]:
    """Limits of sandboxes hold before those of the run: what the policy does too slowly is told to it, and is no failure."""
    rollout = config.rollout
    for key, env in parts_by_key(config.env).items():
        if not isinstance(env, Harbor):
            continue
        if env.command_s >= rollout.tool_s:
            yield (
                f"{key}.command_s={env.command_s:g}: a call of a tool may take {rollout.tool_s:g} s, which follow from "
                f"rollout.episode_s={rollout.episode_s:g}; allowed is less"
            )
        if 2 * env.verifier_s > rollout.step_s:
            yield (
                f"{key}.verifier_s={env.verifier_s:g}: a task's solution and its tests are run within a reset, which may take "
                f"{rollout.step_s:g} s; allowed are up to {rollout.step_s / 2:g}, or a longer rollout.episode_s"
            )
        for name in ("memory", "disk"):
            parse_size(f"{key}.{name}", getattr(env, name))


def _batch(config: Config) -> Iterator[str]:
    buffer, rollout = config.buffer, config.rollout
    fewest = min(2, buffer.group_size)
    if buffer.min_members and not fewest <= buffer.min_members <= buffer.group_size:
        yield (
            f"buffer.min_members={buffer.min_members}: allowed are 0, which waits for all, and {fewest} to "
            f"buffer.group_size={buffer.group_size}"
        )
    if buffer.groups_per_batch < buffer.shards:
        yield (
            f"buffer.groups_per_batch={buffer.groups_per_batch} is less than buffer.shards={buffer.shards}: each shard has a part "
            f"of every batch; allowed are {buffer.shards} and more"
        )
    least = rollout.workers * buffer.group_size
    if 0 < rollout.max_episodes < least:
        yield (
            f"rollout.max_episodes={rollout.max_episodes} leaves no room for a group in each worker: rollout.workers="
            f"{rollout.workers} times buffer.group_size={buffer.group_size}; allowed are 0, which is no limit, and {least} and more"
        )
    waits = "buffer.max_staleness=0" if buffer.max_staleness == 0 else "buffer.on_deadline=wait"
    longest, keys = rollout.episode_s, f"rollout.episode_s={rollout.episode_s:g}"
    if isinstance(config.reward, ModelReward):  # asked when the episode is over
        longest, keys = longest + config.score_s, f"{keys} + {config.score_s:g} for a score"
    if (buffer.max_staleness == 0 or buffer.on_deadline == "wait") and config.learner.batch_s < longest:
        yield (
            f"with {waits} the learner waits for the slowest episode, but learner.batch_s={config.learner.batch_s:g} is less "
            f"than {keys}; allowed is learner.batch_s >= {longest:g}"
        )


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if not isinstance(reward, ModelReward):
        return
    if reward.weights["model"] == 0:
        yield "reward.weights.model: 0 asks a model for nothing; allowed are other numbers, or reward.kind=environment"
    if not isinstance(reward, Judge):
        return
    named = fields_of(reward.template)
    for name in named:
        if name not in FIELDS:
            yield f"reward.template: {{{name}}} is unknown; allowed are {', '.join(f'{{{field}}}' for field in FIELDS)}"
    if not {"answer", "conversation"} & set(named):
        yield "reward.template: the judge is not shown what the policy said; name {answer} or {conversation}"


def _backend(config: Config) -> Iterator[str]:
    backend, key = config.learner.backend, "learner.backend"
    split = copy_ranks(backend)
    if REPLAY in backend.options:
        yield from _replay(config, f"{key}.options=[{REPLAY}]")
    if isinstance(backend, Fsdp2):
        if backend.ranks % split:
            yield (
                f"{key}.parallel.context={split} does not divide {key}.ranks={backend.ranks}: "
                "some ranks would have no row to share; allowed are divisors of ranks"
            )
        if backend.ranks % backend.expert_parallel:
            yield (
                f"{key}.parallel.expert={backend.expert_parallel} does not divide {key}.ranks={backend.ranks}: "
                "some ranks would lack the others' experts; allowed are divisors of ranks"
            )
        if backend.expert_parallel > 1 and "liger" in backend.options:
            yield (
                f"{key}.parallel.expert={backend.expert_parallel} with {key}.options=[liger]: Liger has a class of its own for "
                "experts, which expects all of them; leave one of the two out"
            )
        if backend.expert_parallel > 1 and "offload" in backend.options:
            yield (
                f"{key}.parallel.expert={backend.expert_parallel} with {key}.options=[offload]: divided experts are pushed and "
                "stored from the accelerator's memory, not the host's; leave one of the two out"
            )
        if {"compile", "liger"} <= {*backend.options}:
            yield (
                f"{key}.options=[compile, liger]: torch.compile cannot trace Liger's kernels and fuses the same itself; "
                "leave one of the two out"
            )
        if backend.device == "cpu":
            for option in {"offload", "liger"}.intersection(backend.options):
                yield f"{key}.options=[{option}] is for GPUs; {key}.device=cpu allows recompute and compile"
        return
    stage = backend.ranks // backend.pipeline_parallel
    if backend.ranks % split:
        yield (
            f"{key}.ranks={backend.ranks}: {key}.parallel with tensor={backend.tensor_parallel}, pipeline="
            f"{backend.pipeline_parallel} and context={backend.context_parallel} splits one copy of the model over {split} "
            f"ranks; allowed are multiples of {split}"
        )
    elif stage % backend.expert_parallel:
        yield (
            f"{key}.parallel.expert={backend.expert_parallel}: a stage of the pipeline has {stage} ranks; "
            f"allowed are divisors of {stage}"
        )
    if backend.virtual_stages > 1 and backend.pipeline_parallel == 1:
        yield (
            f"{key}.parallel.virtual={backend.virtual_stages} with {key}.parallel.pipeline=1: there are no stages; allowed is 1, "
            "or a pipeline of 2 and more"
        )


def _replay(config: Config, key: str) -> Iterator[str]:
    engine = config.rollout.engine
    if isinstance(config, SftConfig):
        yield f"{key}: demonstrations come from no engine that recorded experts; leave it out"
    elif not isinstance(engine, Vllm | Transformers):
        yield (
            f"{key}: rollout.engine.kind={engine.__struct_config__.tag} gives no experts, or only those of its newest weights; "
            "allowed are vllm and transformers"
        )
    if "compile" in config.learner.backend.options:
        yield f"{key} with compile: a compiled router would keep the experts of the first row; leave one of them out"


def _colocated(config: Config) -> Iterator[str]:
    """Servers that sleep while the learner steps."""
    if not config.launch.colocated:
        return
    kind, most = "launch.kind=colocated", COLOCATED_STALENESS
    if isinstance(config, SftConfig):
        yield f"{kind}: fine-tuning has no inference servers that could sleep; allowed is launch.kind=local"
    if config.buffer.max_staleness > most:
        yield (
            f"buffer.max_staleness={config.buffer.max_staleness} with {kind}: servers and learner take turns, so that episodes are "
            f"at most one step ahead; allowed are 0 and {most}"
        )
    if config.weightsync.transport != "shared":
        yield (
            f"weightsync.transport={config.weightsync.transport} with {kind}: weights return to servers that kept none, through "
            "this host's shared memory; allowed is weightsync.transport=shared"
        )
    if config.rollout.partial == "keep_kv":
        yield (
            f"rollout.partial=keep_kv with {kind}: a server that sleeps frees its keys and values; "
            "allowed are recompute and abort_resume"
        )
    if config.evaluation.every:
        yield (
            f"evaluation.every={config.evaluation.every} with {kind}: the server of such evaluations would stay awake on the "
            "learner's devices; allowed is 0, which evaluates before and after training"
        )


def _aux_models(config: Config) -> Iterator[str]:
    """Auxiliary models in processes of their own."""
    learner = config.learner
    algorithm, processes, key = learner.algorithm, learner.aux_models, "learner.algorithm"
    if processes["reference"] and not needs_reference(algorithm):
        yield (
            f"learner.aux_models.reference={processes['reference']}: this algorithm has no reference policy; allowed are 0, or "
            f"{key}.kl.kind of loss, reward or distillation, {key}.advantage.kind=prime or {key}.loss.kind=dpo"
        )
    if processes["critic"] and not needs_critic(algorithm):
        yield (
            f"learner.aux_models.critic={processes['critic']}: no auxiliary model learns in this algorithm; allowed are 0, or "
            f"{key}.advantage.kind of gae or prime"
        )
    backend = learner.backend
    stages = backend.pipeline_parallel if isinstance(backend, Megatron) else 1
    unit = math.lcm(copy_ranks(backend), stages * backend.expert_parallel)
    for kind, ranks in processes.items():
        whole = kind == "critic" and isinstance(algorithm.advantage, Gae)  # it is not split as the policy is
        if ranks > 1 and ranks % unit and not whole:
            yield (
                f"learner.aux_models.{kind}={ranks}: learner.backend splits a model, and with it this one, over {unit} ranks; "
                f"allowed are 0, 1, which holds it whole, and multiples of {unit}"
            )
