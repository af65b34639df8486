"""`slipstream train` without the correction that it insists on: what `bench learning` shows is why.

Invariants:
- The run is an ordinary one in everything else: the same config, preflight, processes and report.
- Only the check of combinations is left out, after everything but the correction has passed it.
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from ..configs import load, loading
from ..configs.algorithm import NoCorrection
from ..launch import preflight, run
from ..launch.resources import wait_passively


def main() -> None:
    """Train what `CONFIG key=value ...` on the command line says, without a correction."""
    wait_passively()
    config = load(sys.argv[1], sys.argv[2:])
    algorithm = replace(config.learner.algorithm, correction=NoCorrection())
    del preflight.CHECKS["config"]
    loading.check = lambda config: None  # the report reads the run's config once more
    run.train(replace(config, learner=replace(config.learner, algorithm=algorithm)))


if __name__ == "__main__":
    main()
