"""`slipstream serve`: one inference server of a config, for a run elsewhere that does not start its own. This process prepares what
the server needs, and is replaced by it.

Invariants:
- The server is the one that a run of this config would start, by the same command line.
- It answers only clients with its tokens, and serves TLS. Tokens and keys are read from a private folder, never from a command line
  or an environment.
- Before it is started everything that can be refused is.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import structs

from ..common.modelscope import local_folder
from ..common.owned_folders import PRIVATE_VARIABLE, private_folder, temporary_environment
from ..configs import Config
from ..configs.engine_checks import SERVERS, URL, is_server_url, nodes_of
from ..configs.engines import ENGINE_OPTIONS, NODES
from ..errors import ConfigError
from ..learner.hub import require_model
from ..rollout.engines.access import ServerFiles
from ..rollout.engines.server_keys import ServerKeys, make_server_keys, read_server_keys

INSTANCE_BYTES = 16  # of a random number that no other start has


def serve_engine(config: Config, address: str, keys: str, tell: Callable[[str], None]) -> NoReturn:
    """Become a server of `config` at `address`, `https://HOST:PORT`, with the keys in the file `keys`, which is made where there is
    none. Raises ConfigError: the address, the file, the model or the config cannot be used."""
    found = URL.fullmatch(address)
    if found is None or not is_server_url(address):
        raise ConfigError(f"--address: {address!r} is not of the form https://HOST:PORT")
    if config.launch.colocated:
        raise ConfigError(
            "launch.kind=colocated: servers sleep there on the devices of a learner, and this one is by itself; allowed are local, "
            "ray and ray_cluster"
        )
    if (nodes := nodes_of(config.rollout.engine)) > 1:
        raise ConfigError(
            f"{ENGINE_OPTIONS}.{NODES}={nodes}: `slipstream serve` is the process of one host; allowed is 1, or a run that starts "
            "its own servers"
        )
    require_model(config.model.path, "model.path")
    from ..rollout.engines import registry as servers
    from .external_servers import describe_server

    description = describe_server(config, secrets.token_hex(INSTANCE_BYTES))
    path = local_folder(config.model.path, "model.path", weights=True)
    config = structs.replace(config, model=structs.replace(config.model, path=path))
    servers.check_options(config)
    host, port, own = found[1], int(found[2]), load_or_make_server_keys(Path(keys), found[1])
    # With equal seeds two servers sample the same tokens for the members of a group.
    digest = hashlib.sha256(own.public.encode()).digest()
    seed = (config.seed + int.from_bytes(digest[:4], "big")) % 2**31
    folder = private_folder(inherited=True)
    files = ServerFiles(str(folder.path), tls=True)
    try:
        arguments = servers.command(config, host, port, seed=seed, files=files)
        own.install(files, msgspec.json.encode(description))
    except BaseException:
        folder.close()
        raise
    tell(
        f"{servers.kind_of(config.rollout.engine)} at {address}; of a run that uses it: {SERVERS}={{{address}: {keys}}}"
    )
    variables = servers.environment(config) | temporary_environment() | {PRIVATE_VARIABLE: str(folder.path)}
    os.execvpe(arguments[0], arguments, {**os.environ, **variables})


def load_or_make_server_keys(path: Path, host: str) -> ServerKeys:
    """The keys in a file, which is made with new ones, for a server at `host`, where there is none. Raises ConfigError."""
    try:
        return make_server_keys(path, host)
    except FileExistsError:
        return read_server_keys("--keys", str(path))
    except OSError as error:
        raise ConfigError(f"--keys: {path} cannot be written: {error}") from None
