"""What a server samples: the distribution of transformers, the stop tokens and limits that were asked for, the seed."""

import asyncio
import math

import msgspec
import pytest
import torch
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.errors import PolicyError
from slipstream.rollout.engines.base import SamplingParams
from slipstream.tests import tiny
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.reference import TOLERANCE
from slipstream.tests.conformance.replica import GREEDY, PROMPTS, Replica
from slipstream.tests.conformance.servers import MAX_CONCURRENT
from transformers import PreTrainedModel

END_OF_SEQUENCE = 3
"""The tiny models' own; an ordinary token unless a request names it."""

EDGE = 1e-5
"""Probability by which two sums of the same 400 probabilities in float32 may differ; a tail token has 1e-4 or more."""
WIDE_EDGE = 0.005
"""As `EDGE`, of servers in TF32: for `top_p` a probability, for `top_k` nats."""


def prompt_before(token: int, model: PreTrainedModel) -> list[int]:
    """A prompt after which `token` is the likeliest; random ones are tried."""
    prompts = torch.randint(4, tiny.VOCABULARY, (20_000, 8), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for some in prompts.split(1000):
            found = model(some, use_cache=False).logits[:, -1].argmax(-1) == token
            if found.any():
                return some[found][0].tolist()
    raise AssertionError(f"no prompt leads to token {token}")


async def test_greedy_tokens_and_logprobs_are_those_of_transformers(replica: Replica) -> None:
    model = replica.weights.models[0]
    for prompt, completion in zip(PROMPTS, await replica.generate_all(PROMPTS), strict=True):
        rows = reference.rows(model, prompt, completion)
        assert reference.greedy(rows, completion.token_ids, replica.tolerance)
        assert reference.error(rows, completion.token_ids, completion.logprobs) <= replica.tolerance
        assert completion.version_spans == (VersionSpan(0, 24, replica.version or 0),)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_sampled_logprobs_are_those_of_transformers(replica: Replica, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=temperature)
    for prompt, completion in zip(PROMPTS, await replica.generate_all(PROMPTS, sampling), strict=True):
        rows = reference.rows(replica.weights.models[0], prompt, completion, temperature)
        assert reference.error(rows, completion.token_ids, completion.logprobs) <= replica.tolerance


async def test_samples_follow_the_distribution_and_differ(replica: Replica) -> None:
    count, prompt = 256, PROMPTS[0]
    completions = await replica.generate_all([prompt] * count, SamplingParams(max_tokens=1))
    logprobs = tiny.logprobs(replica.weights.models[0], [*prompt, 0])[-1]
    mean = float((logprobs.exp() * logprobs).sum())
    deviation = math.sqrt(float((logprobs.exp() * (logprobs - mean) ** 2).sum()) / count)
    assert abs(sum(c.logprobs[0] for c in completions) / count - mean) <= 5 * deviation
    assert len({c.token_ids for c in completions}) > 10


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 20}], ids=["top_p", "top_k"])
async def test_truncated_samples_have_the_truncated_logprobs(
    kind: Kind, replica: Replica, truncation: dict[str, float]
) -> None:
    kind.needs("truncated")
    edge = EDGE if replica.tolerance == TOLERANCE else WIDE_EDGE
    sampling = SamplingParams(max_tokens=40, **truncation)  # type: ignore[arg-type]
    for prompt, completion in zip(PROMPTS, await replica.generate_all(PROMPTS, sampling), strict=True):
        rows = reference.rows(replica.weights.models[0], prompt, completion)
        if "top_k" in truncation:
            kept = rows.topk(20).values
            near = rows.masked_fill(
                rows < kept[:, -1:] - edge, -torch.inf
            )  # an engine keeps 20 of the tokens that tie, or all
            truncated = [near - kept.logsumexp(-1, keepdim=True), near.log_softmax(-1)]
        else:  # in one of 2000 rows a token lies on the edge, in or out by the last bit of a sum
            truncated = [reference.nucleus(rows, 0.8 + slack) for slack in (-edge, 0.0, edge)]
        deviations = [reference.deviations(row, completion.token_ids, completion.logprobs) for row in truncated]
        assert float(torch.stack(deviations).amin(0).max()) <= replica.tolerance


async def test_equal_seeds_draw_equal_tokens_and_others_do_not(kind: Kind, replica: Replica) -> None:
    kind.needs("seed")
    first, second, other, free, freer = await asyncio.gather(
        *(replica.generate(PROMPTS[0], SamplingParams(max_tokens=40, seed=seed)) for seed in (5, 5, 6, None, None))
    )
    assert first.token_ids == second.token_ids
    assert len({first.token_ids, other.token_ids, free.token_ids, freer.token_ids}) == 4
    again = await replica.generate(PROMPTS[0], SamplingParams(max_tokens=40, seed=5))
    assert again.token_ids == first.token_ids


