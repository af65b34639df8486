"""Roles of a run that become an inference server: their process prepares what the server needs, and is replaced by it.

Invariants:
- A server of a run answers only this run. Its tokens, and across hosts its TLS key, are in its private folder before it listens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import NoReturn

from msgspec import structs

from ...common.modelscope import local_folder
from ...common.owned_folders import PRIVATE_VARIABLE, temporary_environment
from ...common.replica_names import node_rank, replica_of
from ...configs.engines import as_loaded
from ...rollout.engines.access import ServerFiles
from ...rollout.engines.launch_common import ServerNode
from ..peers import is_guarded, request_access
from ..run_context import RunContext


def become_engine(context: RunContext, name: str, listen: str, rendezvous: str) -> None:
    """`name` is a replica, or one of its hosts, whose processes find each other at `rendezvous`, a `host:port`."""
    from ...rollout.engines import registry as servers

    config, model = context.config, context.config.model
    config = structs.replace(
        config, model=structs.replace(model, path=local_folder(model.path, "model.path", weights=True))
    )
    if not context.pushed:
        config = as_loaded(config)
    host, _, port = listen.rpartition(":")
    node = _node(name, rendezvous) if rendezvous else None
    files = None if node and node.rank else server_files(context, name, host)  # only the first answers requests
    index = int(replica_of(name).partition("-")[2])
    arguments = servers.command(config, host, int(port), seed=config.seed + index, files=files, node=node)
    _become(arguments, servers.environment(config, host if node else ""))


def _node(name: str, rendezvous: str) -> ServerNode:
    host, _, port = rendezvous.rpartition(":")
    return ServerNode(node_rank(name), host, int(port))


def become_reward(context: RunContext) -> None:
    from ...rollout import reward_server

    reward = reward_server.model_of(context.config)
    reward = structs.replace(reward, path=local_folder(reward.path, "reward.path", weights=True))
    config = structs.replace(context.config, reward=reward)
    host, _, port = context.addresses.reward.partition("://")[2].rpartition(":")
    arguments = reward_server.command(config, host, int(port), server_files(context, "reward", host))
    _become(arguments, reward_server.environment(config))


def server_files(context: RunContext, name: str, host: str) -> ServerFiles | None:
    """What the server `name` needs so that only this run may use it, in its private folder; None where the run is not guarded.
    Across hosts it serves TLS, and the supervisor is told its certificate."""
    if not is_guarded(context):
        return None
    files = ServerFiles(os.environ[PRIVATE_VARIABLE], context.config.launch.scheme == "https")
    certificate = ""
    if files.tls:
        from ...rollout.engines.certificate import write_certificate

        certificate = write_certificate(files, host)
    files.write(asyncio.run(request_access(context, name, certificate)))
    return files


def _become(arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    os.execvpe(arguments[0], arguments, {**os.environ, **environment, **temporary_environment()})
