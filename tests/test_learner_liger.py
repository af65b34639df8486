"""Liger's kernels, as far as they can be seen without CUDA: when they are refused, and which are asked for.

What is asked is a package of the same name that writes down its calls; the kernels themselves run on CUDA alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from slipstream.configs import Config, check, load
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner
from slipstream.errors import ConfigError
from slipstream.launch import preflight
from slipstream.launch.run_inputs import RunInputs
from slipstream.learner.fsdp2 import liger
from slipstream.tests.ranks import open_backend
from slipstream.tests.runs import tiny_policy
from transformers import Gemma2Config, Qwen3Config

CUDA = torch.device("cuda")
PACKAGE = """
import json, pathlib
def __getattr__(name):
    if not name.startswith("apply_"):
        raise AttributeError(name)
    def note(*, rope, rms_norm, swiglu, cross_entropy=False, fused_linear_cross_entropy=True, model=None):
        asked = dict(rope=rope, rms_norm=rms_norm, swiglu=swiglu, losses=cross_entropy or fused_linear_cross_entropy)
        pathlib.Path(__file__).with_name(name).write_text(json.dumps(asked))
    return note
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `liger_kernel` in a folder that is looked at first."""
    inside = tmp_path / "site" / "liger_kernel" / "transformers"
    inside.mkdir(parents=True)
    (inside.parent / "__init__.py").touch()
    (inside / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return inside


@pytest.mark.parametrize("family", liger.FAMILIES)
def test_norms_rotations_and_gates_are_replaced_and_losses_are_not(package: Path, family: str) -> None:
    liger.check(CUDA, Qwen3Config(name_or_path="here"))
    liger.apply(family)
    asked = json.loads((package / f"apply_liger_kernel_to_{family}").read_text())
    assert asked == {"rope": True, "rms_norm": True, "swiglu": True, "losses": False}


def test_a_family_without_kernels_is_refused(package: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"options=\[liger\]: 'here' is a model of family gemma2; allowed are llama, .*qwen3_moe"
    ):
        liger.check(CUDA, Gemma2Config(name_or_path="here"))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    with pytest.raises(
        ConfigError, match=r"backend\.options=\[liger\] needs the package liger-kernel; `pip install liger-kernel`"
    ):
        liger.check(CUDA, Qwen3Config())


def test_on_a_cpu_it_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"backend\.options=\[liger\] is for GPUs; .*device=cpu allows recompute and compile",
    ):
        check(Config(learner=Learner(backend=Fsdp2(device="cpu", options=("liger",)))))
    path = str(tiny_policy(tmp_path / "policy"))
    config = load(
        "quickstart", [f"model.path={path}", "learner.backend.device=auto", "learner.backend.options=[liger]"]
    )
    if not torch.cuda.is_available():
        for start in (
            lambda: preflight.learner(RunInputs(config)),
            lambda: open_backend(path, config=Fsdp2(options=("liger",))),
        ):
            with pytest.raises(ConfigError, match="this learner runs on the CPU; leave it out"):
                start()
