"""The receiving end of a weight push, in an engine's process: everything of a version is here, and proven, before anything changes.

    engine's thread:  join ──> begin(plan) ──> ... generates on ... ──> take(version) ──> loads
                                   │                                       ▲
    staging thread:                └─> receive / map / patch, checksum ────┴──> Receipt to the learner

Invariants:
- `begin` returns at once; the engine goes on with its old weights. Whatever goes wrong in the thread is told to the learner and to
  `take`, and ends nothing else.
- What `take` returns is whole, and what came has the plan's checksum. Of adapters it is the model with them added.
- Staged tensors lie in host memory, and a mapped file is shared with every other process that maps it: on a GPU there is no room
  for a second model beside the KV cache. They may be the base of the next delta: read them, never write to them.
- A broadcast takes the group along: only a broadcast that succeeded gives it back, since otherwise the group's state is unknown.

Imported by vLLM's and SGLang's processes: nothing but torch, numpy, msgspec, zmq, xxhash and safetensors may be needed here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from ..errors import WeightSyncError
from . import delta
from .adapters import are_adapters, merge
from .buckets import buckets_of, dtype_of, unpack
from .checksum import Checksum
from .group import BroadcastGroup
from .plan import Broadcast, Delta, File, GroupPlan, Receipt, TransferPlan
from .receipts import send_receipt

logger = logging.getLogger(__name__)

TAKE_S = 60.0
"""Longest wait for the staging thread. The learner asks for a swap only after the receipt, so there is normally none."""

Tensors = list[tuple[str, torch.Tensor]]
"""Hugging Face name and tensor, in the plan's order."""


class _Kept(msgspec.Struct, frozen=True):
    """A version that the next delta may be relative to."""

    version: int
    tensors: dict[str, torch.Tensor]


class _Work:
    """One version on its way in. `tensors` and `error` are final once `done` is set."""

    def __init__(self, plan: TransferPlan, group: BroadcastGroup | None, kept: _Kept | None) -> None:
        self.plan = plan
        self.group = group
        self.kept = kept
        self.done = threading.Event()
        self.tensors: Tensors = []
        self.error = ""


