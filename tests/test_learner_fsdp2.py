"""The FSDP2 backend against a plain transformers loop: weights after three steps, on one rank and on two, however packed.

Two ranks run this file as a script, see tests/ranks.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from slipstream.configs.sft import Sft
from slipstream.errors import ConfigError, LearnerError
from slipstream.learner.checkpoint_folder import CheckpointState, checkpoints, path_of, prune, read_state
from slipstream.learner.packing import scoring_microbatch
from slipstream.learner.sft import HeldOut, SftProgress, negative_log_likelihood, run_sft
from slipstream.tests.equality import (
    LOSS,
    TEMPERATURE,
    assert_refused,
    assert_three_steps,
    make_batch,
    make_model,
    make_rows,
    plain_loop,
)
from slipstream.tests.ranks import (
    DEADLINE_S,
    Job,
    jobs_of,
    open_backend,
    run_in_turn,
    run_on_one_rank,
    run_on_two_ranks,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)


def poisoned(logprobs, entropy, row):
    """A loss that is NaN on rank 0 only."""
    output = negative_log_likelihood(logprobs, entropy, row)
    factor = float("nan") if os.environ.get("RANK", "0") == "0" else 1.0
    return msgspec.structs.replace(output, loss_sum=output.loss_sum * factor)


# ---------------------------------------------------------------- two ranks


def rank_main(jobs: list[Job], export: str) -> None:
    """What each of the two ranks runs."""
    backend = run_in_turn(jobs)
    backend.export(Path(export))
    first = backend.rank == 0
    # Only rank 1 has rows, and as many log-probs come back as rows went in.
    rows = [] if first else [scoring_microbatch([[1, 2, 3]]), scoring_microbatch([[4, 5]])]
    assert [len(values) for values in backend.logprobs(rows)] == ([] if first else [3, 2])
    assert backend.step(rows, negative_log_likelihood, 0.0).tokens == 3
    assert backend.maximum(2.5 + backend.rank) == 3.5
    own = torch.full((2 * backend.rank, 3), 1.0 + backend.rank, dtype=torch.float64)
    assert backend.gather(own).tolist() == [[2.0] * 3] * 2
    assert_refused(backend, poisoned, rows, "not finite")
    if first:
        with pytest.raises(LearnerError, match="lost the others while stepping") as error:
            backend.step([scoring_microbatch([[1, 2, 3]])], negative_log_likelihood, 0.0)
        assert not error.value.final  # they may come back
    backend.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[bool, str]:
    root = tmp_path_factory.mktemp("models")
    return {tied: make_model(root / f"tied-{tied}", tied=tied) for tied in (True, False)}


@pytest.fixture(scope="module")
def expected(models) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "tied": plain_loop(models[True]),
        "untied": plain_loop(models[False]),
        "sequences": plain_loop(models[True], sequence_mean=True),
    }


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> Path:
    """Runs every job on one rank here and on two ranks there; weights lie in the folder by name."""
    root = tmp_path_factory.mktemp("results")
    one = [
        Job(models[True], 8192, str(root / "1-packed"), save=str(root / "from-1")),
        Job(models[True], 34, str(root / "1-micro")),
        Job(models[False], 8192, str(root / "1-untied")),
        Job(models[True], 34, str(root / "1-sequences"), sequence_mean=True),
    ]
    run_on_one_rank(one)
    two = [
        Job(models[True], 8192, str(root / "2-packed"), save=str(root / "from-2")),
        Job(models[True], 34, str(root / "2-micro")),
        Job(models[True], 8192, str(root / "2-resumed"), first=2, load=str(root / "from-1")),
        Job(models[True], 34, str(root / "2-sequences"), sequence_mean=True),
        Job(models[False], 20, str(root / "2-untied")),
    ]
    run_on_two_ranks(root, __file__, two, str(root / "export-2"))
    run_on_one_rank([Job(models[True], 8192, str(root / "1-resumed"), first=2, load=str(root / "from-2"))])
    return root


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["packed", "micro", "resumed", "sequences", "untied"])
def test_three_steps_equal_a_plain_loop(results, expected, ranks, layout):
    """`resumed`: two steps on the other number of ranks, a checkpoint, and the third step here."""
    weights = load_file(results / f"{ranks}-{layout}")
    reference = expected[layout if layout in expected else "tied"]
    assert ("lm_head.weight" in weights) == (layout == "untied")
    # Scaled tokens leave smaller gradients, of whose rounding AdamW makes a larger part of a step (see OPTIMIZER).
    atol = 1e-5 if layout == "sequences" else 1e-6
    assert_three_steps(weights, reference, first=2 if layout == "resumed" else 0, atol=atol)


def test_two_ranks_export_what_transformers_loads(results, expected):
    model = AutoModelForCausalLM.from_pretrained(results / "export-2", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected["untied"][name], atol=1e-6, rtol=0)


# ---------------------------------------------------------------- one rank


@pytest.fixture
def backend(models):
    backend = open_backend(models[True])
    yield backend
    backend.close()


def test_log_probs_equal_transformers_one_sequence_at_a_time(backend, models):
    model = AutoModelForCausalLM.from_pretrained(models[True], dtype=torch.float32).eval()
    sequences = [s.token_ids.tolist() for s in make_batch(0)[0]]
    row = scoring_microbatch(sequences)
    (logprobs,), (plain,) = backend.logprobs([row]), backend.logprobs([row], temperature=1.0)
    for start, end, ids in zip(row.cu_seqlens, row.cu_seqlens[1:], sequences, strict=False):
        with torch.no_grad():
            logp = (model(torch.tensor([ids]), use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        assert logprobs[start] == 0
        torch.testing.assert_close(logprobs[start + 1 : end], logp[range(len(ids) - 1), ids[1:]], atol=5e-6, rtol=0)
        hot = (TEMPERATURE * logp).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(plain[start + 1 : end], hot, atol=5e-6, rtol=0)
    trained = make_rows(0, 0, 1, 8192)[0]
    assert torch.equal(backend.logprobs([trained])[0] != 0, trained.loss_mask)


def test_no_row_is_no_pass(backend):
    """As where a batch compares enough tokens of its own."""
    passes = []
    hook = backend._model.register_forward_pre_hook(lambda *_: passes.append(1))
    assert backend.logprobs([]) == []
    assert not passes
    backend.logprobs([scoring_microbatch([[1, 2]])])
    assert passes
    hook.remove()


def test_named_weights_are_the_state_dict_and_the_callers_own(backend, models):
    state = AutoModelForCausalLM.from_pretrained(models[True], dtype=torch.float32).state_dict()
    weights = dict(backend.named_weights())
    assert weights.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    weights["model.norm.weight"].zero_()
    assert dict(backend.named_weights())["model.norm.weight"].any()
    assert list(weights) == [name for name, _ in backend.named_weights()]


def test_experts_travel_under_the_names_of_their_checkpoint(tmp_path):
    backend = open_backend(make_model(tmp_path / "moe", tied=True, moe=True))
    source = load_file(tmp_path / "moe" / "model.safetensors")
    weights = dict(backend.named_weights())
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in weights
    assert weights.keys() == source.keys()
    assert all(torch.equal(weights[name], source[name]) for name in source)
    assert backend.step(make_rows(0, 0, 1, 8192), LOSS, 1e-3).grad_norm > 0
    row = make_rows(1, 0, 1, 8192)[0]
    (before,) = backend.logprobs([row])
    backend.export(tmp_path / "exported")
    backend.close()
    again = open_backend(str(tmp_path / "exported"))
    torch.testing.assert_close(again.logprobs([row])[0], before)
    again.close()


def test_bad_batches_leave_the_weights_unchanged(backend):
    rows = make_rows(0, 0, 1, 8192)
    assert_refused(backend, poisoned, rows, "not finite")
    forgotten = [msgspec.structs.replace(r, proximal_logprobs=torch.full_like(r.advantages, torch.nan)) for r in rows]
    assert_refused(backend, LOSS, forgotten, "not finite")
    assert_refused(backend, LOSS, [], "no trained token")
    first = [msgspec.structs.replace(r, loss_mask=torch.ones_like(r.loss_mask)) for r in rows]
    assert_refused(backend, LOSS, first, "first token")


def test_an_export_loads_in_transformers_with_the_same_logits(models, tmp_path):
    backend = open_backend(models[True], "bfloat16")
    backend.step(make_rows(0, 0, 1, 8192), LOSS, 1e-2)
    row = scoring_microbatch([s.token_ids.tolist() for s in make_batch(0)[0]])
    (logprobs,) = backend.logprobs([row])
    dtypes = {tensor.dtype for _, tensor in backend.named_weights()}
    backend.export(tmp_path / "exported")
    backend.close()
    assert dtypes == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").encode("w3 w5") == [3, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]
    again = open_backend(str(tmp_path / "exported"), "bfloat16")
    assert torch.equal(again.logprobs([row])[0], logprobs)
    again.close()


def test_checkpoints_are_whole_replaced_counted_and_pruned(backend, tmp_path):
    for step in (1, 2, 3, 3):
        backend.save(path_of(tmp_path, step), CheckpointState(step=step, version=step + 4)).result(DEADLINE_S)
    (tmp_path / ".step-00000004.partial").mkdir()
    (tmp_path / "step-00000005").mkdir()
    assert checkpoints(tmp_path)[-1] == path_of(tmp_path, 3)
    assert read_state(path_of(tmp_path, 2)) == CheckpointState(step=2, version=6)
    assert backend.load(path_of(tmp_path, 3)) == CheckpointState(step=3, version=7)
    prune(tmp_path, keep=2)
    assert checkpoints(tmp_path) == [path_of(tmp_path, 2), path_of(tmp_path, 3)]
    assert not list(tmp_path.glob(".*"))
    assert checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("together", [False, True])
def test_no_stale_weights_after_any_order_of_calls(models, tmp_path, together):
    """FSDP keeps units gathered after a forward pass without a backward one; the next forward pass must not see them old."""
    backend, row = open_backend(models[True], together=together), make_rows(0, 0, 1, 8192)[0]
    backend.save(tmp_path / "start", CheckpointState(step=0, version=0)).result(DEADLINE_S)
    (first,) = backend.logprobs([row])
    backend.step([row], LOSS, 1e-2)
    (second,) = backend.logprobs([row])
    backend.save(tmp_path / "later", CheckpointState(step=1, version=1)).result(DEADLINE_S)
    backend.load(tmp_path / "start")
    assert torch.equal(backend.logprobs([row])[0], first)
    backend.load(tmp_path / "later")
    assert torch.equal(backend.logprobs([row])[0], second)
    assert not torch.equal(first, second)
    backend.close()


def test_a_checkpoint_of_another_model_is_refused(models, tmp_path):
    tied = open_backend(models[True])
    tied.save(tmp_path / "saved", CheckpointState(step=1, version=1)).result(DEADLINE_S)
    tied.close()
    untied = open_backend(models[False])
    with pytest.raises(LearnerError, match=r"saved is of another model.*lm_head.weight is missing"):
        untied.load(tmp_path / "saved")
    untied.close()


def test_a_checkpoint_that_is_missing_or_broken_is_named(backend, tmp_path):
    with pytest.raises(LearnerError, match="nothing cannot be loaded"):
        backend.load(tmp_path / "nothing")
    backend.save(tmp_path / "saved", CheckpointState(step=1, version=1)).result(DEADLINE_S)
    (tmp_path / "saved" / ".metadata").unlink()
    with pytest.raises(LearnerError, match="saved cannot be loaded"):
        backend.load(tmp_path / "saved")


def test_supervised_warm_up_learns_and_repeats_itself(models):
    rng = np.random.default_rng(0)
    sentences = [[start, *((start + np.arange(1, 12)) % 50).tolist()] for start in rng.integers(0, 50, 96).tolist()]
    demonstrations = [(ids, [i > 2 for i in range(len(ids))]) for ids in sentences]
    curves = []
    for _ in range(2):
        backend = open_backend(models[True])
        progress = []
        config = Sft(epochs=4, tokens_per_step=128, lr=5e-3)
        result = run_sft(backend, demonstrations, config, tokens_per_microbatch=64, seed=1, report=progress.append)
        backend.close()
        steps = [p for p in progress if isinstance(p, SftProgress)]
        curves.append([p.loss for p in progress])
        assert [p.step for p in steps] == list(range(1, steps[0].steps + 1))
        assert max(p.lr for p in steps) == config.lr
        assert tuple(p for p in progress if isinstance(p, HeldOut)) == result.held_out
        assert [h.epoch for h in result.held_out] == [0, 1, 2, 3, 4]
        assert {h.tokens for h in result.held_out} == {2 * 9}  # 2 % of 96 sentences
        assert result.sequences == 94
    assert curves[0] == curves[1]
    assert result.loss < 0.2 < 3.0 < curves[0][0]
    assert result.held_out[-1].loss < 0.5 < 3.0 < result.held_out[0].loss


def test_what_is_held_out_is_not_trained_on_and_is_reported(models):
    """Of two sequences the one is trained on, and the loss on the other is that of a plain model."""
    sequences = [([1, 2, 3, 4], [False, True, True, True]), ([9, 8, 7], [False, False, True])]
    backend = open_backend(models[True])
    result = run_sft(
        backend, sequences, Sft(epochs=1, held_out=0.5), tokens_per_microbatch=64, seed=0, report=lambda _: None
    )
    (held,) = [i for i, (_, mask) in enumerate(sequences) if sum(mask) == result.held_out[0].tokens]
    assert (result.sequences, result.tokens) == (1, len(sequences[1 - held][0]))
    ids, mask = sequences[held]
    after = backend.logprobs([scoring_microbatch([ids])], temperature=TEMPERATURE)[0][torch.tensor(mask)]
    assert result.held_out[-1].loss == pytest.approx(-float(after.mean()), abs=1e-6)
    assert result.held_out[-1].loss != result.held_out[0].loss
    backend.close()
    backend = open_backend(models[True])
    whole = run_sft(
        backend, sequences, Sft(epochs=1, held_out=0.0), tokens_per_microbatch=64, seed=0, report=lambda _: None
    )
    assert (whole.sequences, whole.held_out) == (2, ())
    backend.close()


def test_conversations_without_a_trained_token_are_refused(backend):
    with pytest.raises(ConfigError, match="none of 1 conversations"):
        run_sft(backend, [([1, 2], [False, False])], Sft(), tokens_per_microbatch=64, seed=0, report=lambda _: None)


def test_an_incomplete_rendezvous_is_named(models, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        open_backend(models[True])


if __name__ == "__main__":
    rank_main(jobs_of(sys.argv[1]), sys.argv[2])
