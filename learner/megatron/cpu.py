"""Megatron-core on a machine without CUDA: its modules are compiled from their own source, with the CPU in the few dozen lines that
take CUDA for the device. These are those of one version: `fit.check_installed` refuses others. With CUDA nothing is changed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

import torch

from ...errors import LearnerError

PACKAGE = "megatron.core"

SUBSTITUTIONS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"torch\.cuda\.current_device\(\)", "torch.get_default_device()"),  # no quotes: some stand in f-strings
        (r"""device=(['"])cuda\1""", 'device="cpu"'),
        (r"""device_type=(['"])cuda\1""", 'device_type="cpu"'),
        (r"""torch\.autocast\((['"])cuda\1""", 'torch.autocast("cpu"'),
        (r"""(['"])torch\.cuda\.(Float|Half|BFloat16)Tensor\1""", r"'torch.\2Tensor'"),  # compared with `tensor.type()`
        (r"torch\.cuda\.synchronize\(\)", "None"),
        (r"""\.cuda\((torch\.get_default_device\(\)|non_blocking=True)?\)""", ""),
        (r"torch\.cuda\.get_rng_state\(\)", "torch.get_rng_state()"),
        (r"torch\.cuda\.manual_seed\(", "torch.manual_seed("),
        (r", pin_memory=True", ""),
        (r"torch\.cuda\.Stream\(\)", "None"),
        # Gradients and moments: memory that the kernel gives when the first step writes to it.
        (r"self\.(grad_data|param_data) = torch\.zeros\(", r"self.\1 = _zeros("),
        (r"= torch\.zeros_like\(p\.data\)", "= _zeros(p.data.shape, p.data.dtype)"),
    )
)

ZEROS = """
def _zeros(shape, dtype, device=None, requires_grad=False):
    import math, mmap
    size = math.prod((shape,) if isinstance(shape, int) else shape) * dtype.itemsize
    if size < 1 << 20:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
"""
"""Pages of the kernel are zero; torch, and numpy in memory that was used before, would write zeros to them."""

ADDITIONS = {
    f"{PACKAGE}.distributed.param_and_grad_buffer": ZEROS,
    f"{PACKAGE}.optimizer": ZEROS,
    # One generator serves every device here.
    f"{PACKAGE}.tensor_parallel.random": """
def _get_cuda_rng_state(device="cpu", clone=False, graph_safe=False):
    return torch.get_rng_state()
def _set_cuda_rng_state(new_state, device=-1, graph_safe=False):
    torch.set_rng_state(new_state)
""",
    # Splits are on the host already; the collective only needs them as numpy.
    f"{PACKAGE}.transformer.moe.token_dispatcher": """
def _on_host(self, point, tokens_per_expert=None):
    if not self.drop_and_pad and point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(self, name)
            if torch.is_tensor(value):
                setattr(self, name, value.numpy())
    return tokens_per_expert
MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _on_host
""",
    # Without TransformerEngine this name is read and never bound.
    f"{PACKAGE}.transformer.moe.moe_utils": """
te_general_gemm = globals().get("te_general_gemm")
""",
    # Without TransformerEngine its layers can be imported all the same, as mocks.
    f"{PACKAGE}.transformer.multi_latent_attention": """
HAVE_TE = HAVE_TE and isinstance(TELinear, type)
""",
    # torch's AdamW keeps a step count that is not saved with the moments; and main weights may be views of leaves.
    f"{PACKAGE}.optimizer.distrib_optimizer": """
_set_held = DistributedOptimizer._set_main_param_and_optimizer_states
@torch.no_grad()
def _set_states(self, model_param, tensors):
    if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return _set_held(self, model_param, tensors)
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    for name, target in {"param": main, **self.optimizer.state[main]}.items():
        if name in tensors:
            target.copy_(tensors[name])
DistributedOptimizer._set_main_param_and_optimizer_states = _set_states
""",
}


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        for pattern, text in SUBSTITUTIONS:
            source = pattern.sub(text, source)
        return compile(source + ADDITIONS.get(fullname, ""), self.get_filename(fullname), "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Let `megatron.core` be imported without CUDA. Raises LearnerError where it was imported before, and therefore for CUDA."""
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        raise LearnerError(f"{PACKAGE} was imported before slipstream.learner.megatron; import it after")
    sys.meta_path.insert(0, _Finder())
