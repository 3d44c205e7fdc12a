"""Loggers that send to services: Weights & Biases, and MLflow."""

import os
import re
import time
import uuid
from importlib import import_module

from hybridrl.config.introspection import flatten
from hybridrl.trainer.run.tracking import Metrics, RunInfo


class WandbTracker:
    """Weights & Biases, online or as WANDB_MODE says.

    A resumed run continues under its id; repeated steps keep their first values.
    """

    def __init__(self, run: RunInfo) -> None:
        run_id = _run_id(run, "wandb_run_id") or uuid.uuid4().hex[:8]
        self._run = import_module("wandb").init(
            project=run.project_name,
            name=run.experiment_name,
            dir=str(run.directory),
            config=dict(run.config),
            id=run_id,
            resume="allow",
        )
        (run.directory / "wandb_run_id").write_text(run_id)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow, at MLFLOW_TRACKING_URI or in the run's own `mlflow.db`.

    View it with `mlflow ui --backend-store-uri sqlite:///.../mlflow.db`. MLflow forbids `@` and other characters in
    names: `mean@4` becomes `mean_at_4`.
    """

    def __init__(self, run: RunInfo) -> None:
        self._mlflow = import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.directory / 'mlflow.db'}"
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        run_id = _run_id(run, "mlflow_run_id")
        if run_id is None:
            run_id = self._client.create_run(self._experiment(run), run_name=run.experiment_name).info.run_id
            parameters = [
                self._mlflow.entities.Param(_mlflow_name(key), str(value)[:6000]) for key, value in flatten(run.config)
            ]
            # MLflow's limits: 100 parameters per call, 6000 characters each.
            for first in range(0, len(parameters), 100):
                self._client.log_batch(run_id, params=parameters[first : first + 100])
            (run.directory / "mlflow_run_id").write_text(run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id

    def _experiment(self, run: RunInfo) -> str:
        found = self._client.get_experiment_by_name(run.project_name)
        return found.experiment_id if found else self._client.create_experiment(run.project_name)

    def log(self, metrics: Metrics, step: int) -> None:
        now_ms = int(time.time() * 1000)
        entries = [
            self._mlflow.entities.Metric(_mlflow_name(name), float(value), now_ms, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(entries), 1000):  # MLflow's limit for one call
            self._client.log_batch(self._run_id, metrics=entries[first : first + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _run_id(run: RunInfo, file_name: str) -> str | None:
    """Return a service's id of the run that is resumed, None for a new run."""
    path = run.directory / file_name
    return path.read_text().strip() if run.start_step > 0 and path.exists() else None


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))
