"""Records with a tracker of the product, and reads with its library what was recorded, in the library's own interpreter:
`python tracker_runs.py NAME FOLDER`.

A run is recorded by two processes, as one that is resumed, and read by a third. They are forked from one that has imported what
takes seconds, and has used nothing of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 100.0


def import_product() -> None:
    """`slipstream` is the repository's root, which this interpreter knows nothing of."""
    spec = importlib.util.spec_from_file_location(
        "slipstream", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["slipstream"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def record(process: int, name: str, folder: Path) -> None:
    """Two steps of a run, as test_monitor_trackers records them: those of its first process, or of its second."""
    import numpy as np
    from slipstream.configs import load
    from slipstream.monitor.trackers import open_trackers
    from slipstream.monitor.trackers.base import SampledTokens, Samples, TrajectorySample
    from slipstream.monitor.trackers.thread import close_trackers

    def decode(ids: Any) -> str:
        return " ".join(map(str, ids)) + "\n<b># not markup"

    logging.basicConfig(level=logging.INFO)
    (tracker,) = open_trackers([name], folder, load("quickstart"))
    for step in (1, 2):
        at = 2 * process + step
        row = TrajectorySample(at, "3.0.1.0", "sums", "task | 1", "finished", 0.5, 1.25, 9, "", "")
        tokens = SampledTokens(row, np.arange(3, dtype=np.int32), np.arange(6, dtype=np.int32))
        tracker.sampled(at, Samples([tokens], decode))
        tracker.log(at, {"reward_mean": 0.25 * step, "staleness_tokens/0": 7.0, "environment/odd: näme!": 1.0})
    tracker.evaluated(2 * process + 1, {"evaluation/reward_mean": 0.75})
    close_trackers([tracker], WAIT_S)


def read_mlflow(folder: Path) -> dict[str, Any]:
    import mlflow
    from mlflow import MlflowClient

    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")  # `load_table` knows no other
    client = MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "slipstream"]
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.name
    table = client.load_table(experiment.experiment_id, run_ids=[run.info.run_id], artifact_file="trajectories.json")
    return {
        "runs": len(runs),
        "rewards": {one.step: one.value for one in client.get_metric_history(run.info.run_id, "reward_mean")},
        "config": run.data.params["model.path"],
        "texts": list(table["response"]),
    }


def read_swanlab(folder: Path) -> dict[str, Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: list[Any] = []
    for file in sorted((folder / "swanlab").glob("run-*/run-*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        while (data := reader.scan()) is not None:
            found.append(Record())
            found[-1].ParseFromString(data)
    starts = [one.start for one in found if one.HasField("start")]
    assert {(start.project, start.name) for start in starts} == {("slipstream", folder.name)}
    assert not any(one.HasField("log") for one in found)  # the process's output
    rewards = [one.scalar for one in found if one.HasField("scalar") and one.scalar.key == "reward_mean"]
    (config, *_) = sorted((folder / "swanlab").glob("run-*/files/config.yaml"))
    return {
        "runs": len({start.id for start in starts}),
        "rewards": {one.step: one.value.number for one in rewards},
        "config": yaml.safe_load(config.read_text())["model"]["value"]["path"],
        "texts": [file.read_text() for file in sorted((folder / "swanlab").glob("run-*/media/text/*.txt"))],
    }


def read_trackio(folder: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(Api().runs("slipstream"))
    run = runs[0]
    logs = SQLiteStorage.get_logs("slipstream", run.name)
    return {
        "runs": len(runs),
        "rewards": {row["step"]: row["reward_mean"] for row in logs if "reward_mean" in row},
        "config": run.config["model"]["path"],
        "texts": [row["response"] for one in logs if "trajectories" in one for row in one["trajectories"]["_value"]],
    }


def in_a_process(work: Callable[[], object]) -> None:
    """Do `work` in a process of its own, which must end well."""
    if (pid := os.fork()) == 0:
        work()
        sys.exit()
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    import_product()
    # Trackio reads at its import where its database is, which the product says before it imports it.
    libraries = () if name == "trackio" else (name,)
    for module in ("slipstream.configs", "slipstream.monitor.trackers", *libraries):
        importlib.import_module(module)
    assert threading.active_count() == 1, threading.enumerate()
    for process in range(2):
        in_a_process(lambda process=process: record(process, name, folder))
    in_a_process(lambda: sys.stdout.write(json.dumps(globals()[f"read_{name}"](folder)) + "\n"))


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules would be taken for others
    os.environ["NO_COLOR"] = "1"
    main()
