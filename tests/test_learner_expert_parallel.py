"""Experts that ranks divide: what two and four ranks make of a mixture is what one process makes of it, however rows are routed.

The ranks run this file as a script, see tests/ranks.py.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from slipstream.configs.backends import Fsdp2
from slipstream.errors import ConfigError
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.fsdp2.parallelism import MIXTURES, check_experts
from slipstream.tests import test_learner_families as families
from slipstream.tests.equality import (
    LOSS,
    OPTIMIZER,
    VOCABULARY,
    assert_bfloat16_noise,
    assert_three_steps,
    make_model,
    make_rows,
    plain_loop,
)
from slipstream.tests.ranks import Job, jobs_of, open_backend, run_in_turn, run_on_one_rank, run_on_ranks
from slipstream.tests.test_learner_families import EXPERTS, SIZES, TRAINED
from slipstream.tests.test_learner_families import write as write_family
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

ONE = Fsdp2(device="cpu")
DIVIDED = Fsdp2(device="cpu", parallel={"expert": 2})
BUDGET = 34
FAMILIES: dict[str, dict[str, Any]] = families.MIXTURES | {
    "minimax_m2": EXPERTS,
    "gpt_oss": TRAINED["gpt_oss"],
}
SIX = EXPERTS | {"num_experts": 6, "num_local_experts": 6, "initializer_range": 0.08}
"""Three experts for each of two ranks, which two more ranks cannot share evenly."""


def write(folder: Path, family: str, sizes: dict[str, Any]) -> str:
    return write_family(folder, family, sizes | {"vocab_size": VOCABULARY})


def write_idle(folder: Path) -> str:
    """A mixture that sends every token to experts 0 and 1: the others, and who has them, get none."""
    path = write(folder, "gpt_oss", TRAINED["gpt_oss"] | {"initializer_range": 0.08})
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.copy_(torch.tensor([30.0, 29.5, -30.0, -30.0]))
    model.save_pretrained(path)
    return path


# --- what ranks run


def main(jobs: list[Job], folder: Path) -> None:
    # Dynamo is real; what it makes is run as it is, because a compiler would take a minute.
    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]
    backend = run_in_turn(jobs)
    check_share(backend)
    backend.export(folder)
    result = backend.step(make_rows(3, backend.data_rank, backend.data_size, BUDGET), LOSS, OPTIMIZER.lr)
    if backend.rank == 0:
        (folder / "fourth.json").write_bytes(msgspec.json.encode(result))
    backend.close()


def check_share(backend: Fsdp2Backend) -> None:
    """At rest a rank has its share of the experts and of their moments; to compute it gathers its part of them and no more."""
    divided, size = backend._experts, backend.world_size
    assert divided is not None
    experts = backend._model.config.num_experts
    found = 0
    for name, parameter in backend._model.named_parameters():
        if name not in divided.names:
            continue
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.size() == size // divided.group.size
        assert len(parameter) == experts // divided.group.size
        local = parameter.to_local()
        assert len(local) <= -(-experts // size) + 1
        for moment in ("exp_avg", "exp_avg_sq"):
            assert backend._optimizer.state[parameter][moment].to_local().shape == local.shape
        held = torch.tensor(len(local))
        dist.all_reduce(held)
        assert int(held) == experts
        found += 1
    layers: Any = backend._model.get_submodule("model.layers")
    assert found == 2 * len(layers)
    one = layers[0].mlp.experts
    one.unshard()
    assert len(one.down_proj) == one.num_experts == experts // divided.group.size
    one.reshard()


# --- what comes of it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By the second word of a job's name; others are of `whole`."""
    root = tmp_path_factory.mktemp("models")
    return {
        "whole": make_model(root / "whole", tied=False, moe=True),
        "six": write(root / "six", "qwen3_moe", SIX),
        "idle": write_idle(root / "idle"),
        **{family: write(root / family, family, sizes) for family, sizes in FAMILIES.items()},
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "whole": plain_loop(models["whole"]),
        "six": plain_loop(models["six"]),
        "idle": plain_loop(models["idle"], attention="eager"),
        "lora": plain_loop(models["whole"], lora_rank=4),
        "bf16": plain_loop(models["whole"], dtype=torch.bfloat16),
    }


