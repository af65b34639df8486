"""MLflow: a run in the experiment MLFLOW_EXPERIMENT_NAME, else `slipstream`, at MLFLOW_TRACKING_URI, else in `<run>/mlflow`.

Invariants:
- Only the client is used: MLflow's module-level functions keep one run per process.
- Its database is whole or absent: MLflow makes the tables one by one, and never ends what a process that was killed had begun.
- A name that MLflow refuses, as of an environment's metric, is written with `_` in place of its odd characters.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...configs import Config, describe
from .base import PROJECT, TABLE, TrajectorySample, run_name

DATABASE = "mlflow.db"
REFUSED = re.compile(r"[^\w\-./ ]")
BATCH = 1000  # metrics that MLflow takes at once
VALUE = 500  # characters of a parameter; the whole config is an artifact


class Mlflow:
    def __init__(self, folder: Path, config: Config) -> None:
        connect = importlib.import_module("mlflow").MlflowClient
        self._metric = importlib.import_module("mlflow.entities").Metric
        local = folder.resolve() / "mlflow"
        local.mkdir(parents=True, exist_ok=True)
        if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
            uri = f"sqlite:///{local / DATABASE}"
            if not (local / DATABASE).exists():
                part = local / f".{os.getpid()}.db"
                connect(tracking_uri=f"sqlite:///{part}")
                part.replace(local / DATABASE)
        self._client = client = connect(tracking_uri=uri)
        known = folder / "mlflow-id"
        if known.exists():
            self._id = known.read_text().strip()
            client.update_run(self._id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = client.get_experiment_by_name(name)
            artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else (local / "artifacts").as_uri()
            which = experiment.experiment_id if experiment else client.create_experiment(name, artifacts)
            self._id = client.create_run(which, run_name=run_name(folder)).info.run_id
            known.write_text(self._id)
            for field in describe(config):
                client.log_param(self._id, field.key, field.value[:VALUE])
        client.log_dict(self._id, msgspec.to_builtins(config), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(REFUSED.sub("_", name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + BATCH])

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, values)

    def sampled(self, step: int, rows: Sequence[TrajectorySample]) -> None:
        columns = {name: [getattr(row, name) for row in rows] for name in TrajectorySample.__struct_fields__}
        self._client.log_table(self._id, columns, f"{TABLE}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)
