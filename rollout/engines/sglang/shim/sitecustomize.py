"""Lets SGLang's server run without a GPU, unpatched. Python imports this at the start of each process whose PYTHONPATH names this
folder; `sglang/launch.py` sets that on CPU only. SGLang's compiled kernels, `sgl_kernel`, are replaced by the package of that name
here. `torchvision` from PyPI is a CUDA build, whose library does not load with the CPU build of torch; its Python part then fails
on operators that the library would have declared. They are declared here just before its import.

Invariants:
- No module of slipstream is imported, and no other before SGLang imports it: this runs in every Python process of the server.
- The declared operators have no implementation, and fail when they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS = ("nms", "qnms")  # torchvision registers their shape functions even without its library


class _BeforeTorchvision(MetaPathFinder):
    """Finds no module; declares the operators on the first import of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name in OPERATORS:
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