@pytest.fixture(scope="module")
def results(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs every job; what it made lies in the folder by its name."""
    root = tmp_path_factory.mktemp("results")

    def job(name: str, config: Fsdp2 = DIVIDED, **options: Any) -> Job:
        paths = {key: str(root / value) for key, value in options.items() if key in ("save", "load")}
        model = models.get(name.split()[1], models["whole"])
        return Job(model, BUDGET, str(root / name), config, **(options | paths))

    both = {"context": 2, "expert": 2}
    run_on_one_rank(
        [
            job("1 whole", ONE, save="of 1"),
            job("1 lora", msgspec.structs.replace(ONE, lora_rank=4)),
            *(job(f"1 {family}", ONE) for family in FAMILIES),
        ]
    )
    two = [
        *(job(f"2 {family}") for family in FAMILIES),
        job("2 untouched", last=0),
        job("2 idle"),
        job("2 lora", msgspec.structs.replace(DIVIDED, lora_rank=4)),
        job("2 bf16", dtype="bfloat16"),
        job("2 whole shared and recomputed", Fsdp2(device="cpu", parallel=both, options=("recompute",))),
        job("2 whole compiled", Fsdp2(device="cpu", parallel={"expert": 2}, options=("compile",))),
        job("2 whole from 1", first=2, load="of 1"),
        job("2 whole", save="of 2"),
    ]
    run_on_ranks(2, root, __file__, two, str(root / "export of 2"))
    four = [
        job("4 whole by four", Fsdp2(device="cpu", parallel={"expert": 4})),
        job("4 whole shared, by four", Fsdp2(device="cpu", parallel={"context": 2, "expert": 4})),
        job("4 whole from 2", first=2, load="of 2"),
        job("4 six", save="of 4"),
    ]
    run_on_ranks(4, root, __file__, four, str(root / "export of 4"))
    run_on_one_rank([job("1 whole from 2", ONE, first=2, load="of 2"), job("1 six from 4", ONE, first=2, load="of 4")])
    return root


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "2 whole",
        "2 whole shared and recomputed",
        "2 whole compiled",
        "2 whole from 1",
        "2 idle",
        "1 lora",
        "2 lora",
        "4 six",
        "4 whole by four",
        "4 whole shared, by four",
        "4 whole from 2",
        "1 whole from 2",
        "1 six from 4",
    ],
)
def test_three_steps_equal_a_plain_loop(results: Path, expected: dict[str, Any], name: str) -> None:
    """Weights, losses and gradient norms. `from`: two steps there, a checkpoint, and the third step here."""
    atol = 1e-5 if "idle" in name else 1e-6  # of gpt-oss one gradient is hardly more than rounding
    first = 2 if "from" in name else 0
    assert_three_steps(load_file(results / name), expected[name.split()[1]], first=first, atol=atol)


@pytest.mark.full
def test_bfloat16_is_as_near_to_float32_as_a_plain_bfloat16_loop(
    results: Path, expected: dict[str, Any], models: dict[str, str]
) -> None:
    assert_bfloat16_noise(load_file(results / "2 bf16"), expected["whole"], expected["bf16"], models["whole"])


@pytest.mark.full
@pytest.mark.parametrize("family", MIXTURES)
def test_a_family_is_the_same_with_its_experts_divided(results: Path, family: str) -> None:
    found, reference = (load_file(results / f"{ranks} {family}") for ranks in (2, 1))
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_pushes_and_exports_are_bit_by_bit_what_was_read_and_what_is_trained(
    results: Path, models: dict[str, str]
) -> None:
    for pushed, folder in (
        ("2 untouched", Path(models["whole"])),
        ("2 whole", results / "export of 2"),
        ("4 six", results / "export of 4"),
    ):
        stored, weights = load_file(folder / "model.safetensors"), load_file(results / pushed)
        assert weights.keys() - {"numbers"} == stored.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "model"), [(2, "whole"), (4, "six")])
def test_a_further_step_reports_the_same_metrics(results: Path, models: dict[str, str], ranks: int, model: str) -> None:
    found = json.loads((results / f"export of {ranks}" / "fourth.json").read_bytes())
    backend = open_backend(models[model])
    for step in range(4):
        one = backend.step(make_rows(step, 0, 1, BUDGET), LOSS, OPTIMIZER.lr)
    backend.close()
    assert found.pop("disagreement") is None
    assert found.pop("means") == pytest.approx(one.means, rel=1e-4, abs=1e-6)
    assert found == pytest.approx({"loss": one.loss, "grad_norm": one.grad_norm, "tokens": one.tokens}, rel=1e-4)


def test_models_whose_experts_cannot_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    assert sorted(FAMILIES) == sorted(MIXTURES)
    for family, sizes in FAMILIES.items():
        config = CONFIG_MAPPING[family](**SIZES | sizes)
        check_experts(config, 4)
        with pytest.raises(ConfigError, match=r"parallel\.expert=3 does not divide the model's 4 experts; allowed are"):
            check_experts(config, 3)
    dense = make_model(tmp_path / "dense", tied=True)
    with pytest.raises(
        ConfigError, match=r"parallel\.expert=2: .*dense' is a model of family qwen3; allowed are .*gpt_oss"
    ) as why:
        open_backend(dense, config=DIVIDED)
    assert "\n" not in str(why.value)
    open_backend(dense).close()  # nothing of the other is left


if __name__ == "__main__":
    main(jobs_of(sys.argv[1]), Path(sys.argv[2]))
