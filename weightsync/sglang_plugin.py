"""SGLang's door to us: the entry point of group `sglang.srt.plugins`, called in every process of a server.

What we add to SGLang 0.5.23, through the hooks that its plugins may register:

    _tell    HTTP server  what a receiver is told reaches it while requests run
    _pause   HTTP server  mode `abort` takes milliseconds, not a second
    _echo    HTTP server  the end of a request that was aborted in the queue repeats no token and fits the chunks before it
    _watch   HTTP server  the server ends at once when its scheduler dies
    _listen  HTTP server  the server ends at once when its port is taken
    _take    scheduler    our commands, and our weights, go to `sglang_receiver`
    _span    scheduler    every chunk of a stream says its tokens' versions, not the last only
    _no_end  scheduler    the tokens that stop are those that a request names, no others

Invariants:
- Importing this module imports neither torch nor SGLang. A hook that SGLang cannot apply is an error in the server's log; pushes
  are then refused by name, and a broken stream keeps no token.
- What no command of ours asks for goes SGLang's own way, through its own code.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from multiprocessing.connection import wait
from typing import Any

logger = logging.getLogger(__name__)

NAME = "slipstream"
"""Our entry point; `SGLANG_PLUGINS` names it, so that a server loads no other."""

GROUP = "sglang.srt.plugins"
"""SGLang's group of entry points."""

COMMAND = "slipstream.command"
"""`load_format` of an `/update_weights_from_tensor` that carries a command, and no tensors."""

LOADER = "slipstream.weightsync.sglang_receiver.load"
"""`load_format` of an `/update_weights_from_tensor` that loads what is staged; `--custom-weight-loader` allows it."""

STOP_S = 1.0
"""How long the watch over the schedulers may outlive a server that ends in good order."""

ABORT_S = 0.01
"""Between two rounds of aborts in a pause; SGLang's own is a second. One decode step answers an abort."""


def register() -> None:
    """Register our hooks. Safe to call twice."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for target, hook in HOOKS.items():
        if all(known is not hook for _, known, _ in HookRegistry._hooks[target]):
            HookRegistry.register(target, hook, HookType.AROUND)


async def _tell(
    original: Callable[..., Awaitable[tuple[bool, str]]], manager: Any, obj: Any, *rest: Any
) -> tuple[bool, str]:
    """Commands go straight to the schedulers: SGLang would first wait for all running requests, as for an update of weights."""
    if obj.load_format != COMMAND:
        return await original(manager, obj, *rest)
    manager.auto_create_handle_loop()
    results = await manager.update_weights_from_tensor_communicator(obj)
    return all(result.success for result in results), " | ".join(result.message for result in results)


async def _pause(original: Callable[..., Awaitable[None]], manager: Any, obj: Any) -> None:
    """Mode `abort`, as SGLang's own but for how often it looks; and then the scheduler rests, so that its cache can be dropped."""
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


def _echo(original: Callable[[Any, Any], None], manager: Any, request: Any) -> None:
    """The chunk that SGLang makes here repeats the last token, and has a text where others have none: put together with a chunk
    that is not sent yet, on a busy machine, it breaks the stream. What it tells is that and how the request ended."""
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


def _watch(original: Callable[[Any], None], watchdog: Any) -> None:
    """End with the first process that fails. SGLang would see it within a second, and then look for clues for five; whoever waits
    for a token can go on elsewhere only when our sockets close. The other processes die with this one."""
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
    """uvicorn gives up on a port that is taken, but SGLang then waits ten minutes for a server to answer there. A scheduler's
    own sockets take ports that are free, and may take this one before we listen."""

    async def end() -> None:
        logger.error("cannot listen at %s:%s; the server ends", server.config.host, server.config.port)
        os._exit(1)

    shutdown, server.lifespan.shutdown = server.lifespan.shutdown, end  # what uvicorn calls when it gives up
    await original(server, *args, **kwargs)
    server.lifespan.shutdown = shutdown


def _take(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    if request.load_format not in (COMMAND, LOADER):
        return original(manager, request)
    from . import sglang_receiver  # here, where there is torch and SGLang

    return sglang_receiver.take(original, manager, request)


def _span(original: Callable[..., None], stream: Any, *, req: Any) -> None:
    """SGLang says the versions with a request's last chunk; say them with each."""
    before = len(stream.weight_versions)
    original(stream, req=req)
    if len(stream.weight_versions) > before and stream.weight_versions[-1] is None:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans  # pyright: ignore[reportMissingImports]

        stream.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=stream.current_weight_version,
            num_output_tokens=req.send_token_offset,
        )


def _no_end(original: Callable[[Any], set[int] | None], config: Any) -> set[int]:
    return set()


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_tensor": _tell,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation": _pause,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req": _echo,
    "sglang.srt.utils.watchdog.SubprocessWatchdog._monitor_loop": _watch,
    "uvicorn.server.Server.startup": _listen,
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor": _take,
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept": _span,
    "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id": _no_end,
}
"""What we wrap, and with what."""
