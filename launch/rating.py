"""`slipstream rate`: how often a model solves each row of a data set, and the rows between two bounds as a new data set.

    CONFIG ──> server, rater ──a line per row──> OUT.ratings.jsonl ──bounds──> OUT

Invariants:
- Every row that is trained on is rated once: a rating that was killed goes on with the rows that have none.
- Ratings of one file are by one model, of the same rows, under the same conditions; others are refused. A file of rows or of a
  reward function is the same as long as its bytes are.
- Other bounds cost nothing: the ratings stay.
- A row whose episodes all failed has no rate, and is not in OUT.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from ..common.fsio import write_atomic
from ..common.scores import TaskRating
from ..configs import Config
from ..configs.engine_checks import require_own_servers
from ..configs.environments import DataSection, without_placement
from ..configs.evaluation import Evaluation
from ..errors import ConfigError, Interrupted, StoreError
from ..monitor.output import open_console
from ..monitor.terminal import open_view
from .preflight import preflight, writable
from .resources import gpus_of
from .run import make_supervisor, with_absolute_paths, without_reward_model
from .run_inputs import RunInputs
from .work_folder import work_folder

if TYPE_CHECKING:
    from ..envs.dataset.source import DatasetSource

PLAN = "rating.json"  # in the folder of the processes


class RatingPlan(msgspec.Struct, frozen=True):
    """What the role `rater` does: it adds to the file `ratings` a line for each of the first `rows` rows (0: all) without one."""

    ratings: str
    samples: int
    rows: int


class RatingsHeader(msgspec.Struct, frozen=True):
    """The first line of a file of ratings: what they hold for."""

    model: str
    samples: int
    conditions: str  # digest of the data set's and the agent's section and their files, the sampling and the seed


class RatingSummary(msgspec.Struct, frozen=True):
    rows: int  # that have a rating
    unsolved: int  # of these, never solved
    solved: int  # of these, solved by every attempt
    failed: int  # rows without a rate
    kept: int  # within the bounds


def check_request(out: Path, bounds: tuple[float, float]) -> None:
    """Raises ConfigError where no rates lie within `bounds`, or `out` cannot be written."""
    low, high = bounds
    if not 0.0 <= low <= high <= 1.0:
        raise ConfigError(f"--min {low:g} --max {high:g}: allowed are rates from 0 to 1, the smaller one first")
    if out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"--out {out}: the rows are written as JSON lines; name a file that ends in .jsonl")
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file")
    if out.exists() and not ratings_of(out).exists():
        raise ConfigError(f"--out {out}: that file exists, and is not of an earlier rating; name another")
    writable("--out", str(out.parent))


def ratings_of(out: Path) -> Path:
    """Where what was measured for the data set `out` is."""
    return out.with_name(f"{out.name}.ratings.jsonl")


def rate(config: Config, model: str, out: Path, samples: int, rows: int, bounds: tuple[float, float]) -> RatingSummary:
    """Rate the first `rows` rows (0: all) that `config` trains on, `samples` attempts each by `model`, as messages call it, and
    write those whose rate lies within `bounds` to `out`, with the columns `pass_rate` and `pass_attempts`. `check_request` has
    checked these two. Raises ConfigError, RoleDied and Interrupted as `evaluate`, StoreError where `out` cannot be written."""
    require_own_servers(config, "rate")
    config = structs.replace(without_reward_model(with_absolute_paths(config)), evaluation=Evaluation(tasks=0))
    if not isinstance(config.env, DataSection):
        kind = config.env.__struct_config__.tag
        raise ConfigError(f"env.kind: {kind} has no rows to rate; allowed are dataset and mcp")
    ratings = ratings_of(out)
    inputs = preflight(config, pushed=False)
    _begin(ratings, _header(config, config.env, model, samples))
    dataset = _training_rows(inputs)
    wanted = sorted(dataset.row_number(task) for task in range(len(dataset)))[: rows or None]
    if not {one.task for one in read_ratings(ratings)}.issuperset(wanted):
        _measure(config, RatingPlan(str(ratings.resolve()), samples, rows))
    return _write(dataset, out, read_ratings(ratings), bounds)


def _training_rows(inputs: RunInputs) -> DatasetSource:
    """The rows of the data set that are trained on, without those whose prompts are too long."""
    from ..envs.dataset.source import DatasetSource

    inputs.leave_out_long_prompts()
    source = inputs.train[0].source
    assert isinstance(source, DatasetSource)
    return source


def _header(config: Config, data: DataSection, model: str, samples: int) -> RatingsHeader:
    rollout = config.rollout
    files = [Path(data.path), Path(data.reward.rpartition(":")[0])]
    conditions = (
        without_placement(data),
        config.agent,
        (rollout.temperature, rollout.top_p, config.seed),
        [_digest(file) for file in files if file.is_file()],
    )
    return RatingsHeader(model, samples, hashlib.sha256(msgspec.json.encode(conditions)).hexdigest()[:16])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _begin(ratings: Path, header: RatingsHeader) -> None:
    """Start the file. Raises ConfigError where there is one with another header."""
    if not ratings.exists():
        ratings.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(ratings, msgspec.json.encode(header) + b"\n")
        return
    first = ratings.read_bytes().partition(b"\n")[0]
    try:
        found = msgspec.json.decode(first, type=RatingsHeader)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{ratings}, line 1: {error}; it holds no ratings, so name another --out") from None
    if found == header:
        return
    why = "under other conditions: other rows or reward, another section `agent`, sampling or seed"
    for name in ("model", "samples"):
        if getattr(found, name) != getattr(header, name):
            why = f"with {name} {getattr(found, name)}, not {getattr(header, name)}"
    raise ConfigError(f"{ratings} was measured {why}; remove it, or name another --out")


def read_ratings(path: Path) -> list[TaskRating]:
    """The ratings so far; a last line that a crash tore off does not count. Raises ConfigError naming another line that is none."""
    lines = path.read_bytes().split(b"\n")[1:-1]
    found = list[TaskRating]()
    for number, line in enumerate(lines, start=2):
        try:
            found.append(msgspec.json.decode(line, type=TaskRating))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: no rating: {error}") from None
    return found


def _measure(config: Config, plan: RatingPlan) -> None:
    try:
        with (
            work_folder(config, "rate", Path(plan.ratings).parent) as folder,
            open_view(config, open_console(stderr=True)) as view,
        ):
            write_atomic(folder / PLAN, msgspec.json.encode(plan))
            asyncio.run(make_supervisor(config, folder, view, gpus_of(config), named_by="--out").rate())
    except Interrupted:
        raise Interrupted("interrupted; the same command goes on with the rows that are not rated yet") from None


def _write(
    source: DatasetSource, out: Path, ratings: Sequence[TaskRating], bounds: tuple[float, float]
) -> RatingSummary:
    rated = sorted((one for one in ratings if one.attempts), key=lambda one: one.task)
    kept = [one for one in rated if bounds[0] <= one.solves / one.attempts <= bounds[1]]
    lines = (
        msgspec.json.encode(
            source.row(one.task) | {"pass_rate": one.solves / one.attempts, "pass_attempts": one.attempts}
        )
        for one in kept
    )
    try:
        write_atomic(out, b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise StoreError(f"--out {out} cannot be written: {error}; the ratings stay in {ratings_of(out)}") from None
    return RatingSummary(
        rows=len(rated),
        unsolved=sum(one.solves == 0 for one in rated),
        solved=sum(one.solves == one.attempts for one in rated),
        failed=len(ratings) - len(rated),
        kept=len(kept),
    )
