"""The file of keys of a server that `slipstream serve` starts: its tokens, its key pair for acknowledgments, and its certificate.

    slipstream serve --keys FILE: made where missing ──copied by its owner──> the supervisor's host: `rollout.engine.replicas`

Invariants:
- A file that others than its owner may read is refused at both ends.
- Each server has a file of its own: a weight push takes an acknowledgment only from the server that it went to.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...errors import ConfigError
from ...rpc.security import FILE, KeyPair, make_pair
from .access import DESCRIPTION, ServerAccess, ServerFiles, fingerprint, make_access, write_private

FORBIDDEN_MODE = stat.S_IRWXG | stat.S_IRWXO


class ServerKeys(msgspec.Struct, frozen=True):
    """What the file holds."""

    request: str  # tokens, see `ServerAccess`
    control: str
    public: str  # the server's pair, see `rpc.security`
    secret: str
    certificate: str  # in PEM
    certificate_key: str

    def __repr__(self) -> str:
        return "ServerKeys(...)"  # logs must not show them

    @property
    def access(self) -> ServerAccess:
        """What opens the server to a client. Raises ValueError: the certificate is none."""
        return ServerAccess(self.request, self.control, fingerprint(self.certificate))

    def install(self, files: ServerFiles, description: bytes) -> None:
        """Write what the server reads into its private folder. Raises OSError."""
        files.write(self.access)
        write_private(Path(files.certificate), self.certificate.encode())
        write_private(Path(files.key), self.certificate_key.encode())
        write_private(Path(files.folder, FILE), msgspec.json.encode(KeyPair(self.public, self.secret)))
        write_private(Path(files.folder, DESCRIPTION), description)


def make_server_keys(path: Path, host: str) -> ServerKeys:
    """New keys of a server at `host`, in a new file that only its owner may read. Raises OSError: it cannot be written."""
    from .certificate import make_certificate

    tokens, pair = make_access(), make_pair()
    key, certificate = make_certificate(host)
    keys = ServerKeys(tokens.request, tokens.control, pair.public, pair.secret, certificate, key)
    write_private(path, msgspec.json.encode(keys))
    return keys


def read_server_keys(key: str, path: str) -> ServerKeys:
    """The keys in a file. Raises ConfigError naming `key`: there is none, it holds no keys, or others may read it."""
    try:
        mode = Path(path).stat().st_mode
        keys = msgspec.json.decode(Path(path).read_bytes(), type=ServerKeys)
        fingerprint(keys.certificate)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{key}: {path} holds no keys of a server ({why}); copy the file that `slipstream serve` made"
        ) from None
    if mode & FORBIDDEN_MODE:
        raise ConfigError(
            f"{key}: {path} has mode {stat.S_IMODE(mode):04o}, so that others than its owner may use it; allowed is 0600: "
            f"chmod 600 {path}"
        )
    return keys


def read_all_keys(key: str, files: Mapping[str, str]) -> dict[str, ServerKeys]:
    """The keys of each server by its URL, from its file. Raises ConfigError as `read_server_keys`, and where two have the same."""
    found, owners = dict[str, ServerKeys](), dict[str, str]()
    for url, file in files.items():
        keys = found[url] = read_server_keys(key, file)
        if (other := owners.setdefault(keys.public, url)) != url:
            raise ConfigError(f"{key}: {other} and {url} have the same keys; each server needs a file of its own")
    return found
