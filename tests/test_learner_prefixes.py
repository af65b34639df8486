"""Members of a group share their prompt: what is computed once comes out, and is learned from, as if each had its own."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Model
from slipstream.learner import packing
from slipstream.learner.batch import TrainBatch
from slipstream.learner.fsdp2 import attention
from slipstream.learner.fsdp2.attention import plan_sharing, unshared
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import microbatches, to_microbatch
from slipstream.learner.sft import negative_log_likelihood
from slipstream.tests import columns
from slipstream.tests.columns import joined
from slipstream.tests.equality import OPTIMIZER, STEPS, TEMPERATURE, VOCABULARY, make_model
from slipstream.tests.ranks import open_backend
from transformers import AutoModelForCausalLM

CLIP = 1e-3
"""Norm that every gradient has."""

SINGLE = 30
"""Tokens of a sequence that begins like no other."""


def sequence(rng: np.random.Generator, prompt: np.ndarray, mask: str) -> TrainBatch:
    """`prompt`, and one token for each letter: `t` is trained, `c` is context."""
    trained = np.array([False] * len(prompt) + [letter == "t" for letter in mask])
    n = len(trained)
    return columns.sequence(
        token_ids=np.concatenate([prompt, rng.integers(0, VOCABULARY, len(mask))]).astype(np.int32),
        loss_mask=trained,
        behavior_logprobs=np.where(trained, -4.0, 0).astype(np.float32),
        staleness=np.where(trained, 0, -1).astype(np.int32),
        mixed=np.zeros(n, dtype=np.bool_),
        advantages=np.where(trained, rng.normal(), 0).astype(np.float32),
    )


def make_nested() -> list[TrainBatch]:
    """A head of 24 tokens that others begin with, by turns: three go on for 24 before they are trained, and two for 4."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, VOCABULARY, 48)
    answers = ((48, "ttttt"), (28, "ttt"), (24, "tt"), (48, "tct"), (28, "t"), (48, "t" * 9))
    return [sequence(rng, prompt[:size], mask) for size, mask in answers]


def make_groups(step: int) -> list[TrainBatch]:
    """Two groups, their members by turns: a single answer, several turns, tokens that are withheld, twice the same answer, one that
    is long compared with its prompt; and a single sequence."""
    rng = np.random.default_rng(step)
    first, second = rng.integers(0, VOCABULARY, 24), rng.integers(0, VOCABULARY, 18)
    again = sequence(rng, first, "tttt")
    return [
        sequence(rng, first, "ttttttt"),
        sequence(rng, second, "tttccctt"),
        again,
        sequence(rng, second, "t"),
        sequence(rng, first, "cccctt"),
        again,
        sequence(rng, second, "t" * 60),
        sequence(rng, rng.integers(0, VOCABULARY, SINGLE - 5), "ttttt"),
        sequence(rng, second, "cttt"),
    ]


def test_what_is_in_common_is_kept_once_and_no_trained_token_is_merged() -> None:
    sequences = make_groups(0)
    row = to_microbatch(joined(sequences))
    made = plan_sharing(row)
    # Three of four members of each group share with the longest, of which one is too long to share itself.
    assert len(made.kept) == len(row.token_ids) - 3 * 24 - 3 * 18
    assert torch.equal(row.token_ids[made.kept][made.where], row.token_ids)
    assert torch.equal(row.position_ids[made.kept][made.where], row.position_ids)
    trained = made.where[row.loss_mask]
    assert len(set(trained.tolist())) == int(row.loss_mask.sum())
    assert torch.equal(made.kept[trained], row.loss_mask.nonzero().squeeze(1))
    for (start, end), (a, b), (head, stop) in zip(
        pairwise(row.cu_seqlens), pairwise(made.cu_seqlens), made.heads, strict=True
    ):
        assert made.where[start:end].tolist() == [*range(head, stop), *range(a, b)]
        assert b > a


def test_a_row_without_anything_in_common_stays_as_it_is() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, packing.LEAST - 1)
    row = to_microbatch(joined([sequence(rng, prompt, "tt"), sequence(rng, prompt, "tt"), *make_groups(1)[:2]]))
    made = plan_sharing(row)
    assert made.heads == unshared(row).heads == ()
    assert torch.equal(made.kept, torch.arange(len(row.token_ids)))
    assert torch.equal(made.where, made.kept)
    assert made.cu_seqlens == row.cu_seqlens


