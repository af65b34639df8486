"""Callers that leave: their requests end on the server."""

import asyncio
import signal
import sys

import msgspec
from slipstream.errors import DeadlineExceeded
from slipstream.rollout.engines.base import SamplingParams
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import PROMPTS, Replica
from slipstream.tests.conformance.servers import MAX_CONCURRENT

CALLER = """
import asyncio, msgspec, sys
from slipstream.rollout.engines.access import ServerAccess
from slipstream.rollout.engines.base import SamplingParams
from slipstream.tests.conformance.replica import PROMPTS
from slipstream.tests.conformance.servers import make_client

async def main(kind, url, version, access):
    engine = make_client(kind, "caller", url, access=msgspec.json.decode(access, type=ServerAccess))
    sampling = SamplingParams(max_tokens=900)
    await asyncio.gather(*(engine.generate(PROMPTS[i % 8], sampling, version=int(version)) for i in range(128)))

asyncio.run(main(*sys.argv[1:]))
"""
"""Requests more tokens than any server of the suite samples in 15 s."""


MANY = 8 * MAX_CONCURRENT
"""Requests of 990 tokens: so many that the server would decode them for longer than is waited here until none of them runs."""


async def test_a_cancelled_callers_request_is_cancelled(kind: Kind, replica: Replica) -> None:
    kind.needs("cancel")
    kept = asyncio.create_task(replica.generate(PROMPTS[0], SamplingParams(max_tokens=300)))
    long = [asyncio.create_task(replica.generate(PROMPTS[i % 8], SamplingParams(max_tokens=990))) for i in range(MANY)]
    await replica.running(MAX_CONCURRENT, queue=True)
    for request in long:
        request.cancel()
    ended = await asyncio.gather(*long, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)
    assert len((await kept).token_ids) == 300
    await replica.running(0, within_s=8)
    assert await replica.serves(0)


async def test_a_killed_callers_requests_are_cancelled(kind: Kind, replica: Replica) -> None:
    kind.needs("cancel")
    access = msgspec.json.encode(replica.server.access).decode()
    arguments = (replica.kind.name, replica.server.url, str(replica.version), access)
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, *arguments)
    await replica.running(MAX_CONCURRENT, within_s=60)
    caller.send_signal(signal.SIGKILL)
    await caller.wait()
    await replica.running(0, within_s=12)
    assert (await replica.engine.get_load()).waiting == 0
    assert await replica.serves(0)


async def test_a_request_past_its_deadline_no_longer_runs(kind: Kind, replica: Replica) -> None:
    kind.needs("cancel")
    hasty, long = replica.server.client("hasty", request_s=0.3), SamplingParams(max_tokens=990)
    requests = [hasty.generate(PROMPTS[i % 8], long, version=replica.version) for i in range(MANY)]
    ended = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(one, DeadlineExceeded) and "hasty waited 0.3 s" in str(one) for one in ended), ended
    await hasty.close()
    await replica.running(0, within_s=8)
