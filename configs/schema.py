"""The schema of a run's config: every key in frozen msgspec structs, unknown keys refused, a docstring under every field.

Invariants:
- Fewer than 120 fields in all, those of `algorithm` and `backends` included; the options of a kind of environment do not count. A
  knob needs a reason. A limit that follows from others is a property. A run meets the fields of its own kinds only.
- Everything that can be checked without starting a process or reading a file is checked by `check`, which names the key.
- A choice between kinds is a tagged union: the key `kind` names it, and only that kind's fields are allowed with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from ..errors import ConfigError
from .algorithm import Algorithm
from .backends import Fsdp2, Megatron
from .engines import Fake, Sglang, Transformers, Vllm
from .environments import EnvironmentKind, Mixture, ReasoningGym
from .evaluation import Evaluation
from .reward import EnvironmentReward, Reward
from .section import AboveZero, Fraction, NonNegative, Positive, Section

SHARDS_LIMIT = 8  # of a buffer: a reader attaches all files to one connection, and SQLite takes 10


class RunOutput(Section, frozen=True):
    dir: str = "runs/default"
    """Folder of this run: config, metrics, buffer, checkpoints, report. `train` wants it new; `resume` continues it."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"], ...] = ()
    """Trackers that receive the metrics and some trajectories, in addition to metrics.jsonl. docs/monitoring.md says how their
    projects are named."""
    on_alert: tuple[str, ...] = ()
    """A program and its arguments, on the supervisor's host: started for each alert that fires and that is over, with the alert as
    a line of JSON on stdin. docs/operation.md says what is in it."""


class Model(Section, frozen=True):
    path: str = "models/quickstart"
    """A Hugging Face folder, a name on its hub, or `modelscope:ORG/NAME`, with `@REVISION` or without, on ModelScope's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers the engines serve in and the learner computes in; the learner's master weights are float32 always."""


class ProgramSandbox(Section, frozen=True):
    """What the program of an episode may use. As options of one kind of agent they are not counted by the bound on the number of
    fields."""

    folder: str = ""
    """A folder of the host that the program may read, such as its own; `{folder}` in the command is its path in the sandbox."""
    memory: str = "1GiB"
    """Memory of all its processes together."""
    disk: str = "256MiB"
    """Its files, which are in memory, too."""
    processes: Positive = 128
    """Processes and threads."""


class Agent(Section, frozen=True):
    kind: str = "tool_calling"
    """`tool_calling`, `single_turn`, `command`, or `package.module:coroutine` of your own: `(env, policy, task)` or `(messages,
    endpoint)`."""
    command: tuple[str, ...] = ()
    """For kind `command`: the program that plays an episode, and its arguments. It prints its answer. `{question}` is what the
    environment says first, which else is on stdin, `{python}` a Python, `{folder}` the folder below."""
    sandbox: ProgramSandbox = ProgramSandbox()
    """For kind `command`: what the program may use."""
    trained: str = "policy*"
    """For agents with an endpoint: a pattern of the model names whose replies are trained on. The policy also answers calls that
    name other models, without loss."""
    renderer: str = "qwen3"
    """Chat format of the model family, a name known to the `renderers` package; `default` is the chat template of the tokenizer,
    `auto` the format of the model's name on the hub. docs/rollout.md has a table."""
    thinking: bool = False
    """Let the model think before it speaks, where its chat format has such a switch."""
    max_tokens_per_turn: Positive = 128
    """Sampled tokens in one completion."""
    max_tokens: Positive = 1024
    """Context of an episode: prompt plus sampled tokens."""


Partial = Literal["recompute", "keep_kv", "abort_resume"]


Reason = Literal["tool", "environment", "engine", "policy", "reward", "timeout"]


class Failure(Section, frozen=True):
    """What happens to an episode that failed for one reason."""

    retries: NonNegative = 0
    """How often a member that failed for this reason is played again."""
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
    engine: Vllm | Sglang | Transformers | Fake = field(default_factory=Vllm)
    """The inference servers."""
    partial: Partial = "recompute"
    """Requests under way when weights change: their KV is computed anew with the new weights, or kept (tokens from then on are
    marked as sampled by a mixed policy), or the request is aborted and resumed from the tokens it has."""
    temperature: AboveZero = 1.0
    """Softmax temperature in training; the learner computes log-probs at the same temperature."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling in training. Below 1 the behavior log-probs are those of the truncated distribution."""
    workers: Positive = 1
    """Worker processes. How many episodes each plays at once follows from how busy the servers are."""
    max_episodes: NonNegative = 0
    """Most episodes that are played at once, by all workers together; 0 for as many as the servers have room for."""
    episode_s: AboveZero = 600.0
    """Longest episode, in seconds; past it the episode fails by `timeout`. Shorter limits follow from it: a completion, and a
    step of the environment, get a fifth but at least 120 s (then the episode fails by `engine` or `environment`), a call of
    a tool half of that (`tool`)."""
    failures: dict[Reason, Failure] = field(default_factory=FAILURES.copy)
    """What happens to episodes that failed, by reason. `retries`: how often such a member of a group is played again; `then`:
    `drop` it, or `train` with the penalty that its environment declares. Reasons that are not named keep their defaults."""

    def episode_limit(self, worker: int, workers: int) -> int | None:
        """Most episodes that worker number `worker` of `workers` plays at once, its share of `max_episodes`; None: no limit."""
        share, rest = divmod(self.max_episodes, workers)
        return share + (worker < rest) if self.max_episodes else None

    @property
    def request_s(self) -> float:
        """Longest wait for the tokens of one turn, retries on other replicas and weight pushes included."""
        return max(self.episode_s / 5, min(self.episode_s, 120.0))

    @property
    def step_s(self) -> float:
        """Longest task generation, reset or step of an environment, with its tools and its reward."""
        return self.request_s

    @property
    def tool_s(self) -> float:
        """Longest call of one tool."""
        return self.request_s / 2


