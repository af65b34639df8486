"""Who may use a server: without a token of the run no path answers, whatever the kind of server says of its own options."""

from __future__ import annotations

import msgspec
import pytest
from aiohttp import ClientSession, Fingerprint
from slipstream.errors import EngineError
from slipstream.rollout.engines.access import DESCRIPTION_PATH, REQUEST_PATHS, ServerAccess
from slipstream.rollout.engines.http_client import ErrorStatus, HttpClient, is_healthy
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import Replica
from slipstream.tests.conformance.servers import make_client

OURS = (
    *("/health", "/metrics", "/weight_info", "/is_paused", "/inference/v1/generate", "/abort_requests", "/pause"),
    *("/sleep", "/wake_up", "/is_sleeping"),
    *("/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
)
"""The routes of our own server, which has no list of them."""

CONTROL = {
    "vllm": ("/pause", "/update_weights", "/collective_rpc"),
    "sglang": ("/pause_generation", "/update_weights_from_tensor", "/flush_cache"),
}
"""Some of the routes that a worker has no right to; our own server has vLLM's."""

ODD = ("/", "//health", "/health/", "/HEALTH", "/%68ealth", "/health?token=x", "/nowhere", "/docs")


async def all_paths(kind: Kind, http: ClientSession, replica: Replica, pinned: Fingerprint) -> set[str]:
    if kind.name in ("transformers", "fake"):
        return set(OURS)
    url, headers = f"{replica.server.url}/openapi.json", replica.server.access.headers
    async with http.get(url, headers=headers, ssl=pinned) as listed:
        assert listed.status == 200
        return {path.replace("{", "").replace("}", "") for path in (await listed.json())["paths"]}


async def test_no_path_answers_without_a_token_of_the_run(kind: Kind, replica: Replica) -> None:
    access, url = replica.server.access, replica.server.url
    pinned = Fingerprint(bytes.fromhex(access.certificate))
    worker = msgspec.structs.replace(access, control="").headers
    strangers = (
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {'0' * 64}"},
        {"Authorization": f"Basic {access.control}"},
        {"Authorization": f"Bearer {access.control[:-1]}"},
        {"X-API-Key": access.control},
        {"Cookie": f"Authorization=Bearer {access.control}"},
    )
    async with ClientSession() as http:
        paths = await all_paths(kind, http, replica, pinned)
        assert len(paths) > 10
        assert paths > set(CONTROL.get(kind.name, OURS[-5:]))
        for path in (*sorted(paths), *ODD):
            for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
                for number, headers in enumerate(strangers):
                    if number and method != "POST":
                        continue
                    async with http.request(method, url + path, headers=headers, ssl=pinned) as answer:
                        assert answer.status == 401, f"{method} {path} with {headers}"
        for path in sorted(paths - REQUEST_PATHS):
            async with http.post(url + path, headers=worker, ssl=pinned, data=b"{}") as answer:
                assert answer.status == 403, path
    assert await replica.serves(0)  # nothing of this has changed anything


async def test_a_worker_samples_and_does_not_control(kind: Kind, replica: Replica) -> None:
    server, owner = replica.server, replica.engine
    access = msgspec.structs.replace(server.access, control="")
    worker = make_client(kind.name, "worker", server.url, server.ranks, access=access)
    try:
        replica.engine = worker
        assert await worker.version() == replica.version
        assert await replica.serves(0)
        await worker.get_load()
        with pytest.raises(ErrorStatus, match="answered 403"):
            await worker.pause("abort_resume")
        with pytest.raises(ErrorStatus, match="answered 403"):
            await worker.resume()
    finally:
        replica.engine = owner
        await worker.close()
    assert await replica.serves(0)


async def test_a_server_says_what_it_was_started_for_to_its_owner_only(kind: Kind, replica: Replica) -> None:
    access, url = replica.server.access, f"{replica.server.url}{DESCRIPTION_PATH}"
    pinned = Fingerprint(bytes.fromhex(access.certificate))
    async with ClientSession() as http:
        for headers, status in (({}, 401), (access.without_control.headers, 403), (access.headers, 200)):
            async with http.get(url, headers=headers, ssl=pinned) as answer:
                assert answer.status == status
                assert (await answer.read() == kind.name.encode()) is (status == 200)


async def test_only_the_server_with_the_pinned_certificate_is_talked_to(replica: Replica) -> None:
    server, path = replica.server, "/health" if replica.kind.name != "sglang" else "/model_info"
    for access, well in ((server.access, True), (ServerAccess(certificate=server.access.certificate), False)):
        client = HttpClient("server", server.url, 20.0, access)
        assert [await is_healthy(client, path) for _ in range(2)] == [well, well]
        await client.close()
    for certificate, why in (("00" * 32, "has another certificate"), ("", "has not said yet which certificate")):
        client = HttpClient("server", server.url, 20.0, msgspec.structs.replace(server.access, certificate=certificate))
        with pytest.raises(EngineError, match=why):
            await client.call("GET", path)
        await client.close()
    plain = HttpClient("server", server.url.replace("https", "http"), 20.0, server.access)
    with pytest.raises(EngineError):
        await plain.call("GET", path)
    await plain.close()
