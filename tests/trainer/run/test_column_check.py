"""A stage that does anything else to the batch than it declares is named, with the column."""

import pytest
import torch

from hybridrl.framework import OnlineRLContext, Task, stage
from hybridrl.protocol import DataProto
from hybridrl.trainer.run.column_check import check_columns
from hybridrl.trainer.run.middleware import Column
from hybridrl.trainer.run.setup import CHECK_VARIABLE, run_stages

TABLE = {
    "responses": Column("int64", "B R", ("gen",), "tokens"),
    "scores": Column("float32", "B R", ("reward",), "rewards"),
    "prompts": Column("int64", "B P", ("gen",), "tokens"),
    "input_ids": Column("int64", "B T", ("gen",), "tokens"),
}


def context() -> OnlineRLContext:
    tensors = {
        "prompts": torch.zeros(2, 4, dtype=torch.int64),
        "responses": torch.zeros(2, 3, dtype=torch.int64),
        "input_ids": torch.zeros(2, 7, dtype=torch.int64),
    }
    return OnlineRLContext(batch=DataProto.from_dict(tensors))


def run(change, *, reads=("responses",), writes=("scores",)) -> None:
    def fn(ctx):
        change(ctx.batch.batch)

    check_columns(stage("reward", reads=reads, writes=writes)(fn), table=TABLE)(context())


def set_scores(columns) -> None:
    columns["scores"] = torch.zeros(2, 3)


def test_a_stage_that_does_what_it_declares_passes():
    run(set_scores)
    run(lambda columns: columns.pop("responses"), writes=())  # it may consume what it reads
    run(lambda columns: None, reads=(), writes=())


@pytest.mark.parametrize(
    ("change", "declared", "message"),
    [
        (
            set_scores,
            {"reads": ("values",)},
            r"'reward' requires the columns \['values'\]; the batch has",
        ),
        (lambda columns: None, {}, r"'reward' declares to write the columns \['scores'\]"),
        (set_scores, {"writes": ()}, r"'reward' wrote the columns \['scores'\], and declares \[\]"),
        (
            lambda columns: columns.__setitem__("prompts", columns["prompts"] + 1),
            {"writes": ()},
            r"wrote the columns \['prompts'\]",
        ),
        (lambda columns: columns.pop("prompts"), {"writes": ()}, r"removed the columns \['prompts'\]"),
        (
            lambda columns: columns.__setitem__("scores", torch.zeros(2, 3).double()),
            {},
            "column 'scores' is float64, expected float32",
        ),
        (
            lambda columns: columns.__setitem__("scores", torch.zeros(2, 4)),
            {},
            r"column 'scores' has the shape \(2, 4\), expected \(B R\) with {.*'R': 3",
        ),
        (lambda columns: columns.__setitem__("scores", torch.zeros(2)), {}, r"the shape \(2,\), expected \(B R\)"),
    ],
)
def test_any_other_change_is_refused(change, declared, message):
    with pytest.raises(TypeError, match=message):
        run(change, **declared)


def test_a_stage_without_a_batch_is_not_checked():
    fn = check_columns(stage("gen", reads=("prompts",), writes=("responses",))(lambda ctx: None), table=TABLE)
    fn(OnlineRLContext(batch=None))


@pytest.mark.parametrize("yields", [True, False])
def test_what_submitted_work_writes_is_checked_when_it_has_ended(yields):
    def score(ctx):
        yield
        if yields:
            ctx.batch.batch["scores"] = torch.zeros(2, 3)

    checked = check_columns(stage("reward", writes=("scores",), submits=True)(score), table=TABLE)
    with Task(ctx=context()) as task:
        task.use(checked)
        if yields:
            return task.run(max_step=1, overlap={})
        with pytest.raises(TypeError, match=r"declares to write the columns \['scores'\]"):
            task.run(max_step=1, overlap={})


def test_the_check_is_on_in_tests_and_off_without_the_variable(monkeypatch):
    def generate(ctx):
        ctx.batch = context().batch
        ctx.batch.batch["scores"] = torch.zeros(2, 3)

    stages = [stage("reward", writes=("responses",))(generate)]
    with pytest.raises(TypeError, match="wrote the columns"):
        run_stages(stages, max_step=1, columns=TABLE)
    monkeypatch.delenv(CHECK_VARIABLE)
    run_stages(stages, max_step=1, columns=TABLE)
