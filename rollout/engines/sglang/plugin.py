"""SGLang plugin entry point (group `sglang.srt.plugins`), called in every process of a server. It changes SGLang 0.5.23 through the
hooks that plugins may register: those in `HOOKS`, the first six in the HTTP server's process, the others in the schedulers'.

Invariants:
- Importing this module imports neither torch nor SGLang. A hook that SGLang cannot apply is an error in the server's log; pushes
  are then refused by name, and a broken stream keeps no token.
- Requests other than these commands go through SGLang's own code, unchanged.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable
from multiprocessing.connection import wait
from typing import Any

from ..access import OK, ServerAccess, TokenGuard, own_access, own_description

logger = logging.getLogger(__name__)

NAME = "slipstream"  # the name of the entry point; `SGLANG_PLUGINS` names it, so that a server loads no other
GROUP = "sglang.srt.plugins"  # SGLang's entry point group
COMMAND = "slipstream.command"  # `load_format` of an `/update_weights_from_tensor` that holds a command and no tensors
# `load_format` of an `/update_weights_from_tensor` that loads the staged version; `--custom-weight-loader` allows it.
LOADER = "slipstream.rollout.engines.sglang.receiver.load"
STOP_S = 1.0  # how long the thread that watches the schedulers may outlive a server that shuts down normally
ABORT_S = 0.01  # between two rounds of aborts in a pause; 1 s in SGLang. One decode step answers an abort.


def register() -> None:
    """Register the hooks. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for target, hook in HOOKS.items():
        if all(known is not hook for _, known, _ in HookRegistry._hooks[target]):
            HookRegistry.register(target, hook, HookType.AROUND)


async def _send_command(
    original: Callable[..., Awaitable[tuple[bool, str]]], manager: Any, obj: Any, *rest: Any
) -> tuple[bool, str]:
    """Send a command at once: for an update of weights SGLang first waits for all running requests."""
    if obj.load_format != COMMAND:
        return await original(manager, obj, *rest)
    manager.auto_create_handle_loop()
    results = await manager.update_weights_from_tensor_communicator(obj)
    return all(result.success for result in results), " | ".join(result.message for result in results)


async def _pause(original: Callable[..., Awaitable[None]], manager: Any, obj: Any) -> None:
    """Mode `abort` with a shorter poll interval than SGLang's; then the scheduler pauses, so that its cache can be dropped."""
    if obj.mode != "abort":
        return await original(manager, obj)
    async with manager.is_pause_cond:
        manager.is_pause = True
        while True:  # a request on its way to the scheduler is missed by an abort
            manager.abort_request(abort_all=True)
            if not await manager.model_update_lock.is_locked():
                break
            await asyncio.sleep(ABORT_S)
        await manager._async_dispatch_to_scheduler(type(obj)(mode="retract"))


def _end_of_aborted(original: Callable[[Any, Any], None], manager: Any, request: Any) -> None:
    """Reduce the chunk that SGLang makes here to the finish reason. It repeats the last token, and has a text where others have
    none: merged with a chunk that is not sent yet, on a busy machine, it breaks the stream."""
    state = manager.rid_to_state.get(request.rid)
    before = len(state.out_list) if state is not None else 0
    original(manager, request)
    if state is None or not getattr(state.obj, "stream", False) or not manager.incremental_streaming_output:
        return
    for chunk in state.out_list[before:]:
        chunk.pop("text", None)
        chunk["output_ids"] = []
        for key in ("output_token_logprobs", "output_token_sampling_logprobs"):
            chunk["meta_info"].pop(key, None)


def _watch_schedulers(original: Callable[[Any], None], watchdog: Any) -> None:
    """End with the first process that fails. SGLang notices it after up to 1 s and collects diagnostics for 5 s; clients continue
    elsewhere only after the sockets of this server close. The other processes die with this one."""
    watched = {process.sentinel: process for process in watchdog._processes}
    while watched and not watchdog._stop_event.is_set():
        for sentinel in wait(list(watched), STOP_S):
            process = watched.pop(sentinel)
            process.join(STOP_S)
            if process.exitcode != 0 and not watchdog._stop_event.is_set():
                logger.error(
                    "%s (pid %d) ended with %s: so does this server", process.name, process.pid, process.exitcode
                )
                os._exit(1)