class Staging:
    """One rank's staging area.

    Args:
        rank: of this process within its replica, from 0.
        device: where `nccl` receives.
        check: raises WeightSyncError when the model cannot take what a plan announces. Runs in the staging thread.
        base: the weights that the model was first loaded from, which adapters are added to. Runs there, too.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        check: Callable[[TransferPlan], None],
        base: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple,
    ) -> None:
        self._rank = rank
        self._device = device
        self._check = check
        self._base = base
        self._lock = threading.Lock()
        self._group: BroadcastGroup | None = None
        self._work: _Work | None = None
        self._kept: _Kept | None = None

    def join(self, plan: GroupPlan) -> None:
        """Join the plan's group; blocks until all of it has met. Leaves any other group, drops what was staged.

        Raises:
            WeightSyncError: the group did not meet within `plan.timeout_s`.
        """
        self.discard()
        self._leave()
        group = BroadcastGroup(plan, plan.rank_offset + self._rank, self._device)
        with self._lock:
            self._group = group

    def begin(self, plan: TransferPlan) -> None:
        """Stage one version in a thread, and return at once. An earlier one is dropped. Every outcome goes to `plan.receipts`."""
        with self._lock:
            group = None
            if isinstance(plan.source, Broadcast):
                group, self._group = self._group, None
            self._work = work = _Work(plan, group, self._kept)
        threading.Thread(target=self._stage, args=(work,), name=f"stage-{plan.version}", daemon=True).start()

    def take(self, version: int) -> Tensors:
        """The staged tensors of `version`, once; waits for the thread.

        Raises:
            WeightSyncError: that version is not staged whole.
        """
        with self._lock:
            work = self._work
        if work is None or work.plan.version != version:
            held = f"version {work.plan.version}" if work else "nothing"
            raise WeightSyncError(f"version {version} is not staged here, {held} is; announce it first")
        if not work.done.wait(TAKE_S):
            raise WeightSyncError(
                f"version {version} was not staged within {TAKE_S:g} s; wait for its receipt before a swap"
            )
        with self._lock:
            if self._work is work:
                self._work = None
        if work.error:
            raise WeightSyncError(f"version {version} was not staged: {work.error}")
        return work.tensors

    def discard(self) -> None:
        """Forget what is staged, or on its way in. The base of the next delta stays."""
        with self._lock:
            self._work = None

    def close(self) -> None:
        """Forget everything and leave the group. A thread that is in the middle of a collective is not waited for: it ends when
        the others leave, at the latest at the group's deadline."""
        self.discard()
        self._leave()
        with self._lock:
            self._kept = None

    def _leave(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _stage(self, work: _Work) -> None:
        """The thread: all of one version, then the receipt."""
        began = time.perf_counter()
        plan = work.plan
        came, tensors = Tensors(), Tensors()
        try:
            self._check(plan)
            came = tensors = self._proven(work)
            if are_adapters(plan.names):
                tensors = list(merge(dict(came), self._base()))
        except Exception as error:  # the learner is told; the engine must not end of it
            work.error = _one_line(error)
        with self._lock:
            wanted = self._work is work
            if wanted and not work.error:
                work.tensors = tensors
                self._group, work.group = work.group or self._group, None
                if plan.keep:
                    self._kept = _Kept(plan.version, dict(came))
        if work.group is not None:
            work.group.close()
        work.group = work.kept = None
        work.done.set()
        if not wanted:
            return  # nobody waits for it any more
        receipt = Receipt(plan.replica, self._rank, plan.version, time.perf_counter() - began, work.error)
        try:
            send_receipt(plan.receipts, receipt)
        except WeightSyncError as error:
            logger.warning("version %d: %s", plan.version, error)

    def _proven(self, work: _Work) -> Tensors:
        """All tensors of a plan. Raises WeightSyncError when they are not what the learner announced."""
        plan, total, tensors = work.plan, Checksum(), Tensors()
        for name, tensor in self._arriving(work):
            if self._work is not work:
                raise WeightSyncError("dropped for another version")
            total.add(tensor)
            tensors.append((name, tensor))
        if total.hexdigest() != plan.checksum:
            raise WeightSyncError(
                f"version {plan.version} arrived with checksum {total.hexdigest()}, the learner sent {plan.checksum}"
            )
        return tensors

    def _arriving(self, work: _Work) -> Iterator[tuple[str, torch.Tensor]]:
        plan, source = work.plan, work.plan.source
        if isinstance(source, Broadcast):
            if work.group is None:
                raise WeightSyncError(
                    "weights were announced to a replica that is in no broadcast group; join one first"
                )
            return _received(work.group, plan)
        if isinstance(source, File):
            tensors = _mapped(source.path, plan)
            return ((name, delta.copy(tensor)) for name, tensor in tensors) if plan.keep else tensors
        if work.kept is None or work.kept.version != source.base:
            here = f"version {work.kept.version}" if work.kept else "none"
            raise WeightSyncError(
                f"version {plan.version} is a delta from version {source.base}; the base kept here is {here}"
            )
        return _patched(source, plan, work.kept)


def _received(group: BroadcastGroup, plan: TransferPlan) -> Iterator[tuple[str, torch.Tensor]]:
    with _lane(group.device):
        for bucket in buckets_of(plan):
            data = torch.empty(bucket.nbytes, dtype=torch.uint8, device=group.device)
            group.broadcast(data)
            yield from unpack(plan, bucket, data.cpu())


def _mapped(path: str, plan: TransferPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, as views of the mapped file."""
    with _readable(path), safe_open(path, framework="pt") as file:
        for name, dtype, shape in zip(plan.names, plan.dtypes, plan.shapes, strict=True):
            tensor = file.get_tensor(name)
            if tensor.dtype != dtype_of(dtype) or tuple(tensor.shape) != shape:
                raise WeightSyncError(
                    f"{path} holds {name} as {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
                )
            yield name, tensor


def _patched(source: Delta, plan: TransferPlan, kept: _Kept) -> Iterator[tuple[str, torch.Tensor]]:
    with _readable(source.path):
        yield from delta.apply(source.path, plan, kept.tensors)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"cannot read the weights in {path}: {_one_line(error)}; does this host see the learner's files?"
        ) from error


@contextlib.contextmanager
def _lane(device: torch.device) -> Iterator[None]:
    """A CUDA stream of this thread's own, so that receiving does not queue behind the engine's kernels."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
        yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for good: torch's allocator keeps freed memory per stream, and beside a KV cache there is none to spare."""
    return torch.cuda.Stream(device)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {text}"
