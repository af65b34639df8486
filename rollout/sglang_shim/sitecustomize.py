"""Lets SGLang's server run without a GPU, unpatched. Python imports this at the start of each process whose PYTHONPATH names this
folder; `rollout/sglang_server.py` does so on CPU only.

SGLang imports two packages that exist for GPUs alone. `sgl_kernel`, its compiled kernels, is stood in for by the package of that
name beside this file. `torchvision` comes from PyPI as a CUDA build, whose library does not load beside the CPU build of torch; its
Python part then fails on operators that the library would have declared. So they are declared here just before it is imported.

Invariants:
- Nothing of ours is imported, and nothing at all before SGLang itself asks for it: this runs in every Python process below.
- Nothing computes in our stead: what is declared here has no implementation, and fails when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS = ("nms", "qnms")
"""What torchvision registers shape functions for without asking whether its library was loaded."""


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing itself; declares the operators on the first import of torchvision."""

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
