"""Partial rollout: requests that a pause or a push finds under way lose no token, and every token names its policy."""

import asyncio

import pytest
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.configs.schema import Partial
from slipstream.rollout.engines.base import SamplingParams
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import PROMPTS, ROUNDS, Replica, Traffic, join

LONG = 400
"""Tokens of a request that several pushes find under way."""


def span_error(replica: Replica, policies: dict[int, int], prompt: list[int], completion: Completion) -> float:
    """Largest error in nats over the spans that are of one policy alone; `policies` says which policy each version is."""
    errors = [0.0]
    for span in completion.version_spans:
        if not span.mixed:
            rows = reference.rows(replica.weights.models[policies[span.version]], prompt, completion)
            tokens, logprobs = (values[span.start : span.end] for values in (completion.token_ids, completion.logprobs))
            errors.append(reference.error(rows[span.start : span.end], tokens, logprobs))
            assert reference.greedy(rows[span.start : span.end], tokens, replica.tolerance)
    return max(errors)


def assert_covered(completion: Completion, length: int) -> None:
    """Spans are in order and cover all of `length` tokens, and versions only rise."""
    edges = [0, *(span.end for span in completion.version_spans)]
    assert [span.start for span in completion.version_spans] == edges[:-1]
    assert edges[-1] == len(completion.token_ids) == len(completion.logprobs) == length
    versions = [span.version for span in completion.version_spans]
    assert versions == sorted(versions)


async def test_abort_returns_the_partial_and_going_on_equals_never_having_aborted(kind: Kind, replica: Replica) -> None:
    kind.needs("abort", "abort_resume")
    whole = SamplingParams(max_tokens=900, temperature=0.0)
    for _ in range(ROUNDS):
        running = [asyncio.create_task(replica.engine.generate(p, whole, version=replica.version)) for p in PROMPTS[:4]]
        await replica.begun(running)
        await replica.generate(PROMPTS[7], SamplingParams(max_tokens=40, temperature=0.0))
        await replica.engine.pause("abort_resume")
        partials = await asyncio.wait_for(asyncio.gather(*running), 60)  # they come back while it is paused
        await replica.engine.resume()
        if all(partial.finish_reason == "abort" for partial in partials):  # the pause was not too late
            break
    for prompt, partial in zip(PROMPTS, partials, strict=False):
        assert partial.finish_reason == "abort"
        assert 0 < len(partial.token_ids) < 900
        rest = await replica.generate([*prompt, *partial.token_ids], SamplingParams(max_tokens=60, temperature=0.0))
        completion = join(partial, rest)
        rows = reference.rows(replica.weights.models[0], prompt, completion)
        assert reference.greedy(rows, completion.token_ids, replica.tolerance)
        assert reference.error(rows, completion.token_ids, completion.logprobs) <= replica.tolerance
        assert completion.version_spans == (VersionSpan(0, len(completion.token_ids), replica.version or 0),)


@pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
async def test_requests_survive_a_pause_and_sample_nothing_in_it(kind: Kind, replica: Replica, mode: Partial) -> None:
    kind.needs(mode)
    async with Traffic(replica) as traffic:
        await replica.engine.pause(mode)
        asked = asyncio.create_task(replica.generate(PROMPTS[6], SamplingParams(max_tokens=1)))
        await asyncio.wait({asked}, timeout=0.5)  # what had ended before the pause has arrived by then
        so_far = len(traffic.finished)
        await asyncio.wait({asked}, timeout=0.5)
        assert not asked.done()
        assert len(traffic.finished) == so_far
        asked.cancel()
        await asyncio.wait({asked})
        await replica.engine.resume()
        await replica.engine.resume()  # does no harm
    for prompt, completion in traffic.finished:
        assert_covered(completion, 300)
        assert span_error(replica, {replica.version or 0: 0}, prompt, completion) <= replica.tolerance


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort_resume"])
async def test_a_push_under_running_requests_has_exact_spans(kind: Kind, modal: Replica, mode: Partial) -> None:
    """`recompute` and `abort_resume`: every token is what its version's model alone computes over all that precedes it.
    `keep_kv`: the tokens after the push are what the new model computes over the old one's keys and values, and say so."""
    kind.needs("spans", mode)
    old = modal.version or 0
    for _ in range(ROUNDS):
        async with Traffic(modal, max_tokens=400) as traffic:
            new = await modal.push(1)
        if crossing := traffic.crossing():
            break
        old = await modal.push(0)
    assert crossing
    for prompt, completion in traffic.finished:
        assert_covered(completion, 400)
        assert span_error(modal, {old: 0, new: 1}, prompt, completion) <= modal.tolerance
    for prompt, completion in crossing:
        before, after = completion.version_spans
        assert (before.version, before.kv_version, after.version) == (old, None, new)
        if mode != "keep_kv":
            assert after.kv_version is None
            continue
        assert after.kv_version == old
        rows = reference.mixed_rows(*modal.weights.models, prompt, completion, before.end)
        tokens, logprobs = completion.token_ids[before.end :], completion.logprobs[before.end :]
        assert reference.greedy(rows, tokens, modal.tolerance)
        assert reference.error(rows, tokens, logprobs) <= modal.tolerance


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort_resume"])
async def test_long_requests_cross_many_versions_and_lose_no_token(kind: Kind, modal: Replica, mode: Partial) -> None:
    kind.needs("spans", mode)
    policies = {modal.version or 0: 0}
    for _ in range(ROUNDS):
        async with Traffic(modal, max_tokens=LONG) as traffic:
            for which in (1, 0, 1):
                policies[await modal.push(which)] = which
        if traffic.most_spans() >= 3:
            break
        policies[await modal.push(0)] = 0
    assert traffic.most_spans() >= 3
    for prompt, completion in traffic.finished:
        assert_covered(completion, LONG)
        assert span_error(modal, policies, prompt, completion) <= modal.tolerance
        first, *later = completion.version_spans
        oldest = first.kv_version if first.kv_version is not None else first.version
        assert all(span.kv_version == (oldest if mode == "keep_kv" else None) for span in later)


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort_resume"])
async def test_no_prefix_is_cached_across_a_push(kind: Kind, modal: Replica, mode: Partial) -> None:
    kind.needs("prefix cache", mode)
    prompt = [(11 * i) % 440 + 4 for i in range(200)]
    for which in (0, 1, 0):
        new = await modal.push(which)
        for _ in range(2):  # computed, then from the cache
            completion = await modal.generate(prompt)
            rows = reference.rows(modal.weights.models[which], prompt, completion)
            assert reference.error(rows, completion.token_ids, completion.logprobs) <= modal.tolerance
            assert completion.version_spans == (VersionSpan(0, 24, new),)


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort_resume"])
async def test_a_caller_with_an_older_version_gets_true_spans(kind: Kind, modal: Replica, mode: Partial) -> None:
    """It asks under the old version, whose prefix may still be cached: then the span must say so."""
    kind.needs(mode)
    prompt = [(13 * i) % 440 + 4 for i in range(200)]
    old = modal.version or 0
    await modal.generate(prompt)
    new = await modal.push(1)
    modal.version = old
    late = await modal.generate(prompt)
    (span,) = late.version_spans
    assert (span.start, span.end, span.version) == (0, 24, new)
    rows = reference.rows(modal.weights.models[1], prompt, late)
    exact = reference.error(rows, late.token_ids, late.logprobs) <= modal.tolerance
    assert exact or span.kv_version == old
    assert exact or mode == "keep_kv"
