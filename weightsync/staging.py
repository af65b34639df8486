"""The receiving end of a weight push, in an engine's process: a whole version arrives and is verified before anything changes.

    engine's thread:  join ──> begin(plan) ──> ... generates ... ──> take(version) ──> loads
                                   │                                     ▲
    staging thread:                └─> receive / map / patch, checksum ──┴──> ack to the learner

Invariants:
- An error in the thread is reported to the learner and by `take`, and has no other effect.
- `take` returns the whole version, whose bytes had the plan's checksum. After a push of adapters it is the model with them added.
- Staged tensors are in host memory: a GPU has no room for a second model. Others may map the same file, and they may be the base of
  the next delta: never write to them.
- A broadcast takes over the group; only a broadcast that succeeded returns it, since otherwise the group's state is unknown.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from safetensors import SafetensorError, safe_open

from ..common import accelerator
from ..errors import WeightSyncError
from . import delta
from .broadcast import BroadcastGroup
from .plan import BroadcastSource, DeltaSource, FileSource, GroupPlan, TransferPlan, WeightAck, send_ack
from .snapshot import buckets_of, checksum, dtype_of, unpack
from .weight_check import TIED, are_adapters, base_weights, check_weights, checkpoint_shapes, merge

logger = logging.getLogger(__name__)

TAKE_S = 60.0  # longest wait for the staging thread; normally none, since the learner swaps after the ack
Tensors = list[tuple[str, torch.Tensor]]  # Hugging Face name and tensor, in the plan's order
_Base = tuple[int, dict[str, torch.Tensor]]  # a version that is kept, and its tensors


class _Transfer:
    """One version that arrives. `tensors` and `error` are final once `done` is set; `base` is what a delta may be relative to."""

    def __init__(self, plan: TransferPlan, group: BroadcastGroup | None, base: _Base | None) -> None:
        self.plan = plan
        self.group = group
        self.base = base
        self.done = threading.Event()
        self.tensors: Tensors = []
        self.error = ""


class WeightStaging:
    """One rank's staging area. `check` and `base` run in the staging thread."""

    def __init__(
        self,
        rank: int,  # of this process within its replica, from 0
        device: torch.device,  # where collectives other than gloo's receive
        check: Callable[[TransferPlan], None],  # raises WeightSyncError when a plan does not match the model
        base: Callable[
            [], Iterable[tuple[str, torch.Tensor]]
        ] = tuple,  # weights loaded first, to which adapters are added
    ) -> None:
        self._rank = rank
        self._device = device
        self._check = check
        self._base = base
        self._lock = threading.Lock()
        self._group: BroadcastGroup | None = None
        self._transfer: _Transfer | None = None
        self._kept: _Base | None = None

    @classmethod
    def for_checkpoint(
        cls, rank: int, device: torch.device, model: str, revision: str | None, *, tied: bool
    ) -> WeightStaging:
        """Staging for a model that an engine loaded from the safetensors of `model`; plans are checked against those. `tied`:
        `lm_head` may be missing."""
        shapes = functools.cache(lambda: checkpoint_shapes(model, revision))

        def check(plan: TransferPlan) -> None:
            check_weights(plan, shapes(), optional=TIED if tied else frozenset())

        return cls(rank, device, check, functools.partial(base_weights, model, revision))

    def join(self, plan: GroupPlan) -> None:
        """Join the plan's group, leaving any other; drop what was staged. Raises WeightSyncError where the group is not complete
        within `plan.timeout_s`."""
        self.discard()
        self._leave()
        group = BroadcastGroup(plan, plan.rank_offset + self._rank, self._device)
        with self._lock:
            self._group = group

    def begin(self, plan: TransferPlan) -> None:
        """Stage one version in a thread, and return at once. An earlier one is dropped. Every outcome is sent to `plan.acks`."""
        with self._lock:
            group = None
            if isinstance(plan.source, BroadcastSource):
                group, self._group = self._group, None
            self._transfer = transfer = _Transfer(plan, group, self._kept)
        threading.Thread(target=self._stage, args=(transfer,), name=f"stage-{plan.version}", daemon=True).start()

    def take(self, version: int) -> Tensors:
        """The staged tensors of `version`, once; waits for the thread. Raises WeightSyncError: it is not staged whole."""
        with self._lock:
            transfer = self._transfer
        if transfer is None or transfer.plan.version != version:
            held = f"version {transfer.plan.version}" if transfer else "nothing"
            raise WeightSyncError(f"version {version} is not staged here, {held} is; announce it first")
        if not transfer.done.wait(TAKE_S):
            raise WeightSyncError(
                f"version {version} was not staged within {TAKE_S:g} s; wait for its ack before a swap"
            )
        with self._lock:
            if self._transfer is transfer:
                self._transfer = None
        if transfer.error:
            raise WeightSyncError(f"version {version} was not staged: {transfer.error}")
        return transfer.tensors

    def discard(self) -> None:
        """Drop what is staged or arriving. The base of the next delta stays."""
        with self._lock:
            self._transfer = None

    def close(self) -> None:
        """Drop everything and leave the group. A thread in a collective ends when the other members leave, at the latest at its
        deadline."""
        self.discard()
        self._leave()
        with self._lock:
            self._kept = None

    def _leave(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _stage(self, transfer: _Transfer) -> None:
        plan = transfer.plan
        arrived, tensors = Tensors(), Tensors()
        try:
            self._check(plan)
            arrived = tensors = self._receive(transfer)
            if are_adapters(plan.names):
                tensors = list(merge(dict(arrived), self._base()))
        except Exception as error:  # reported to the learner; the engine goes on
            transfer.error = _one_line(error)
        with self._lock:
            wanted = self._transfer is transfer
            if wanted and not transfer.error:
                transfer.tensors = tensors
                self._group, transfer.group = transfer.group or self._group, None
                if plan.keep:
                    self._kept = plan.version, dict(arrived)
        if transfer.group is not None:
            transfer.group.close()
        transfer.group = transfer.base = None
        transfer.done.set()
        if not wanted:
            return  # replaced: the learner does not wait for it
        ack = WeightAck(plan.receiver, self._rank, plan.version, transfer.error)
        try:
            send_ack(plan.acks, ack)
        except WeightSyncError as error:
            logger.warning("version %d: %s", plan.version, error)

    def _receive(self, transfer: _Transfer) -> Tensors:
        """All tensors of a plan. Raises WeightSyncError when they do not match it."""
        plan, tensors = transfer.plan, Tensors()

        def arriving() -> Iterator[torch.Tensor]:
            for name, tensor in self._tensors(transfer):
                if self._transfer is not transfer:
                    raise WeightSyncError("dropped for another version")
                tensors.append((name, tensor))
                yield tensor

        if (found := checksum(arriving())) != plan.checksum:
            raise WeightSyncError(
                f"version {plan.version} arrived with checksum {found}, the learner sent {plan.checksum}"
            )
        return tensors

    def _tensors(self, transfer: _Transfer) -> Iterator[tuple[str, torch.Tensor]]:
        plan, source = transfer.plan, transfer.plan.source
        if isinstance(source, BroadcastSource):
            if transfer.group is None:
                raise WeightSyncError(
                    "weights were announced to a replica that is in no broadcast group; join one first"
                )
            return _received(transfer.group, plan)
        if isinstance(source, FileSource):
            tensors = _mapped(source.path, plan)
            return ((name, delta.copy(tensor)) for name, tensor in tensors) if plan.keep else tensors
        if transfer.base is None or transfer.base[0] != source.base:
            here = f"version {transfer.base[0]}" if transfer.base else "none"
            raise WeightSyncError(
                f"version {plan.version} is a delta from version {source.base}; the base kept here is {here}"
            )
        return _patched(source, plan, transfer.base[1])


def _received(group: BroadcastGroup, plan: TransferPlan) -> Iterator[tuple[str, torch.Tensor]]:
    with accelerator.own_stream(group.device):  # so that receiving does not queue behind the engine's kernels
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


def _patched(
    source: DeltaSource, plan: TransferPlan, base: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    with _readable(source.path):
        yield from delta.apply(source.path, plan, base)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"cannot read the weights in {path}: {_one_line(error)}; does this host see the learner's files?"
        ) from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {text}"