class Buffer(Section, frozen=True):
    max_staleness: NonNegative = 2
    """No token older than this many policy versions is trained on. 0 is synchronous training."""
    groups_per_batch: Positive = 8
    """Task groups in one learner step."""
    shards: Annotated[int, Meta(ge=1, le=SHARDS_LIMIT)] = 1
    """Processes that share the groups of a run, each with its own file. With more than one, another is their clock: it counts the
    versions. One takes thousands of trajectories a second; add some where its process is busy all the time."""
    group_size: Positive = 8
    """Episodes per task group; their mean reward is the baseline. One is enough for advantages that compare with no group:
    `reinforce_pp`, `gae` and `none`."""
    min_members: NonNegative = 0
    """A group may be trained on as soon as so many of its episodes are there; those that end later count in the baseline and carry
    no loss. 0 waits for all."""
    dynamic_sampling: bool = False
    """A group whose episodes all earned the same is discarded and replaced (DAPO, Yu et al. 2025,
    arXiv:2503.14476). What an episode earned decides, a reward model's share included, before any shaping; so may the
    penalty of a failure."""
    filter: Literal["none", "untruncated", "best", "best_random", "best_worst"] = "none"
    """Which episodes of a group are trained on: all, those that no limit cut off (DAPO's overlong filtering, arXiv:2503.14476), the
    one that earned most, or that one with a random other or with the one that earned least (PF-PPO, Shen and Zhang 2024,
    arXiv:2409.06957). The others' rewards count in the baseline."""
    on_deadline: Literal["withhold", "wait", "drop"] = "withhold"
    """Tokens past the bound: kept as context without loss, waited for by the learner, or dropped with their group."""
    keep: str = "4GiB"
    """Size that the buffer's file is kept below: first the tokens of groups that no recovery needs any more are dropped, then their
    rows; sums of their accounts stay."""


class Optimizer(Section, frozen=True):
    lr: AboveZero = 1e-6
    """Learning rate after warm-up, then constant."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly."""
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Decay rates of the first and the second moment."""
    clip_norm: AboveZero = 1.0
    """Gradient norm above which the gradient is scaled down."""


AuxModel = Literal["reference", "critic"]

NO_AUX_PROCESSES: dict[AuxModel, int] = {"reference": 0, "critic": 0}  # the learner's ranks hold all models


class Learner(Section, frozen=True):
    steps: Positive = 100
    """Learner steps in the whole run."""
    backend: Fsdp2 | Megatron = field(default_factory=Fsdp2)
    """How the model is held and stepped."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    """Advantages, loss and correction."""
    checkpoint_every: Positive = 10
    """Learner steps between checkpoints."""
    checkpoint_keep: Positive = 2
    """Checkpoints kept."""
    aux_models: dict[AuxModel, NonNegative] = field(default_factory=NO_AUX_PROCESSES.copy)
    """How many processes of their own hold each auxiliary model, for example `{critic: 2}`: the `reference` policy, and
    the `critic`, which with `prime` is the implicit reward model. With 0 the learner's ranks hold the model."""
    batch_s: AboveZero = 600.0
    """Longest wait for a batch, and for an auxiliary model; past it the run stops and names the process that was late."""


TransportKind = Literal["broadcast", "shared", "disk", "delta"]


class WeightSync(Section, frozen=True):
    transport: TransportKind = "broadcast"
    """`broadcast`: collectives (NCCL or gloo). `shared`: one copy in this host's shared memory, for all replicas. `disk`: a file
    under `run.dir`, which other clusters may read too. `delta`: such a file of changed values only, where that is smaller."""
    cohort: NonNegative = 0
    """Replicas that change weights at the same time while the others generate; 0 is a quarter of them, at least one."""
    canary_tolerance: AboveZero = 0.002
    """Largest difference in nats between the learner's and a replica's log-probs of a fixed prompt after a push; of vLLM in float32
    on a GPU 0.02 at least."""


Port = Annotated[int, Meta(ge=0, le=65535)]


