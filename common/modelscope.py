"""Models and data sets of ModelScope's hub: from `modelscope:ORG/NAME` or `modelscope:ORG/NAME@REVISION` to a folder on this host.

    local_folder ──> the folder in the client's cache, if it is marked as complete
                └──> else what the hub lists at the revision ──> the files that are missing ──> the mark

Invariants:
- Any other name is a folder, a file or a name on Hugging Face's hub, which the libraries that take it resolve.
- A folder with the mark is used without a request, so that a role restarts without the hub. One without it, as of `modelscope
  download`, is used as it is where the hub cannot be reached; one that this file has begun to fill is not.
- The client library reads MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN and MODELSCOPE_CACHE; only what needs it imports it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from ..errors import ConfigError, HubError

log = logging.getLogger(__name__)

PREFIX = "modelscope:"
NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
BRANCH = "master"  # unless a revision is named
HUB_S = 10.0  # seconds for the hub to answer what a repository holds
SETTINGS = {
    "MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS": "2",
    "MODELSCOPE_API_MAX_RETRIES": "1",
    "MODELSCOPE_LOG_LEVEL": "CRITICAL",
}
"""Of the client, unless the user has set them; it reads them when it is imported. Without them it tries for most of a minute where
there is no connection, and writes lines of its own to stderr meanwhile."""
DOWNLOADS = 4  # files at the same time
LONGEST = 200  # characters of an error of the client that a line quotes
SAFETENSORS = "*.safetensors"
FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
"""Weights in formats that Slipstream does not read."""

MARKS = {False: ".slipstream-without-weights", True: ".slipstream-complete"}
"""Empty files that say which files of a repository are all there: all but its weights, or all."""
BEGUN = ".slipstream-begun"  # an empty file while some of a folder is missing

T = TypeVar("T")


def is_on_modelscope(name: str) -> bool:
    return name.startswith(PREFIX)


def repository_of(name: str) -> str:
    """`ORG/NAME` of a name on ModelScope."""
    return name.removeprefix(PREFIX).partition("@")[0]


def require_on_modelscope(name: str, key: str) -> None:
    """Ask the hub for the model `name`, the value of config key `key`, unless some of it is here. Raises ConfigError: there is no
    such model or revision, or the client library is not installed. HubError: the hub cannot be reached."""
    model = ModelScopeRepository(name, key, "model")
    if not model.has("config.json") and "config.json" not in {file.path for file in model.files()}:
        raise ConfigError(f"{key}: {name!r} holds no usable config: it has no config.json")


def local_folder(name: str, key: str, *, weights: bool) -> str:
    """The folder of the model `name` on this host, with or without its `weights`, downloaded where it is not here; a name that is
    not on ModelScope as it is. Raises as `require_on_modelscope`; HubError also where the download broke off."""
    if not is_on_modelscope(name):
        return name
    return str(ModelScopeRepository(name, key, "model").fetch(weights=weights))


def local_dataset(name: str, key: str) -> str:
    """The folder of the data set `name` on this host; as `local_folder`."""
    return str(ModelScopeRepository(name, key, "dataset").fetch(weights=True))


class ModelScopeRepository:
    """One repository at one revision. Raises ConfigError: the name is not of the right form, or the client library is missing."""

    def __init__(self, name: str, key: str, kind: Literal["model", "dataset"]) -> None:
        found = NAME.fullmatch(name.removeprefix(PREFIX))
        if not found or ".." in PurePosixPath(found[0]).parts:
            raise ConfigError(f"{key}: {name!r} is not of the form {PREFIX}ORG/NAME or {PREFIX}ORG/NAME@REVISION")
        self._called, self._kind = f"{key}: {name!r}", kind
        self._repository, self._revision = found[1], found[2] or BRANCH
        for setting, value in SETTINGS.items():
            os.environ.setdefault(setting, value)
        try:
            self._library = importlib.import_module("modelscope_hub")
        except ImportError as error:
            raise ConfigError(
                f"{self._called} needs the package modelscope-hub ({error}); run `pip install -e .[modelscope]`"
            ) from None
        config = self._library.HubConfig()
        self._endpoint = config.endpoint
        self._api = self._library.HubApi(config)
        # The client's own place. It is named here since the client would take any revision that an older client has left.
        directory = self._repository.replace("/", "--")
        self.folder = Path(config.cache_dir) / f"{kind}s" / directory / "snapshots" / self._revision

    def has(self, path: str) -> bool:
        return (self.folder / path).is_file()

    def fetch(self, *, weights: bool) -> Path:
        """The folder, complete; with all but its weights, or with those, too."""
        if self.has(MARKS[True]) or self.has(MARKS[weights]):
            return self.folder
        try:
            files = [file for file in self.files() if _is_wanted(file.path, weights)]
        except HubError as error:
            if (
                not self.folder.is_dir()
                or not any(self.folder.iterdir())
                or any(map(self.has, (*MARKS.values(), BEGUN)))
            ):
                raise
            log.warning("%s; what is in %s is used as it is", error, self.folder)
            return self.folder
        log.info("%s: %d files, %d MiB", self._called, len(files), sum(file.size for file in files) >> 20)
        with contextlib.suppress(OSError):  # a cache that may only be read
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / BEGUN).touch()
        with ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="download") as pool:
            for _ in pool.map(self._download, files):
                pass
        with contextlib.suppress(OSError):
            (self.folder / MARKS[weights]).touch()
            (self.folder / BEGUN).unlink(missing_ok=True)
        return self.folder

    def files(self) -> Sequence[Any]:
        """What the hub lists: `path`, `size` in bytes and `sha256` of each file."""
        kind, repository, revision = self._kind, self._repository, self._revision
        try:
            listed = _run_within(HUB_S, lambda: self._api.list_repo_files(repository, kind, revision=revision))
        except self._library.HubError as error:
            self._refuse_unreachable(error)
            raise ConfigError(self._missing(error)) from error
        except Exception as error:  # those of its HTTP library, and of answers that are not the hub's
            raise HubError(self._unreachable(error)) from error
        files = [file for file in listed if not file.is_dir]
        for file in files:
            path = PurePosixPath(file.path)
            if path.is_absolute() or ".." in path.parts:
                raise ConfigError(f"{self._called} lists the file {file.path!r}, which is outside of its folder")
        return files

    def _missing(self, error: Exception) -> str:
        """Why the hub refused to list the repository: it has none of that name, or not that revision."""
        kind, repository = self._kind, self._repository
        try:
            known = _run_within(HUB_S, lambda: self._api.list_repo_revisions(repository, kind))
        except Exception:  # whatever the client raises: the first error says more
            known = []
        names = [str(one.get("Revision") or one.get("name")) for one in known]
        if names and self._revision not in names:
            return f"{self._called}: {repository} has no revision {self._revision} on ModelScope; it has {', '.join(names)}"
        return (
            f"{self._called}: {self._endpoint} gave no {kind} of that name: {_line(error)}; allowed are public ones, and those "
            "that MODELSCOPE_API_TOKEN may read"
        )

    def _download(self, file: Any) -> None:
        """Whole files only appear under their own names."""
        target = self.folder / file.path
        if target.is_file() and target.stat().st_size == file.size:
            return
        try:
            self._api.download_file(
                self._repository, self._kind, file.path, revision=self._revision, local_dir=self.folder,
                expected_sha256=file.sha256, file_size=file.size,
            )  # fmt: skip
        except Exception as error:  # those of the client, of its HTTP library, and of the file system
            raise HubError(
                f"{self._called}: {file.path} could not be downloaded from {self._endpoint} to {self.folder}: {_line(error)}"
            ) from error

    def _refuse_unreachable(self, error: Exception) -> None:
        library = self._library
        if isinstance(error, library.NetworkError | library.ServerError | library.RateLimitError):
            raise HubError(self._unreachable(error)) from error

    def _unreachable(self, error: Exception) -> str:
        why = _line(_first_cause(error))
        return (
            f"{self._called}: ModelScope's hub at {self._endpoint} did not answer: {why}; is it reached from here? "
            "MODELSCOPE_ENDPOINT names another"
        )


def _is_wanted(path: str, weights: bool) -> bool:
    name = PurePosixPath(path).name
    return not any(fnmatch.fnmatch(name, pattern) for pattern in (*FOREIGN, *(() if weights else (SAFETENSORS,))))


def _run_within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, in a thread that is left alone where it takes longer. Raises TimeoutError."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="modelscope").start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        raise error if result.done() else TimeoutError(f"no answer within {seconds:g} s") from None


def _first_cause(error: BaseException) -> BaseException:
    """Below the layers of the client and of its HTTP library: for example `[Errno 111] Connection refused`."""
    while deeper := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = deeper
    return error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
