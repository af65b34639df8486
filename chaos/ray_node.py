"""Ray's command line without Ray Serve, for hosts under fault injection: `python -m slipstream.chaos.ray_node start --block ...` is
`ray start --block ...`.

The import of Ray Serve, of which a node has nothing, takes a second of CPU: it brings pandas and FastAPI. Ray's command line leaves
out the groups of commands that it cannot import.
"""

from __future__ import annotations

import sys

SERVE = "ray.serve.scripts"

sys.modules[SERVE] = None  # type: ignore[assignment]  # an import of it raises ImportError
try:
    from ray.scripts.scripts import main
finally:
    del sys.modules[SERVE]

if __name__ == "__main__":
    main()
