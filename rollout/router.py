"""Which replica answers a request: sticky by episode, else the one with the fewest tokens in flight.

Invariants:
- A request goes only to a replica that answers and serves at least the version its lease asks for.
- A replica that fails is left alone at once; one task per failed replica waits for its return. Its requests go elsewhere,
  or wait for it, until their own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from ..agents.base import Completion
from ..errors import DeadlineExceeded, EngineError, within
from .engine import Engine, Sampling

log = logging.getLogger(__name__)

PROBE_S = 0.5
"""Between looks at a replica that is down or behind: a server has no event to wait for over HTTP."""


BACKOFF_S = 8.0
"""Longest pause between tries of one request."""


class Replica:
    """One engine as the router sees it. `tokens` are in flight; `version` is the last one seen, None while it is away."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version: int | None = None
        self.tokens = 0
        self.probe: asyncio.Task[None] | None = None


class Router:
    """Spreads requests over `engines`. Use as an async context manager; it closes the engines."""

    def __init__(self, engines: Sequence[Engine], *, start_s: float, request_s: float) -> None:
        self._replicas = [Replica(engine) for engine in engines]
        self._start_s = start_s
        self._request_s = request_s
        self._changed = asyncio.Condition()
        self._sticky: dict[str, Replica] = {}

    async def __aenter__(self) -> Router:
        for replica in self._replicas:
            self._watch(replica, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        probes = [r.probe for r in self._replicas if r.probe]
        for probe in probes:
            probe.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*probes)
        for replica in self._replicas:
            await replica.engine.close()

    def forget(self, episode_id: str) -> None:
        """The episode is over; nothing sticks to its replica any more."""
        self._sticky.pop(episode_id, None)

    async def generate(
        self, episode_id: str, token_ids: Sequence[int], sampling: Sampling, oldest_version: int
    ) -> Completion:
        """One completion from a replica that serves at least `oldest_version`.

        Raises:
            DeadlineExceeded: no replica could complete it within `request_s`.
            PolicyError: no engine would take such a request.
        """
        return await within(
            self._request_s,
            self._generate(episode_id, token_ids, sampling, oldest_version),
            who=f"episode {episode_id}",
            waits_for=f"a completion at version {oldest_version} or later",
            hint=lambda: f"replicas: {self._describe()}; see their logs, or raise rollout.request_s",
        )

    async def _generate(
        self, episode_id: str, token_ids: Sequence[int], sampling: Sampling, oldest_version: int
    ) -> Completion:
        weight = len(token_ids) + sampling.max_tokens
        failures = 0
        while True:
            if (
                failures > 1
            ):  # the first failure goes elsewhere at once; a request that nobody can serve must not hammer
                await asyncio.sleep(min(BACKOFF_S, PROBE_S * 2 ** (failures - 2)))
            replica = await self._pick(episode_id, oldest_version)
            replica.tokens += weight
            try:
                completion = await replica.engine.generate(token_ids, sampling, salt=str(replica.version))
            except (EngineError, DeadlineExceeded) as error:
                log.warning("%s failed: %s", replica.engine.name, error)
                self._watch(replica, oldest_version)
                failures += 1
                continue
            finally:
                replica.tokens -= weight
            if completion.version_spans and replica.version is not None:
                replica.version = max(replica.version, completion.version_spans[-1].version)
            return completion

    async def _pick(self, episode_id: str, oldest_version: int) -> Replica:
        """Wait for a replica that serves `oldest_version`, and stick to it."""
        async with self._changed:
            while True:
                for replica in self._replicas:
                    if replica.version is not None and replica.version < oldest_version:
                        self._watch(replica, oldest_version)
                able = [r for r in self._replicas if r.version is not None]
                if able:
                    kept = self._sticky.get(episode_id)
                    replica = kept if kept in able else min(able, key=lambda r: r.tokens)
                    self._sticky[episode_id] = replica
                    return replica
                await self._changed.wait()

    def _watch(self, replica: Replica, oldest_version: int) -> None:
        """Take the replica out until it answers and serves `oldest_version`."""
        replica.version = None
        if replica.probe is None or replica.probe.done():
            name = f"probe of {replica.engine.name}"
            replica.probe = asyncio.create_task(self._probe(replica, oldest_version), name=name)

    async def _probe(self, replica: Replica, oldest_version: int) -> None:
        while True:
            try:
                await replica.engine.wait_ready(self._start_s)
                version = await replica.engine.version()
            except (EngineError, DeadlineExceeded) as error:
                log.warning("%s is away: %s", replica.engine.name, error)
                version = None
            if version is not None and version >= oldest_version:
                async with self._changed:
                    replica.version = version
                    self._changed.notify_all()
                return
            await asyncio.sleep(PROBE_S)

    def _describe(self) -> str:
        return ", ".join(
            f"{r.engine.name} {'away' if r.version is None else f'at {r.version}'}" for r in self._replicas
        )
