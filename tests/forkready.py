"""What a fork server does once, so that none of the processes that are forked from it does it: it imports, computes what libraries
keep, and lays its memory out so that a fork is short.

Invariants:
- No thread, and no computation of torch: see `forkserver.py`.
- At its end a forked process runs the handlers that it registered itself, and of the image those that concern it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import sys
import weakref
from pathlib import Path

from slipstream.tests.forkimages import IMAGES

HUGE = 2 << 20
"""Bytes of a huge page."""

MADV_COLLAPSE = 25


def load(image: str) -> None:
    """Import the modules of `image`, and be ready to fork."""
    for name in IMAGES[image]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if image != "sglang":
        _fill_caches()
    if image == "vllm":
        _prepare_vllm()
    _shorten_exit()
    gc.collect()
    gc.freeze()
    _use_huge_pages()


def _fill_caches() -> None:
    """What the schema of configs allows, how transformers renames weights, and which renderers there are."""
    importlib.import_module("slipstream.configs").load("quickstart")
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
    importlib.import_module("renderers.base")._populate_registry()


def _prepare_vllm() -> None:
    """A server of vLLM sets the level of each of its loggers, unless that was done before. Its engine replaces Triton kernels, and
    looks for them at each name of each module, which are many here."""
    logging = importlib.import_module("vllm.config.logging").LoggingConfig()
    importlib.import_module("vllm.logger").configure_logging(logging)
    platform = importlib.import_module("vllm.platforms").current_platform
    platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def _shorten_exit() -> None:
    """At its end torch removes its operators one by one, Ray imports its graphs, and wandb deletes its folders, which are those of
    all forked processes."""
    for one in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        one.atexit = False
    if artifact := sys.modules.get("wandb.sdk.artifacts.artifact"):
        atexit.unregister(artifact.Artifact._TMP_DIR.cleanup)
    if media := sys.modules.get("wandb.sdk.data_types._private"):
        atexit.unregister(media.MEDIA_TMP.cleanup)
    if ray := sys.modules.get("ray._private.worker"):
        atexit.unregister(ray.shutdown)
        atexit.register(lambda: ray.is_initialized() and ray.shutdown(True))


def _use_huge_pages() -> None:
    """A fork copies the table of all pages, which huge ones make 500 times shorter: it takes 4 ms instead of 30, and the end of a
    process as much less. A kernel that cannot (before Linux 6.1) leaves them as they are."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split()
        begin, end = (int(one, 16) for one in span.split("-"))
        if mode == "rw-p" and inode == "0":
            for start in range(-(-begin // HUGE) * HUGE, end - HUGE + 1, HUGE):
                libc.madvise(start, HUGE, MADV_COLLAPSE)