class Launch(Section, frozen=True):
    kind: Literal["local", "colocated", "ray", "ray_cluster"] = "local"
    """`local`: child processes of this one. `colocated`: such processes, whose servers and learner share the devices in turns: the
    servers sleep, without weights and KV cache, while the learner steps (docs/rollout.md). `ray`: Ray starts them on this host, on
    loopback (`RAY_ADDRESS` names an existing cluster). `ray_cluster`: spread over the cluster's hosts, which must share `run.dir`.
    Every process has a key of its own, and may do what its role does; across hosts requests to engines are encrypted, too.
    Collectives and Ray itself are not: see docs/security.md."""
    ports: dict[Literal["first", "metrics"], Port] = field(default_factory=lambda: {"first": 0})
    """`first`: first of the consecutive ports that buffer, engines, learner and auxiliary models listen on; 0 picks free ones.
    `metrics`: where the supervisor serves `/metrics` to Prometheus, on loopback or at the address that the variable
    SLIPSTREAM_METRICS_HOST names; 0 picks a free port, and without it there is none. docs/monitoring.md has the metrics."""
    restarts: NonNegative = 3
    """How often each process may be restarted before the run stops."""
    heartbeat_s: AboveZero = 30.0
    """A process that is silent for this long is killed and restarted. Two thirds of it are the lease of a worker's groups, which
    are then granted again."""

    @property
    def colocated(self) -> bool:
        """Whether inference servers sleep while the learner steps."""
        return self.kind == "colocated"

    @property
    def by_ray(self) -> bool:
        """Whether Ray starts the run's processes; else they are children of the supervisor."""
        return self.kind in ("ray", "ray_cluster")

    @property
    def hosts(self) -> Literal["one", "many"]:
        """Whether the run's processes share one host."""
        return "many" if self.kind == "ray_cluster" else "one"

    @property
    def scheme(self) -> Literal["http", "https"]:
        """Of the URLs of inference servers: requests that leave a host are encrypted."""
        return "https" if self.hosts == "many" else "http"

    @property
    def lease_s(self) -> float:
        """How long a worker may be silent until it loses its groups."""
        return self.heartbeat_s * 2 / 3

    @property
    def stop_s(self) -> float:
        """How long the learner may take to finish its step and write a checkpoint when the run is interrupted."""
        return self.heartbeat_s * 2 / 3


class Config(Section, frozen=True):
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seeds tasks, sampling and initialization."""
    run: RunOutput = field(default_factory=RunOutput)
    """Where the run lives."""
    model: Model = field(default_factory=Model)
    """The policy."""
    env: EnvironmentKind | Mixture = field(default_factory=ReasoningGym)
    """What the policy acts on. Besides these kinds there are those that installed packages add."""
    agent: Agent = field(default_factory=Agent)
    """How it acts."""
    rollout: Rollout = field(default_factory=Rollout)
    """Engines and workers."""
    reward: Reward = field(default_factory=EnvironmentReward)
    """The reward of an episode in training: the environment's own, or a model's."""
    buffer: Buffer = field(default_factory=Buffer)
    """Staleness, batches, leases."""
    learner: Learner = field(default_factory=Learner)
    """The learner."""
    weightsync: WeightSync = field(default_factory=WeightSync)
    """Weight pushes."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Before, after, and every so many steps."""
    launch: Launch = field(default_factory=Launch)
    """Processes."""

    @property
    def push_s(self) -> float:
        """Longest weight push to the whole fleet; a replica that takes longer is left out until it answers again."""
        return max(self.rollout.request_s, 120.0)

    @property
    def reply_s(self) -> float:
        """Longest wait for a reply of the buffer. One that falls silent is killed after `launch.heartbeat_s`, and starts again."""
        return max(60.0, self.launch.heartbeat_s + 30.0)

    @property
    def score_s(self) -> float:
        """Longest wait for a reward model's score. An episode that ends while the reward server is down waits for its restart."""
        return max(self.rollout.episode_s, self.rollout.engine.start_s + 60.0)


def parse_size(key: str, text: str) -> int:
    """Bytes of a size such as `64MiB`. Raises ConfigError naming `key`."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    number, unit = text[:-3], text[-3:]
    if unit in units and number.replace(".", "", 1).isdigit() and float(number) > 0:
        return int(float(number) * units[unit])
    raise ConfigError(f"{key}: {text!r} is not a size; write a number and KiB, MiB or GiB, for example 64MiB")


def parse_memory(text: str) -> int | float:
    """`rollout.engine.memory`: bytes as an int for a size such as `40GiB`, a share of GPU memory as a float for `0.85`.
    Raises ConfigError where it is neither."""
    try:
        share = float(text)
    except ValueError:
        return parse_size("rollout.engine.memory", text)
    if not 0.0 < share <= 1.0:
        raise ConfigError(
            f"rollout.engine.memory: {text!r} is neither a share above 0 and at most 1, such as 0.85, nor a size, such as 40GiB"
        )
    return share