async def _listen(original: Callable[..., Awaitable[None]], server: Any, *args: Any, **kwargs: Any) -> None:
    """End when the port is taken. uvicorn gives up, but SGLang then waits ten minutes for a server to answer there. A scheduler's
    own sockets use free ports, possibly this one before the server listens. A server that `slipstream serve` started answers
    what it was started for."""

    async def end() -> None:
        logger.error("cannot listen at %s:%s; the server ends", server.config.host, server.config.port)
        os._exit(1)

    if own_description():
        server.config.loaded_app = TokenGuard(server.config.loaded_app)
    shutdown, server.lifespan.shutdown = server.lifespan.shutdown, end  # what uvicorn calls when it gives up
    await original(server, *args, **kwargs)
    server.lifespan.shutdown = shutdown


def _update(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Commands and staged weights go to the receiver."""
    if request.load_format not in (COMMAND, LOADER):
        return original(manager, request)
    from . import receiver  # imports torch and SGLang

    return receiver.handle(manager, request, original if request.load_format == LOADER else None)


def _release(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Free what is not freed: SGLang would read freed weights, to keep their buffers."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES  # pyright: ignore[reportMissingImports]
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput  # pyright: ignore[reportMissingImports]

    request.tags = [tag for tag in request.tags or GPU_MEMORY_ALL_TYPES if tag not in manager.offload_tags]
    return original(manager, request) if request.tags else ReleaseMemoryOccupationReqOutput()


def _allocate(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Allocate what is freed: SGLang ends where it is not."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput  # pyright: ignore[reportMissingImports]

    request.tags = [tag for tag in request.tags or sorted(manager.offload_tags) if tag in manager.offload_tags]
    return original(manager, request) if request.tags else ResumeMemoryOccupationReqOutput()


def _report_versions(original: Callable[..., None], stream: Any, *, req: Any) -> None:
    """Add the versions to every chunk; SGLang adds them to a request's last one."""
    before = len(stream.weight_versions)
    original(stream, req=req)
    if len(stream.weight_versions) > before and stream.weight_versions[-1] is None:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans  # pyright: ignore[reportMissingImports]

        stream.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=stream.current_weight_version,
            num_output_tokens=req.send_token_offset,
        )


def _no_eos(original: Callable[[Any], set[int] | None], config: Any) -> set[int]:
    """Only the stop tokens of a request end it."""
    return set()


@functools.cache
def _access() -> ServerAccess:
    return own_access()


def _authorize(original: Callable[..., Any], *, path: str, authorization_header: str | None, **rest: Any) -> Any:
    """Decide by our tokens, for every path: SGLang leaves health and metrics open, and wants a token for control to abort a
    request. Called only where SGLang was given keys."""
    from sglang.srt.utils.auth import AuthDecision  # pyright: ignore[reportMissingImports]

    status = _access().allows(path, (authorization_header or "").encode())
    return AuthDecision(allowed=status == OK, error_status_code=status)


_WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# SGLang function -> the hook around it.
HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.utils.auth.decide_request_auth": _authorize,
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_tensor": _send_command,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation": _pause,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req": _end_of_aborted,
    "sglang.srt.utils.watchdog.SubprocessWatchdog._monitor_loop": _watch_schedulers,
    "uvicorn.server.Server.startup": _listen,
    f"{_WEIGHT_UPDATER}.update_weights_from_tensor": _update,
    f"{_WEIGHT_UPDATER}.release_memory_occupation": _release,
    f"{_WEIGHT_UPDATER}.resume_memory_occupation": _allocate,
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept": _report_versions,
    "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id": _no_eos,
}
