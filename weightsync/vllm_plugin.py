"""vLLM's door to us: the entry point of group `vllm.general_plugins`, called in every process of a server.

Invariants:
- Importing this module imports neither torch nor vLLM; registering names a class that is imported when a server asks for it.
- An engine process never outlives the server that started it.
- Every chunk of a stream says which weights sampled the tokens so far. vLLM itself says so in the last one only, and a server
  that dies never sends that.
- A weight push that fails on several workers of a replica is told once, as the failure of that call.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any, NamedTuple

from ..parent import die_with

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

logger = logging.getLogger(__name__)

BACKEND = "slipstream"
"""What `--weight-transfer-config '{"backend": ...}'` calls our receiver."""

GUARDED = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
"""Calls of all workers that may fail and leave the replica in order."""


def register() -> None:
    """Make our weight receiver known, put versions into every chunk, tie a child process to its parent. Safe to call twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "slipstream.weightsync.vllm_receiver", "Receiver")
    _report_versions_in_every_chunk()
    _collect_every_answer()
    _die_with_parent()


def _report_versions_in_every_chunk() -> None:
    from vllm.v1.engine.output_processor import RequestState

    build = getattr(RequestState, "_new_completion_output", None)
    if build is None or not hasattr(RequestState, "_weight_version_spans"):
        logger.warning(
            "this vLLM builds its chunks in another way: a completion that breaks off keeps none of its tokens"
        )
        return
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def with_versions(self: RequestState, *args: Any, **kwargs: Any) -> CompletionOutput:
        output = build(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions


class Failure(NamedTuple):
    """What a worker answers instead of raising."""

    error: str


def guarded(worker: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `method` of a worker; an exception becomes a `Failure`."""
    try:
        return getattr(worker, method)(*args, **kwargs)
    except Exception as error:
        logger.warning("%s: %s", method, error)
        return Failure(str(error))


def _collect_every_answer() -> None:
    """vLLM's executor stops collecting answers at the first worker that raised. The others' stay in their queues, and each is
    then taken for the answer to the call after it: from there on a rank's failure is told one call late (vLLM 0.32)."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call = MultiprocExecutor.collective_rpc
    if hasattr(call, "__wrapped__"):
        return

    @functools.wraps(call)
    def collective_rpc(
        self: MultiprocExecutor,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        if method not in GUARDED or options:
            return call(self, method, timeout, args, kwargs, **options)
        answers = call(self, guarded, timeout, (method, args, kwargs or {}))
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                raise RuntimeError(f"rank {rank}: {answer.error}")
        return answers

    MultiprocExecutor.collective_rpc = collective_rpc  # pyright: ignore[reportAttributeAccessIssue]


def _die_with_parent() -> None:
    """Engine and worker processes survive a server that was SIGKILLed; have them end with it."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)
