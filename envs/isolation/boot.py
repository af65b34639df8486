"""Starts the process that holds isolated environments in whatever interpreter runs this file: `python boot.py SPEC`. It imports
nothing of Slipstream before it knows where the package is, and says in one line why the process cannot start.

`SPEC` is JSON: `root`, the folder of the package slipstream; `paths`, where the user's modules are; `ready`, a file descriptor for
one line of JSON, `{"address": ...}` or `{"error": ...}`; `stack`, one for the stacks of a process that is aborted; `parent`, the id
of the process that started this one.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import resource
import sys
from typing import Any

NEEDED = (
    "msgspec pyzmq numpy pyyaml"  # what the host imports beyond the standard library; as in requirements/env-host.txt
)
OLDEST = (3, 11)  # Python that our sources are written for


def load_package(root: str) -> None:
    """Make `slipstream` importable without what else its site-packages hold."""
    path = os.path.join(root, "__init__.py")
    spec = importlib.util.spec_from_file_location("slipstream", path, submodule_search_locations=[root])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["slipstream"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    sys.path.pop(0)  # this file's folder, whose modules would be taken for others
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort writes the stacks, no core
    faulthandler.enable(file=spec["stack"], all_threads=True)

    def tell(**line: str) -> None:
        os.write(spec["ready"], json.dumps(line).encode() + b"\n")
        os.close(spec["ready"])

    sys.path += [path for path in spec["paths"] if path not in sys.path]
    try:
        if sys.version_info < OLDEST:
            raise ImportError(f"Python {sys.version.split()[0]} is too old; it must be {'.'.join(map(str, OLDEST))}")
        if "slipstream" not in sys.modules:
            load_package(spec["root"])
        importlib.import_module("slipstream.common.process").set_parent_death_signal(spec["parent"])
        run = importlib.import_module("slipstream.envs.isolation.host").run
    except ImportError as error:
        return tell(error=f"{error}; run `{sys.executable} -m pip install {NEEDED}`")
    except BaseException as error:
        tell(error=f"{type(error).__name__}: {error}")
        raise
    run(spec["peer"], lambda address: tell(address=address))


if __name__ == "__main__":
    main()
