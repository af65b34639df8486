"""`slipstream sft`: from conversations, or demonstrations of the environment, to a model that imitates them.

    file or environment ──rendered here──> tokens ──one rank────> trained here
                                                  └─several─────> trained by the roles `sft-0`, `sft-1`, ...

Invariants:
- Everything that can be refused is refused before the first process starts and before a file is written.
- All ranks train on the tokens that were rendered here.
- Nothing is worth keeping before the end: a rank that ends early ends them all, none is started again, a stop takes effect at once.
- All is written in one hidden folder beside `sft.out`. The model gets that name when it is whole, `RECORD` in it, and nobody writes
  any more. Then the hidden folder is gone, as it is after a stop or an error; only logs stay, where the error names one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import structs

from ..configs import Config
from ..durable import flush
from ..errors import ConfigError, Interrupted, LearnerError, RoleDied
from ..monitor.metrics import Row
from .job import Job
from .preflight import preflight, writable
from .resources import gpus_of
from .run import anchored, make_supervisor, unscored

if TYPE_CHECKING:
    from ..learner.sft import Example, SftResult
    from .wiring import Shown

log = logging.getLogger(__name__)

RECORD = "sft.json"
"""In the model's folder: an `SftResult`, what came of it."""

MODEL = "model"
"""In the hidden folder: what becomes `sft.out`."""

TOKENS = "tokens.npz"
"""In the hidden folder: what several ranks train on."""

LOGS = "logs"
"""In the hidden folder: what several ranks and whoever watches them had to say."""

SAY_EVERY = 20
"""Steps between lines."""

Say = Callable[[str], None]


def fine_tune(config: Config, say: Say) -> SftResult:
    """Write `sft.out`, a Hugging Face folder; what came of it.

    Raises:
        ConfigError: something is wrong with the config, the conversations or this machine; nothing was started.
        LearnerError: a step cannot be taken, or something cannot be written.
        RoleDied: one of several ranks ended early.
        Interrupted: SIGINT or SIGTERM came.
    """
    out = Path(config.sft.out).resolve()
    if out.exists():
        raise ConfigError(f"sft.out: {config.sft.out} exists; remove it or name another folder")
    writable("sft.out", config.sft.out)
    config = unscored(config)
    preflight(config)
    from ..learner.sft import SftResult

    say(f"rendering {config.sft.messages or f'{config.sft.demonstrations} demonstrations'}")
    examples = make_examples(config)
    with _stoppable(out), _working(out) as work:
        if config.learner.backend.ranks == 1:
            train(config, examples, work, say)
        else:
            _supervise(config, examples, work, say)
        with _writing(out):
            (work / MODEL).rename(out)
    return msgspec.json.decode((out / RECORD).read_bytes(), type=SftResult)


def make_examples(config: Config) -> list[Example]:
    """What `sft.messages` holds, else what the environment demonstrates.

    Raises:
        ConfigError: the line of the file or the environment's task that cannot be used, or there is nothing to imitate.
    """
    from ..agents import load_renderer, render_demonstration
    from ..learner.model import load_tokenizer
    from .wiring import make_demonstrations

    agent = config.agent
    renderer = load_renderer(agent.renderer, load_tokenizer(config.model.path), thinking=agent.thinking)
    examples: list[Example] = []
    for where, opening, messages in _read(config.sft.messages) if config.sft.messages else make_demonstrations(config):
        try:
            rendered = render_demonstration(renderer, opening, messages)
        except Exception as error:  # formats refuse what they cannot say each in its own way
            raise ConfigError(f"{where}: cannot be said in the chat format {agent.renderer}: {error}") from error
        if len(rendered.token_ids) > agent.max_tokens:
            raise ConfigError(
                f"{where}: has {len(rendered.token_ids)} tokens, more than agent.max_tokens={agent.max_tokens}; shorten it, or "
                "raise that as far as the model goes"
            )
        examples.append((rendered.token_ids, rendered.loss_mask))
    return examples


def _read(path: str) -> Iterator[Shown]:
    from ..agents import read_conversations

    for conversation in read_conversations("sft.messages", path):
        yield f"sft.messages: {path}:{conversation.number}", conversation.opening, conversation.messages


def train(config: Config, examples: list[Example], work: Path, say: Say) -> None:
    """One rank: train, and write the model in `work` together with the others."""
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
        backend.export(work / MODEL)
        if backend.rank == 0:
            record = work / MODEL / RECORD
            with _writing(record):
                record.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
                flush(record)
    finally:
        backend.close()


def ranks_part(job: Job, say: Say) -> None:
    """What each of several ranks does."""
    with np.load(job.dir / TOKENS) as held:
        token_ids, trained = (np.split(held[name], held["ends"][:-1]) for name in ("token_ids", "trained"))
    train(job.config, list(zip(token_ids, trained, strict=True)), job.dir, say)


def _supervise(config: Config, examples: list[Example], work: Path, say: Say) -> None:
    """Start the ranks, see them through, and leave none behind."""
    config = structs.replace(anchored(config), launch=structs.replace(config.launch, restarts=0))
    gpus = {f"sft-{role.partition('-')[2]}": n for role, n in gpus_of(config).items() if role.startswith("learner")}
    with _writing(work / TOKENS):
        (work / LOGS).mkdir()
        np.savez(
            work / TOKENS,
            token_ids=np.fromiter(chain.from_iterable(ids for ids, _ in examples), dtype=np.int32),
            trained=np.fromiter(chain.from_iterable(mask for _, mask in examples), dtype=np.bool_),
            ends=np.cumsum([len(ids) for ids, _ in examples]),
        )
    asyncio.run(make_supervisor(config, work, _Lines(say), gpus).fine_tune())


@contextlib.contextmanager
def _working(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, which all ranks can write, wherever they run."""
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield work
    except RoleDied:  # it names a log
        for path in work.iterdir():
            if path.name != LOGS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    except BaseException:
        shutil.rmtree(work)
        raise
    shutil.rmtree(work)


@contextlib.contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """SIGTERM is like SIGINT: what is being done ends where it is, and is cleared away. Raises Interrupted then."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        came = f"the model was whole, and is in {out}" if out.exists() else "no model was written"
        raise Interrupted(f"interrupted; {came}") from None
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises LearnerError where the disk refuses."""
    try:
        yield
    except OSError as error:
        raise LearnerError(
            f"{path} could not be written: {error.strerror or error}; look at the disk", final=False
        ) from error


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