@pytest.mark.parametrize("extra", ["", "soft cap", "sinks"])
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(
    ("sequences", "saved"),
    [(make_groups(0), 3 * 24 + 3 * 18), (make_nested(), 2 * 48 + 2 * 24)],
    ids=["separate", "nested"],
)
def test_attention_and_its_gradient_are_those_of_whole_sequences(
    sequences: list[TrainBatch], saved: int, window: int | None, extra: str
) -> None:
    row = to_microbatch(joined(sequences))
    made = plan_sharing(row)
    assert len(made.kept) == len(row.token_ids) - saved
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(made.kept), 8) for heads in (4, 2, 2)]
    states = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    asked = torch.randn(1, len(row.token_ids), 4, 8, generator=generator, dtype=torch.float64)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    options = {"soft cap": {"softcap": 2.0}, "sinks": {"s_aux": sinks}}.get(extra, {})
    learned = [*states, *options.values()][: 4 if extra == "sinks" else 3]

    def attend(query, key, value, packed):
        output, _ = attention.packed_attention(
            torch.nn.Identity(), query, key, value, None, sliding_window=window, packed=packed, **options
        )
        return output

    expected = attend(
        *(x[:, :, made.where] for x in states), attention.PackedMask(row.cu_seqlens, row.token_ids.device)
    )
    wanted = torch.autograd.grad((expected * asked).sum(), learned)
    shared = attend(*states, attention.PackedMask(made.cu_seqlens, row.token_ids.device, heads=made.heads))[
        :, made.where
    ]
    torch.testing.assert_close(shared, expected, atol=1e-12, rtol=0)
    for found, gradient in zip(torch.autograd.grad((shared * asked).sum(), learned), wanted, strict=True):
        torch.testing.assert_close(found, gradient, atol=1e-12, rtol=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "tied", tied=True)


