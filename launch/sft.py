"""`slipstream sft`: from conversations, or demonstrations of the environment, to a model that imitates them.

    file or environment ──rendered here──> tokens ──one rank────> trained here
                                                  └─several─────> trained by the roles `sft-0`, `sft-1`, ...

Invariants:
- Everything that can be refused is refused before the first process starts and before a file is written.
- All ranks train on the tokens that were rendered here.
- Nothing is worth keeping before the end: a rank that ends early ends them all, none is started again, a stop takes effect at once.
- `sft.out` appears whole or not at all, and then `RECORD` in it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import structs

from ..configs import Config
from ..errors import ConfigError, Interrupted
from ..monitor.metrics import Row
from .job import Job
from .preflight import preflight, writable
from .resources import gpus_of
from .run import make_supervisor

if TYPE_CHECKING:
    from ..learner.sft import Example, SftResult

log = logging.getLogger(__name__)

RECORD = "sft.json"
"""In the model's folder: an `SftResult`, what came of it."""

TOKENS = "tokens.npz"
"""In the folder that ranks are told of: what they train on."""

SAY_EVERY = 20
"""Steps between lines."""

Say = Callable[[str], None]


def fine_tune(config: Config, say: Say) -> SftResult:
    """Write `sft.out`, a Hugging Face folder; what came of it.

    Raises:
        ConfigError: something is wrong with the config, the conversations or this machine; nothing was started.
        LearnerError: a step cannot be taken.
        RoleDied: one of several ranks ended early.
        Interrupted: several ranks were stopped.
    """
    out = Path(config.sft.out)
    if out.exists():
        raise ConfigError(f"sft.out: {out} exists; remove it or name another folder")
    writable("sft.out", config.sft.out)
    preflight(config)
    from ..learner.sft import SftResult

    say(f"rendering {config.sft.messages or f'{config.sft.demonstrations} demonstrations'}")
    examples = make_examples(config)
    out.parent.mkdir(parents=True, exist_ok=True)
    if config.learner.backend.ranks == 1:
        return train(config, examples, say)
    _supervise(config, examples, say)
    return msgspec.json.decode((out / RECORD).read_bytes(), type=SftResult)


def make_examples(config: Config) -> list[Example]:
    """What `sft.messages` holds, else what the environment demonstrates.

    Raises:
        ConfigError: the file and the line that cannot be used, or there are no demonstrations.
    """
    from .wiring import make_demonstrations

    if not config.sft.messages:
        return [*make_demonstrations(config)]
    from ..agents import load_renderer, read_conversations, render_demonstration
    from ..learner.model import load_tokenizer

    agent, key, path = config.agent, "sft.messages", config.sft.messages
    renderer = load_renderer(agent.renderer, load_tokenizer(config.model.path), thinking=agent.thinking)
    examples: list[Example] = []
    for conversation in read_conversations(key, path):
        where = f"{key}: {path}:{conversation.number}"
        try:
            rendered = render_demonstration(renderer, conversation.opening, conversation.messages)
        except Exception as error:  # formats refuse what they cannot say each in its own way
            raise ConfigError(f"{where}: cannot be said in the chat format {agent.renderer}: {error}") from error
        if len(rendered.token_ids) > agent.max_tokens:
            raise ConfigError(
                f"{where}: has {len(rendered.token_ids)} tokens, more than agent.max_tokens={agent.max_tokens}; shorten it, or "
                "raise that as far as the model goes"
            )
        examples.append((rendered.token_ids, rendered.loss_mask))
    return examples


def train(config: Config, examples: list[Example], say: Say) -> SftResult:
    """One rank: train, and write `sft.out` together with the others."""
    from ..learner.sft import HeldOut, SftProgress, run_sft
    from .wiring import make_backend

    def report(news: SftProgress | HeldOut) -> None:
        if isinstance(news, HeldOut):
            say(f"sft epoch {news.epoch}/{config.sft.epochs}  held out {news.loss:.3f} over {news.tokens} tokens")
        elif news.step % SAY_EVERY == 0 or news.step == news.steps:
            say(f"sft step {news.step}/{news.steps}  loss {news.loss:.3f}  {news.tokens_per_s:.0f} tokens/s")

    backend = make_backend(config, temperature=1.0)
    try:
        budget = config.learner.backend.tokens_per_microbatch
        result = run_sft(backend, examples, config.sft, tokens_per_microbatch=budget, seed=config.seed, report=report)
        out = Path(config.sft.out)
        backend.export(out)
        if backend.rank == 0:
            (out / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    finally:
        backend.close()
    return result


def ranks_part(job: Job, say: Say) -> None:
    """What each of several ranks does."""
    with np.load(job.dir / TOKENS) as held:
        token_ids, trained = (np.split(held[name], held["ends"][:-1]) for name in ("token_ids", "trained"))
    train(job.config, list(zip(token_ids, trained, strict=True)), say)


def _supervise(config: Config, examples: list[Example], say: Say) -> None:
    """Start the ranks, see them through, and leave none behind."""
    out = Path(config.sft.out).resolve()
    model = Path(config.model.path)
    config = structs.replace(
        config,
        sft=structs.replace(config.sft, out=str(out)),
        model=structs.replace(config.model, path=str(model.resolve()) if model.is_dir() else config.model.path),
        launch=structs.replace(config.launch, restarts=0),
    )
    gpus = {f"sft-{role.partition('-')[2]}": n for role, n in gpus_of(config).items() if role.startswith("learner")}
    # Beside the model, which all ranks can write, wherever they run. It stays when this fails: the error names a log in it.
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    (work / "logs").mkdir()
    np.savez(
        work / TOKENS,
        token_ids=np.fromiter(chain.from_iterable(ids for ids, _ in examples), dtype=np.int32),
        trained=np.fromiter(chain.from_iterable(mask for _, mask in examples), dtype=np.bool_),
        ends=np.cumsum([len(ids) for ids, _ in examples]),
    )
    try:
        asyncio.run(make_supervisor(config, work, _Lines(say), gpus).fine_tune())
    except Interrupted:
        shutil.rmtree(work)
        raise
    shutil.rmtree(work)


class _Lines:
    """A `View` of what the ranks say."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def step(self, row: Row) -> None:
        return None

    def status(self, role: str, text: str) -> None:
        return None

    def event(self, text: str) -> None:
        log.info("%s", text)
        self._say(text.removeprefix("sft-0: "))

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None
