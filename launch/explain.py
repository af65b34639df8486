"""`slipstream explain` on a folder: the limits of this machine, and following a run that goes on."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from watchfiles import watch

from ..common import accelerator
from ..configs import Config, load, run_config
from ..errors import SlipstreamError, describe
from ..monitor.alerts import ALERTS
from ..monitor.metrics import METRICS
from ..planner.explain.evidence import Hardware
from ..planner.explain.explain import explain
from ..planner.explain.findings import Explanation
from .resources import gpus_of, placed_by_ray, ranks_by_kind
from .run_lock import is_locked

log = logging.getLogger(__name__)

FOLLOWED = (METRICS, ALERTS)
LOOK_S = 5.0  # a run that ends changes no file that is watched
AGAIN = (
    20.0  # after an explanation that took t seconds the next begins t times this later: a twentieth of one core at most
)
LEAST_S = 10.0  # and no sooner than this


def hardware_of(config: Config, gpus: int | None = None) -> Hardware:
    """Of this machine, or with `gpus` GPUs. Raises ConfigError where the engine is not installed."""
    cores, needed = os.cpu_count() or 1, gpus_of(config)
    if needed:
        mine = sum(number for role, number in needed.items() if role.startswith(("engine-", "learner-")))
        others, here = sum(needed.values()) - mine, accelerator.count()
    else:
        others, here = sum(ranks_by_kind(config).values()) - config.learner.backend.ranks, cores
    devices = gpus if gpus is not None else None if placed_by_ray(config) else here
    return Hardware("GPUs" if needed else "cores", devices, others, cores)


def explain_run(folder: Path, gpus: int | None = None) -> Explanation:
    """Raises as `planner.explain.explain.explain`."""
    hardware = hardware_of(load(str(run_config(folder))), gpus)
    return explain(folder, hardware, active=is_locked(folder))


def explain_or_say_why(folder: Path, *, active: bool) -> Explanation:
    """Where the run's files allow no explanation, one that says why."""
    try:
        return explain(folder, hardware_of(load(str(run_config(folder)))), active=active)
    except KeyboardInterrupt:  # of a user who does not want to wait for simulations; the report is written nevertheless
        return Explanation(
            run=str(folder), alerts=(), note=f"not explained; `slipstream explain {shlex.quote(str(folder))}` does"
        )
    except SlipstreamError as error:
        log.warning("the run is not explained: %s", error)
        return Explanation(run=str(folder), alerts=(), note=f"not explained: {error}")
    except Exception as error:  # a finished run does not fail by its explanation
        log.exception("the run is not explained")
        return Explanation(run=str(folder), alerts=(), note=f"not explained: {describe(error)}")


def follow(folder: Path, gpus: int | None = None) -> Iterator[Explanation]:
    """An explanation now, another after steps or alerts of the run, and a last one when it has ended. Raises as `explain_run`."""
    while True:
        going, sizes, began = is_locked(folder), _sizes(folder), time.process_time()
        yield explain_run(folder, gpus)
        if not going:
            return
        again = time.monotonic() + max(LEAST_S, AGAIN * (time.process_time() - began))
        looks = watch(
            folder,
            watch_filter=lambda change, path: Path(path).name in FOLLOWED,
            recursive=False,
            rust_timeout=round(1e3 * LOOK_S),
            yield_on_timeout=True,
        )
        for _ in looks:
            if not is_locked(folder) or (time.monotonic() >= again and _sizes(folder) != sizes):
                break


def _sizes(folder: Path) -> list[int]:
    return [path.stat().st_size if path.exists() else 0 for path in (folder / name for name in FOLLOWED)]
