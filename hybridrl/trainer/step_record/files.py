"""A kept step on storage: `recorded/global_step_N/` in the run's directory, written and verified like a checkpoint.

    before/ after/   engines of all trained roles, before the step and after it (torch.distributed.checkpoint)
    stages/          one file per stage: the columns that it added or replaced
    trainer.json     why the step was kept, ranks, metrics, the driver's state before the step, the stages in order
    config.yaml      the settings of the run

`StepRecorder` writes it in the driver, and `hybridrl replay` reads it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import CheckpointError
from hybridrl.protocol import DataProto
from hybridrl.trainer.checkpoint.reading import damage_named, read_trainer_state, verify_manifest
from hybridrl.trainer.checkpoint.store import TRAINER_STATE, CheckpointStore

RECORDS, STAGES, BEFORE, AFTER = "recorded", "stages", "before", "after"
STATE_KINDS = {"why": list, "ranks": dict, "metrics": dict, "states": dict, "stages": list}
"""What readers of a kept step's `trainer.json` rely on."""
MAX_RANKS = 10_000


@dataclass(frozen=True)
class StageOutput:
    """The batch after a stage. `batch` is None if the step had none then."""

    name: str
    batch: DataProto | None

    def copy(self) -> DataProto | None:
        """Return the batch for another stage, which may add and remove columns and entries of `meta_info`."""
        if self.batch is None:
            return None
        batch = self.batch.select()
        batch.meta_info = dict(batch.meta_info)
        return batch

    def columns(self) -> dict[str, Any]:
        """Return all columns, tensors and arrays, by name."""
        if self.batch is None:
            return {}
        return {**dict(self.batch.batch.items() if self.batch.batch is not None else ()), **self.batch.non_tensor_batch}


def changed_columns(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that are new or another object. Stages never write into a column."""
    return {name: column for name, column in after.items() if before.get(name) is not column}


def write_stages(directory: str, outputs: Sequence[StageOutput]) -> list[dict[str, Any]]:
    """Write what each stage changed to `directory`; return the stages for `read_stages`, JSON-able."""
    os.makedirs(directory)
    known: dict[str, Any] = {}
    stages = []
    for number, output in enumerate(outputs):
        columns = output.columns()
        changed = changed_columns(known, columns)
        file = f"{number:02}_{output.name}.batch"
        meta_info = output.batch.meta_info if output.batch is not None else {}
        DataProto.from_single_dict(changed, meta_info).save_to_disk(os.path.join(directory, file))
        stages.append({"name": output.name, "file": file, "columns": sorted(columns)})
        known = columns
    return stages


def read_stages(directory: str, stages: Sequence[Mapping[str, Any]]) -> list[StageOutput]:
    """Return the stages that `write_stages` wrote. Columns that a stage did not change are the same objects."""
    known: dict[str, Any] = {}
    outputs = []
    for stage in stages:
        file = os.path.join(directory, os.path.basename(stage["file"]))
        if not os.path.isfile(file):  # to read from a pipe would wait
            raise ValueError(f"{file} is no file")
        changed = DataProto.load_from_disk(file)
        columns = known | StageOutput("", changed).columns()
        known = {name: columns[name] for name in stage["columns"]}
        outputs.append(StageOutput(stage["name"], DataProto.from_single_dict(known, changed.meta_info)))
    return outputs


def record_store(run: str) -> CheckpointStore:
    """Return the kept steps of the run in this directory."""
    return CheckpointStore(os.path.join(run, RECORDS))


@dataclass(frozen=True)
class StepRecord:
    """A kept step.

    Attributes:
        path: Its directory.
        state: What `trainer.json` has.
        outputs: The batch after each stage, in order.
    """

    path: str
    state: Mapping[str, Any]
    outputs: Sequence[StageOutput]


def read_record(run: str, step: int) -> StepRecord:
    """Return the kept step of this number.

    Raises:
        CheckpointError: The run has not kept this step, or a file of it is damaged.
    """
    store = record_store(run)
    if step not in store.steps():
        kept = f"it has kept {', '.join(map(str, store.steps()))}" if store.steps() else "it has kept none"
        raise CheckpointError(
            f"{run}: step {step} is not among the kept steps ({kept}); trainer.record_steps=[{step},nonfinite,spike] "
            "keeps it in a run that reaches it, also in one that resumes from a checkpoint before it"
        )
    path = store.path(step)
    verify_manifest(path)
    state = read_trainer_state(path)
    with damage_named(os.path.join(path, TRAINER_STATE)):  # somebody else may have written it
        wrong = [key for key, kind in STATE_KINDS.items() if not isinstance(state[key], kind)]
        if wrong or not all(isinstance(one, str) for one in state["why"]):
            raise ValueError(f"{wrong[0] if wrong else 'why'} is no value of a kept step")
        if not state["ranks"] or not all(number in range(1, MAX_RANKS + 1) for number in state["ranks"].values()):
            raise ValueError(f"ranks={state['ranks']}; a role has 1 to {MAX_RANKS}")
        return StepRecord(path, state, read_stages(os.path.join(path, STAGES), state["stages"]))