def test_logprobs_are_those_of_transformers(model: str) -> None:
    backend = open_backend(model)
    assert backend.shares_prefixes
    read: list[int] = []
    backend._model.model.embed_tokens.register_forward_hook(lambda _, given, __: read.append(given[0].shape[1]))
    sequences = make_groups(0)
    row = to_microbatch(joined(sequences))
    (found,) = backend.logprobs([row])
    assert read == [len(plan_sharing(row).kept)]
    backend.close()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for (start, end), one in zip(pairwise(row.cu_seqlens), sequences, strict=True):
        ids = torch.from_numpy(one.token_ids).long()
        with torch.no_grad():
            logp = (plain(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected = torch.cat([torch.zeros(1), logp[range(len(ids) - 1), ids[1:]]]).where(row.loss_mask[start:end], 0.0)
        torch.testing.assert_close(found[start:end], expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "config", [Fsdp2(device="cpu"), Fsdp2(device="cpu", options=("recompute",))], ids=["plain", "recompute"]
)
def test_three_steps_make_the_weights_that_they_make_unshared(model: str, config: Fsdp2) -> None:
    """And of the same gradients. Clipped hard, as in plain.py: what AdamW makes of rounding stays small."""
    outcomes = []
    clipped = msgspec.structs.replace(OPTIMIZER, clip_norm=CLIP)
    for shares, budget in ((False, 8192), (True, 8192), (True, 120)):
        backend = Fsdp2Backend(Model(path=model), clipped, config, temperature=TEMPERATURE, timeout_s=60)
        backend.shares_prefixes = shares
        numbers, tokens, gradients = [], [], []

        def see(optimizer: torch.optim.Optimizer, *_: object, seen: list[torch.Tensor] = gradients) -> None:
            seen += [p.grad.full_tensor() for group in optimizer.param_groups for p in group["params"]]

        backend._optimizer.register_step_pre_hook(see)
        for step in range(STEPS):
            rows = microbatches(joined(make_groups(step)), 0, 1, budget, shares_prefixes=shares)
            tokens.append(sum(len((plan_sharing if shares else unshared)(row).kept) for row in rows))
            result = backend.step(rows, negative_log_likelihood, OPTIMIZER.lr)
            numbers.append([result.loss, result.grad_norm])
        outcomes.append((dict(backend.named_weights()), torch.tensor(numbers), tokens, gradients))
        backend.close()
    (weights, numbers, tokens, gradients), *others = outcomes
    for found, outputs, fewer, moved in others:
        assert max(fewer) < 0.75 * min(tokens)
        torch.testing.assert_close(outputs, numbers, atol=1e-6, rtol=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
        for one, other in zip(moved, gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6 * CLIP, rtol=1e-4)


HEADS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=40)


@given(HEADS, st.integers(1, 200), st.integers(1, 4))
def test_rows_hold_every_sequence_once_and_what_is_shared_once(
    made: list[tuple[int, int]], budget: int, ranks: int
) -> None:
    """Of heads 0 to 3 the k-th has 7 k tokens; the others are of the tokens after the head."""
    heads = [(head, 7 * head) for head, _ in made]
    lengths = [7 * head + own for head, own in made]
    shares = packing.share(lengths, ranks, budget, heads)
    assert sorted(i for part in shares for row in part for i in row) == list(range(len(lengths)))
    for row in (row for part in shares for row in part):
        once = {heads[i] for i in row}
        size = sum(lengths[i] - heads[i][1] for i in row) + sum(tokens for _, tokens in once)
        assert size <= budget or len(row) == 1


CHAIN = np.random.default_rng(7).integers(0, VOCABULARY, 90)
"""All heads begin with the beginning of these."""

NESTED = st.lists(
    st.tuples(st.sampled_from([20, 30, 60, 90]), st.sampled_from([0, 0, 7]), st.integers(1, 40)),
    min_size=1,
    max_size=16,
)


@given(NESTED, st.integers(20, 600), st.integers(1, 2))
def test_a_row_with_heads_within_heads_computes_no_more_than_its_budget(
    made: list[tuple[int, int, int]], budget: int, ranks: int
) -> None:
    """The head of each is so much of the chain, and so much that only those have in common that leave it there; what comes after it
    is trained."""
    rng = np.random.default_rng(0)
    sequences = []
    for chain, own, after in made:
        aside = np.random.default_rng([chain, own]).integers(0, VOCABULARY, own)
        sequences.append(sequence(rng, np.concatenate([CHAIN[:chain], aside]), "t" * after))
    rows = [
        row
        for rank in range(ranks)
        for row in microbatches(joined(sequences), rank, ranks, budget, shares_prefixes=True)
    ]
    assert sum(len(row.cu_seqlens) - 1 for row in rows) == len(sequences)
    for row in rows:
        one = plan_sharing(row)
        assert torch.equal(row.token_ids[one.kept][one.where], row.token_ids)
        assert len(one.kept) <= budget or len(row.cu_seqlens) == 2
    heads = [(s.token_ids[: s.loss_mask.argmax()].tobytes(), int(s.loss_mask.argmax())) for s in sequences]
    paying = [head for head, s in zip(heads, sequences, strict=True) if packing.sharing_pays(head[1], len(s.token_ids))]
    counted = sum(len(s.token_ids) for s in sequences) - sum(n for _, n in paying) + sum(n for _, n in set(paying))
    assert len(plan_sharing(to_microbatch(joined(sequences))).kept) <= counted


@pytest.mark.parametrize(("head", "members", "computed"), [(300, 8, 110 + 300 + 8 * 90), (110, 2, 110 + 2 * 40)])
def test_a_longer_head_is_kept_once_more_where_that_saves_more(head: int, members: int, computed: int) -> None:
    """Than to continue the one of 100 tokens that it begins with."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, head)
    answer = 90 if head == 300 else 30
    row = to_microbatch(
        joined([sequence(rng, prompt[:100], "t" * 10), *(sequence(rng, prompt, "t" * answer) for _ in range(members))])
    )
    assert len(plan_sharing(row).kept) == computed


def test_members_share_a_row_where_that_is_less_work() -> None:
    """First-fit by length only would put every group into both rows."""
    heads = [("a", 40), ("b", 40)] * 3
    (rows,) = packing.share([50, 51, 52, 53, 54, 55], 1, 90, heads)
    assert sorted(map(sorted, rows)) == [[0, 2, 4], [1, 3, 5]]
    assert len(packing.share([50, 51, 52, 53, 54, 55], 1, 90)[0]) == 6
