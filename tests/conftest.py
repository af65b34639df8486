"""Fixtures that several test files share.

What takes seconds to import is imported where it is used: where several processes test, the one that distributes the tests needs
none of it, and the others begin when it has read this file.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from slipstream.tests import forkserver, tiers
from slipstream.tests.cache import open_cache
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
    from typing import Any

    from renderers import Renderer
    from slipstream.agents import Session
    from slipstream.agents.gateway import Endpoint, Gateway
    from slipstream.tests.gateways import Episode
    from slipstream.tests.sessions import Script
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CACHE = pytest.StashKey[Path | None]()
ROOT = Path(__file__).parent

settings.register_profile("default", max_examples=10, deadline=None)
settings.register_profile("full", max_examples=100, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Commands of this package are forked from a process that has imported it, unless `SLIPSTREAM_TESTS_EXECUTE` is set. Signals
    are as in a terminal, also where the tests run under nohup or in the background of a script. What a test starts computes with
    one thread: several that wait for each other on cores that other processes use, too, take twice as long."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number, handler in {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    if not os.environ.get("SLIPSTREAM_TESTS_EXECUTE"):
        forkserver.install()
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("default" if config.option.markexpr == "not full" else "full")
    config.stash[CACHE] = open_cache()


def pytest_unconfigure(config: pytest.Config) -> None:
    if cache := config.stash.get(CACHE, None):
        shutil.rmtree(cache, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of several processes that test, the second collects folders backwards: in a fresh clone either compiles one half of the files
    and finds the bytecode of the other. `pytest_collection_modifyitems` gives the tests of all processes the same order."""
    report = yield
    if isinstance(collector, pytest.Directory) and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the tier of each test; long groups begin first. The process that tests computes with one thread, too."""
    import torch

    torch.set_num_threads(1)
    for item in items:
        if tiers.is_full(item):
            item.add_marker("full")
    some = any(config.getoption(name, None) for name in ("engine", "ignore", "ignore_glob", "lf", "deselect"))
    if [(config.rootpath / path).resolve() for path in config.args] == [ROOT] and not some:
        config.stash[tiers.ALL] = [tiers.line_of(item) for item in items]
    items.sort(key=lambda item: (tiers.order(item), item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What all test files have imported is not scanned by every collection: a backend that is closed makes one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """What one process takes as a whole where several test (`-n`)."""
    return tiers.GroupScheduling(config, log)


@pytest.fixture(autouse=True)
def same_niceness() -> Iterator[None]:
    """No test lowers the priority of those that follow it in its process: they would wait for the other process's tests."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "the test has changed the niceness of its process"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies of one architecture, tied embeddings, random weights."""
    from slipstream.tests import tiny

    root = tmp_path_factory.mktemp("models")
    return [tiny.tiny_qwen3(root / f"m{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="session")
def type_checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The type checker, and the file of what it says: it runs beside the tests that come before its own, with less priority, which
    only root can raise again."""
    said = tmp_path_factory.mktemp("types") / "output"
    with said.open("wb") as file:
        checker = ["nice", "-n", "19" if os.geteuid() == 0 else "5", Path(sys.executable).with_name("basedpyright")]
        process = subprocess.Popen(checker, cwd=ROOT.parent, stdout=file, stderr=file, start_new_session=True)
    yield process, said
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def address() -> str:
    """A ZeroMQ address at which no process listens."""
    from slipstream.tests import tiny

    return f"tcp://127.0.0.1:{tiny.free_port()}"


@pytest.fixture(scope="session")
def models(folders: list[Path]) -> list[PreTrainedModel]:
    """What transformers makes of `folders`."""
    from slipstream.tests import tiny

    return [tiny.load(folder) for folder in folders]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy with a tokenizer, for runs of the quickstart's environment."""
    from slipstream.tests.runs import tiny_policy

    return tiny_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def wide_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `policy`, as large as the quickstart's: it learns in a few steps."""
    from slipstream.launch.init_model import TinyModelShape
    from slipstream.tests.runs import tiny_policy

    return tiny_policy(tmp_path_factory.mktemp("model") / "policy", TinyModelShape())


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """That of a tiny policy of the quickstart's environment."""
    from slipstream.learner.model import load_tokenizer
    from slipstream.tests.runs import tiny_policy

    return load_tokenizer(str(tiny_policy(tmp_path_factory.mktemp("model") / "policy")))


@pytest.fixture(scope="session")
def renderer(tokenizer: PreTrainedTokenizerBase) -> Renderer:
    """Qwen3's messages, without thinking."""
    from slipstream.agents import load_renderer

    return load_renderer("qwen3", tokenizer, thinking=False)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    from slipstream.agents.gateway import Gateway

    async with Gateway(keepalive_s=0.05) as gateway:
        yield gateway


@pytest.fixture
def episode(gateway: Gateway, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> Episode:
    """Opens an episode whose policy says `texts`, or what `say` gives."""
    from slipstream.tests.sessions import Script, session_of

    @contextlib.asynccontextmanager
    async def opened(
        *texts: str, say: Callable[[int], str | Awaitable[str]] | None = None, **options: Any
    ) -> AsyncIterator[tuple[Endpoint, Script, Session]]:
        tools = options.pop("tools", None)
        script = Script(tokenizer, say or texts.__getitem__)
        session = session_of(renderer, tokenizer, script, **options)
        async with gateway.endpoint(session, tools) as endpoint:
            yield endpoint, script, session

    return opened
