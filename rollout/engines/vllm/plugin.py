"""vLLM plugin entry point (group `vllm.general_plugins`), called in every process of a server.

Invariants:
- Importing this module imports neither torch nor vLLM; `register` names a class that vLLM imports on first use.
- An engine process never outlives the server that started it.
- Every chunk of a stream names the versions of all tokens so far. vLLM itself does so in the last one only, which a server that
  dies never sends.
- A worker keeps the pixels of a request as long as the request, so that a push can have the request's images read again.
- A weight push that fails on several workers of a replica is reported once, as the failure of that call.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any, NamedTuple

from ....common.process import set_parent_death_signal

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

logger = logging.getLogger(__name__)

SEEING = "Qwen3VLForConditionalGeneration"  # the architecture, as configs name it, that `images` serves
BACKEND = "slipstream"  # the name of the receiver in `--weight-transfer-config '{"backend": ...}'`
# Calls of all workers whose failure leaves the replica working.
GUARDED = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def register() -> None:
    """Register the weight receiver and the model that sees images, put versions into every chunk, keep pixels, end child
    processes with their parent. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models.registry import ModelRegistry

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "slipstream.rollout.engines.vllm.receiver", "VllmReceiver")
    ModelRegistry.register_model(SEEING, "slipstream.rollout.engines.vllm.images:SeeingQwen3VL")
    _report_versions_in_every_chunk()
    _collect_all_answers()
    _keep_pixels()
    _end_with_parent()


def _report_versions_in_every_chunk() -> None:
    from vllm.v1.engine.output_processor import RequestState

    build = getattr(RequestState, "_new_completion_output", None)
    if build is None or not hasattr(RequestState, "_weight_version_spans"):
        logger.warning("this vLLM builds its chunks in another way: an interrupted completion keeps none of its tokens")
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


class WorkerFailure(NamedTuple):
    """A worker's answer in place of an exception."""

    error: str


def guarded(worker: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `method` of a worker; an exception becomes a `WorkerFailure`."""
    try:
        return getattr(worker, method)(*args, **kwargs)
    except Exception as error:
        logger.warning("%s: %s", method, error)
        return WorkerFailure(str(error))


def _collect_all_answers() -> None:
    """Collect the answers of all workers. vLLM's executor (0.32) stops at the first that raised; the other answers stay in their
    queues and are taken for those to the next call, so every later failure is reported one call late."""
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
            if isinstance(answer, WorkerFailure):
                raise RuntimeError(f"rank {rank}: {answer.error}")
        return answers

    MultiprocExecutor.collective_rpc = collective_rpc  # pyright: ignore[reportAttributeAccessIssue]


def _keep_pixels() -> None:
    """Send the workers the pixels of every image. vLLM (0.32) leaves out those whose tokens its prefix cache has. A push clears
    that cache under requests that run, whose images are then to be read again, and the engine process ends for want of them."""
    from vllm.v1.core.sched import output

    if not hasattr(output, "strip_covered_mm_data"):
        return

    def keep(features: list[Any], *_: object, **__: object) -> list[Any]:
        return features

    output.strip_covered_mm_data = keep  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]


def _end_with_parent() -> None:
    """Have engine and worker processes end with a server that is SIGKILLed; by default they survive it."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        set_parent_death_signal(parent.pid)
