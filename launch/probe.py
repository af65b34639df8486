"""How an engine is, asked over HTTP.

Invariants:
- An engine that is paused is well: the question is one that its kind answers at any time.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

import aiohttp

PROBE_S = 5.0
"""Longest wait for one answer."""

RETRY_S = 0.2
"""Between questions to an engine that is starting: a foreign server has no event to wait for."""


class Probe:
    """Asks engines at `path`. Use as an async context manager."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def __aenter__(self) -> Probe:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def __call__(self, url: str) -> bool | None:
        """True if the engine at `url` is well, False if it says that it is not, None if it says nothing."""
        try:
            async with self._http.get(url + self._path, headers={"Connection": "close"}) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def until_well(self, url: str) -> None:
        """Return when the engine at `url` is well. The caller sets the deadline."""
        while True:
            if await self(url):
                return
            await asyncio.sleep(RETRY_S)
