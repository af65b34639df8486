"""Deployments of SWE-ReX, which start the remote machines of sandboxes.

Invariants:
- A deployment is stopped in a thread: some block while they do.
- What did not stop is logged: its provider may go on to charge for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from ...common.tasks import in_thread
from ...errors import ConfigError, describe, with_deadline

log = logging.getLogger(__name__)

STOP_S = 60.0  # longest end of a machine
MACHINES: dict[str, tuple[str, ...]] = {
    "docker": (),
    "modal": ("modal", "boto3"),
    "fargate": ("boto3",),
    "daytona": ("daytona",),
}
"""Those of SWE-ReX's deployments that start a machine for each sandbox, and the packages that they need beside SWE-ReX."""


class SweRexDeployment(Protocol):
    """`swerex.deployment.abstract.AbstractDeployment`, as far as it is used here; its runtime is a `RemoteRuntime`."""

    @property
    def runtime(self) -> Any: ...
    def start(self) -> Coroutine[Any, Any, None]: ...
    def stop(self) -> Coroutine[Any, Any, None]: ...


def deployment_maker(options: Mapping[str, Any]) -> Callable[[], SweRexDeployment]:
    """What makes deployments of `{"type": "docker", "image": "python:3.12", ...}`: the options are those of SWE-ReX's
    `DockerDeploymentConfig`, and so for the other types. Raises ConfigError."""
    given = {name: value for name, value in options.items() if name != "type"}
    kind = str(options.get("type", ""))
    if kind not in MACHINES:
        raise ConfigError(
            f"sandbox: {kind!r} is no `type` of deployment that starts machines; allowed are {', '.join(MACHINES)}"
        )
    missing = [name for name in ("swerex", *MACHINES[kind]) if importlib.util.find_spec(name) is None]
    if missing:
        extra = f"[{kind}]" if MACHINES[kind] else ""
        raise ConfigError(
            f"sandbox: a deployment of type {kind} needs the package {missing[0]}; pip install swe-rex{extra}"
        )
    from pydantic import ValidationError
    from swerex.deployment import config

    form = getattr(config, f"{kind.title()}DeploymentConfig")
    unknown = given.keys() - form.model_fields.keys()
    if unknown:
        allowed = ", ".join(sorted(form.model_fields.keys() - {"type"}))
        raise ConfigError(
            f"sandbox: {min(unknown)!r} is no option of a deployment of type {kind}; allowed are {allowed}"
        )
    try:
        form(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"sandbox: {name} = {first['input']!r:.100} of a deployment: {first['msg']}") from None
    return lambda: form(**given).get_deployment()


async def stop(deployment: SweRexDeployment) -> None:
    """Stop its machine, or log that it may be left running."""
    runtime = getattr(deployment, "_runtime", None)
    if runtime is not None:
        # Before it stops the machine, a deployment asks the server to close its sessions, of which we have none; a machine whose
        # server the policy has ended would not be stopped.
        runtime.close = _nothing
    # SWE-ReX 1.4.0 terminates machines of Modal only where they have ended already.
    modal = getattr(deployment, "_sandbox", None)

    async def end() -> None:
        await deployment.stop()
        if modal is not None:
            await modal.terminate.aio()

    hint = "look at the provider for what was left running"
    stopping = in_thread(lambda: asyncio.run(end()), "end of a sandbox elsewhere")
    try:
        await with_deadline(STOP_S, stopping, who="an episode", waits_for="a sandbox elsewhere to end", hint=hint)
    except Exception as error:  # whatever a provider's client raises, and DeadlineExceeded
        log.warning("a machine elsewhere may be left running: %s", describe(error))


async def _nothing() -> None:
    pass