async def test_only_named_tokens_stop_and_they_belong_to_the_completion(kind: Kind, replica: Replica) -> None:
    kind.needs("stop")
    free = await replica.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.0))
    stop = next(t for i, t in enumerate(free.token_ids) if i >= 5 and t not in free.token_ids[:i])
    end = free.token_ids.index(stop) + 1
    stopped = await replica.generate(
        PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(stop, END_OF_SEQUENCE))
    )
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.logprobs == pytest.approx(free.logprobs[:end], abs=replica.tolerance)
    assert stopped.version_spans == (VersionSpan(0, end, replica.version or 0),)

    first = await replica.generate(
        PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(free.token_ids[0],))
    )
    assert (first.token_ids, first.finish_reason) == (free.token_ids[:1], "stop")


async def test_the_models_own_end_of_sequence_does_not_stop_unless_named(kind: Kind, replica: Replica) -> None:
    kind.needs("stop")
    prompt = prompt_before(END_OF_SEQUENCE, replica.weights.models[0])
    free = await replica.generate(prompt, GREEDY)
    assert free.token_ids[0] == END_OF_SEQUENCE
    assert (len(free.token_ids), free.finish_reason) == (GREEDY.max_tokens, "length")
    named = msgspec.structs.replace(GREEDY, stop_token_ids=(END_OF_SEQUENCE,))
    stopped = await replica.generate(prompt, named)
    assert (stopped.token_ids, stopped.finish_reason) == ((END_OF_SEQUENCE,), "stop")
    assert stopped.logprobs == pytest.approx(free.logprobs[:1], abs=replica.tolerance)
    assert stopped.version_spans == (VersionSpan(0, 1, replica.version or 0),)


async def test_completions_are_as_long_as_asked_up_to_the_end_of_the_context(replica: Replica) -> None:
    for count in (1, 2, 17):
        completion = await replica.generate(PROMPTS[0], SamplingParams(max_tokens=count))
        assert (len(completion.token_ids), completion.finish_reason) == (count, "length")
    for room in (1, 9):
        prompt = [4 + i % 400 for i in range(tiny.CONTEXT - room)]
        completion = await replica.generate(prompt, SamplingParams(max_tokens=room, temperature=0.0))
        rows = reference.rows(replica.weights.models[0], prompt, completion)
        assert (len(completion.token_ids), completion.finish_reason) == (room, "length")
        assert reference.error(rows, completion.token_ids, completion.logprobs) <= replica.tolerance


async def test_more_requests_than_the_server_takes_at_once_wait_their_turn(replica: Replica) -> None:
    prompts = [[5 + i, *PROMPTS[i % 8]] for i in range(3 * MAX_CONCURRENT)]
    sampling = SamplingParams(max_tokens=60, temperature=0.0)
    seen = asyncio.Event()

    async def asked(prompt: list[int]) -> Completion:
        """Again and again, so that a test that looks late sees a queue."""
        while True:
            completion = await replica.generate(prompt, sampling)
            if seen.is_set():
                return completion

    burst = asyncio.gather(*map(asked, prompts))
    busy = await replica.running(MAX_CONCURRENT, queue=True)
    seen.set()
    assert 0 < busy.kv_usage <= 1
    for prompt, completion in zip(prompts, await burst, strict=True):
        rows = reference.rows(replica.weights.models[0], prompt, completion)
        assert reference.greedy(rows, completion.token_ids, replica.tolerance)
        assert reference.error(rows, completion.token_ids, completion.logprobs) <= replica.tolerance
    await replica.running(0)
    assert (await replica.engine.get_load()).waiting == 0


async def test_scores_are_those_of_transformers_at_temperature_1(replica: Replica) -> None:
    for which in (0, 1):
        await replica.push(which)
        ids, expected = tiny.canary(replica.weights.models[which])
        assert await replica.engine.score(ids) == pytest.approx(expected, abs=replica.tolerance)
        # The second time a prefix cache could answer, which keeps no log-probs of prompts.
        assert await replica.engine.score(ids) == pytest.approx(expected, abs=replica.tolerance)


async def test_scores_do_not_queue_behind_the_episodes(replica: Replica) -> None:
    """As many episodes as the server needs far longer for than a busy machine takes to ask for a score."""
    episodes = asyncio.gather(*(replica.generate(PROMPTS[i % 8], SamplingParams(max_tokens=400)) for i in range(96)))
    await replica.running(MAX_CONCURRENT)
    ids, expected = tiny.canary(replica.weights.models[0])
    assert await replica.engine.score(ids) == pytest.approx(expected, abs=replica.tolerance)
    assert not episodes.done()
    assert (await replica.engine.get_load()).waiting > 0
    episodes.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episodes
    await replica.running(0)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([4, tiny.VOCABULARY], f"token id {tiny.VOCABULARY} is outside the vocabulary, 0 to {tiny.VOCABULARY - 1}"),
        ([-1], "token id -1 is outside"),
        ([4] * tiny.CONTEXT, f"a prompt of {tiny.CONTEXT} tokens; allowed are 1 to {tiny.CONTEXT - 1}"),
        ([], "a prompt of 0 tokens"),
    ],
    ids=["id too large", "id negative", "prompt too long", "prompt empty"],
)
async def test_what_would_kill_a_server_is_refused_before_it_is_sent(
    replica: Replica, prompt: list[int], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        await replica.engine.generate(prompt, GREEDY)
    with pytest.raises(PolicyError, match=says):
        await replica.engine.score(prompt)
    assert await replica.serves(0)
