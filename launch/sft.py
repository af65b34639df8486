"""Supervised fine-tuning on conversations, on demonstrations of the environment, or on preferences.

    file or environment ──rendered here──> tokens ──one rank────> trained in this process
                                                  └─several─────> trained by the roles `sft-0`, `sft-1`, ...

Invariants:
- Everything that can be refused is refused before the first process starts and before a file is written.
- All ranks train on the tokens rendered in this process.
- There is no checkpoint: a rank that ends early ends the others, no rank is restarted, and a stop takes effect at once.
- All files are written into one hidden folder next to `sft.out`. The complete model, with its `RESULT_FILE`, is then renamed to
  `sft.out`. The hidden folder is deleted in every case; only logs are kept where an error names one.
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

from ..common.fsio import write_atomic
from ..configs import Config, SftConfig
from ..configs.algorithm import Dpo
from ..errors import ConfigError, Interrupted, LearnerError, RoleDied
from ..monitor.terminal import View
from .preflight import preflight, writable
from .resources import gpus_of
from .run import make_supervisor, with_absolute_paths, without_reward_model
from .run_context import RunContext

if TYPE_CHECKING:
    from ..common.images import PlacedImage
    from ..learner.sft import Example, ExampleImages, SftResult

log = logging.getLogger(__name__)

RESULT_FILE = "sft.json"  # in the model's folder: an `SftResult`
MODEL_FOLDER = "model"  # in the hidden folder: becomes `sft.out`
TOKENS_FILE = "tokens.npz"  # in the hidden folder: the tokens that several ranks train on
CONFIG_FILE = "config.json"  # in the hidden folder: the config, for several ranks
LOGS_FOLDER = "logs"  # in the hidden folder: the logs of several ranks and of their supervisor
STEPS_PER_LINE = 20  # steps between two printed lines
PrintLine = Callable[[str], None]


def fine_tune(config: SftConfig, print_line: PrintLine) -> SftResult:
    """Write `sft.out`, a Hugging Face folder; returns the losses. Raises ConfigError where the config, a conversation or this
    machine is unsuitable (no process was started), LearnerError where a step failed or a file cannot be written, RoleDied where
    one of several ranks ended early, Interrupted on SIGINT or SIGTERM."""
    out = Path(config.sft.out).resolve()
    if out.exists():
        raise ConfigError(f"sft.out: {config.sft.out} exists; remove it or name another folder")
    writable("sft.out", config.sft.out)
    config = without_reward_model(config)
    preflight(config)
    from ..learner.sft import SftResult

    path = config.sft.messages or config.sft.preferences
    print_line(f"rendering {path or f'{config.sft.demonstrations} demonstrations'}")
    examples, images = make_examples(config)
    if images is not None and config.learner.backend.ranks > 1:
        ranks = config.learner.backend.ranks
        raise ConfigError(
            f"learner.backend.ranks={ranks}: conversations with images are fine-tuned by one rank; allowed is 1"
        )
    with _interruptible(out), _work_folder(out) as work:
        if config.learner.backend.ranks == 1:
            train(config, examples, work, print_line, images)
        else:
            _supervise(config, examples, work, print_line)
        with _disk_errors(out):
            (work / MODEL_FOLDER).rename(out)
    return msgspec.json.decode((out / RESULT_FILE).read_bytes(), type=SftResult)


def make_examples(config: SftConfig) -> tuple[list[Example], ExampleImages | None]:
    """The conversations of `sft.messages` or `sft.preferences` (chosen and rejected by turns), otherwise demonstrations of the
    environment, as tokens; and their images, None where there are none. Raises ConfigError where a line of the file or a task
    cannot be used, or there is no demonstration."""
    from ..agents import load_renderer, read_conversations, read_preferences, render_demonstration
    from ..learner.model import load_tokenizer
    from ..learner.sft import ExampleImages
    from .supervisor.factory import make_demonstrations

    agent = config.agent
    renderer = load_renderer(agent.renderer, load_tokenizer(config.model.path), thinking=agent.thinking)
    if config.sft.preferences:
        shown = chain.from_iterable(read_preferences("sft.preferences", config.sft.preferences))
    elif config.sft.messages:
        shown = read_conversations("sft.messages", config.sft.messages)
    else:
        shown = make_demonstrations(config)
    examples: list[Example] = []
    placed: list[tuple[PlacedImage, ...]] = []
    files: dict[str, bytes] = {}
    for where, opening, messages in shown:
        try:
            rendered = render_demonstration(renderer, opening, messages)
        except Exception as error:  # each chat format has its own errors
            raise ConfigError(f"{where}: cannot be rendered in the chat format {agent.renderer}: {error}") from error
        if len(rendered.token_ids) > agent.max_tokens:
            raise ConfigError(
                f"{where}: has {len(rendered.token_ids)} tokens, more than agent.max_tokens={agent.max_tokens}; shorten it, or "
                "raise that as far as the model goes"
            )
        examples.append((rendered.token_ids, rendered.loss_mask))
        placed.append(rendered.images)
        files |= rendered.image_files
    return examples, ExampleImages(tuple(placed), files) if files else None


def train(
    config: SftConfig, examples: list[Example], work: Path, print_line: PrintLine, images: ExampleImages | None = None
) -> None:
    """Train as one rank and write the model into `work`, with the other ranks."""
    from ..learner.sft import HeldOut, SftProgress, run_preferences, run_sft
    from .supervisor.factory import make_backend, make_preference_model

    def report(news: SftProgress | HeldOut) -> None:
        if isinstance(news, HeldOut):
            epoch = f"{news.epoch}/{config.sft.epochs}"
            over = f"{news.tokens} tokens"
            if news.right is not None:
                over = f"{news.tokens} preferences, {news.right:.0%} of them right"
            print_line(f"sft epoch {epoch}  held out {news.loss:.3f} over {over}")
        elif news.step % STEPS_PER_LINE == 0 or news.step == news.steps:
            print_line(f"sft step {news.step}/{news.steps}  loss {news.loss:.3f}  {news.tokens_per_s:.0f} tokens/s")

    how = {"tokens_per_microbatch": config.learner.backend.tokens_per_microbatch, "seed": config.seed, "report": report}
    classifies = config.sft.preferences and not isinstance(config.sft.loss, Dpo)
    backend = make_preference_model(config) if classifies else make_backend(config, temperature=1.0)
    try:
        if config.sft.preferences:
            pairs = list(zip(examples[::2], examples[1::2], strict=True))
            result = run_preferences(backend, pairs, config.sft, **how)
        else:
            result = run_sft(backend, examples, config.sft, **how, images=images)
        backend.export(work / MODEL_FOLDER)
        if backend.rank == 0:
            record = work / MODEL_FOLDER / RESULT_FILE
            with _disk_errors(record):
                write_atomic(record, msgspec.json.format(msgspec.json.encode(result)) + b"\n", durable=True)
    finally:
        backend.close()


def run_rank(job: RunContext, print_line: PrintLine) -> None:
    with np.load(job.dir / TOKENS_FILE) as held:
        token_ids, trained = (np.split(held[name], held["ends"][:-1]) for name in ("token_ids", "trained"))
    config = msgspec.json.decode((job.dir / CONFIG_FILE).read_bytes(), type=SftConfig)
    train(config, list(zip(token_ids, trained, strict=True)), job.dir, print_line)


def _supervise(config: SftConfig, examples: list[Example], work: Path, print_line: PrintLine) -> None:
    """Start the ranks, wait until they are done, and stop them."""
    config = structs.replace(with_absolute_paths(config), launch=structs.replace(config.launch, restarts=0))
    gpus = {f"sft-{role.partition('-')[2]}": n for role, n in gpus_of(config).items() if role.startswith("learner")}
    with _disk_errors(work / TOKENS_FILE):
        (work / LOGS_FOLDER).mkdir()
        np.savez(
            work / TOKENS_FILE,
            token_ids=np.fromiter(chain.from_iterable(ids for ids, _ in examples), dtype=np.int32),
            trained=np.fromiter(chain.from_iterable(mask for _, mask in examples), dtype=np.bool_),
            ends=np.cumsum([len(ids) for ids, _ in examples]),
        )
        (work / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    run = {name: value for name, value in structs.asdict(config).items() if name != "sft"}
    asyncio.run(make_supervisor(Config(**run), work, _RankOutput(print_line), gpus).fine_tune())


@contextlib.contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """A hidden folder next to `out`, which is deleted at the end."""
    with _disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield work
    except RoleDied:  # the error names a log
        for path in work.iterdir():
            if path.name != LOGS_FOLDER:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    except BaseException:
        shutil.rmtree(work)
        raise
    shutil.rmtree(work)


@contextlib.contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Raises Interrupted on SIGTERM and on SIGINT."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        written = f"the model is complete, in {out}" if out.exists() else "no model was written"
        raise Interrupted(f"interrupted; {written}") from None
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turns errors of the disk into LearnerError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise LearnerError(f"{path} could not be written: {why}; check the disk", final=False) from error


class _RankOutput(View):
    def __init__(self, print_line: PrintLine) -> None:
        self._print_line = print_line

    def event(self, text: str) -> None:
        log.info("%s", text)
        self._print_line(text.removeprefix("sft-0: "))
