"""Utilization: what is divided by what, and stages that get no metric."""

import numpy as np
import pytest
import torch

from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.trainer.utilization import ModelUse, SequenceRows, Utilization
from hybridrl.workers.engine.utilization.model_flops import UPDATE, ModelFlops

FLOPS = ModelFlops(token=10.0, pair=1.0, output=5.0)
ROWS = SequenceRows(torch.tensor([3, 1]), 2)  # 4 tokens, 6 + 1 pairs, 2 outputs: 40 + 7 + 10 = 57 FLOPs forward


PEAKS = {("actor", "auto"): [100.0, 50.0], ("actor", "float32"): [50.0, 25.0]}  # of two ranks


def test_a_share_is_the_flops_of_the_rows_over_the_seconds_and_the_peaks_of_all_ranks():
    uses = {
        "old_log_prob": ModelUse("actor", FLOPS, "auto"),
        "update_actor": ModelUse("actor", FLOPS, "auto", UPDATE, times=2),
        "gen": ModelUse("actor", FLOPS, "float32"),
    }
    timing = {"old_log_prob": 2.0, "update_actor": 4.0, "gen": 1.0, "step": 9.0}
    assert Utilization(uses, PEAKS).metrics(timing, dict.fromkeys(uses, ROWS)) == {
        "perf/mfu/actor_infer": pytest.approx(57 / (2 * 150)),
        "perf/mfu/actor": pytest.approx(2 * 3 * 57 / (4 * 150)),
        "perf/mfu/rollout": pytest.approx(57 / 75),
    }


@pytest.mark.parametrize(
    ("model", "role", "timing", "rows"),
    [
        (None, "actor", {"ref": 1.0}, {"ref": ROWS}),  # a model of unknown FLOPs
        (FLOPS, "critic", {"ref": 1.0}, {"ref": ROWS}),  # devices of unknown peak
        (FLOPS, "actor", {}, {"ref": ROWS}),  # a stage that the step does not have
        (FLOPS, "actor", {"ref": 1.0}, {}),  # and one that computed nothing
    ],
)
def test_a_stage_of_which_something_is_unknown_has_no_share(model, role, timing, rows):
    assert Utilization({"ref": ModelUse(role, model, "auto")}, PEAKS).metrics(timing, rows) == {}


class Measuring(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def matmul_peak(self, dtype: str) -> float:
        return {"auto": 10.0, "float32": 5.0}[dtype]


def test_only_roles_whose_workers_measure_and_whose_models_are_known_are_asked():
    classes = {"actor": Measuring, "critic": Measuring, "ref": Worker}
    groups = {role: LocalWorkerGroup(None, ClassWithInitArgs(cls), role=role) for role, cls in classes.items()}
    models = {"actor": ("gen", "old_log_prob"), "ref": ("ref",), "missing": ("update",)}
    uses = {stage: ModelUse(role, FLOPS, "float32") for role, stages in models.items() for stage in stages}
    uses["values"] = ModelUse("critic", None, "float16")  # which would raise KeyError
    found = Utilization.measure(uses, groups).metrics(dict.fromkeys(uses, 1.0), dict.fromkeys(uses, ROWS))
    assert found == {name: pytest.approx(57 / 5) for name in ("perf/mfu/rollout", "perf/mfu/actor_infer")}


def test_rows_have_their_real_tokens_and_the_tokens_of_responses():
    columns = {
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    lengths, num_outputs, computed = SequenceRows.of(columns)
    assert (lengths.tolist(), num_outputs, computed) == ([3, 3], 3, None)
    assert SequenceRows.of(columns, torch.tensor([1])).num_outputs == 1


def test_what_engines_of_two_ranks_computed_counts_in_place_of_the_rows():
    uses = {"update_actor": ModelUse("actor", FLOPS, "auto", UPDATE, times=2)}
    rows = ROWS.with_computed({"computed_tokens": [2.0, 3.0], "computed_pairs": [4.0, 5.0]})
    found = Utilization(uses, PEAKS).metrics({"update_actor": 4.0}, {"update_actor": rows})
    # Tokens and pairs have both epochs in them; 2 outputs are read in each: 3 * (5 * 10 + 4 * 5 + 9)
    assert found == {"perf/mfu/actor": pytest.approx(3 * (50 + 20 + 9) / (4 * 150))}
    assert ROWS.with_computed({"other": 1.0}) is ROWS


def test_generation_computes_a_prompt_once_for_its_samples_and_no_last_token():
    batch = DataProto.from_dict(
        tensors={
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]),
        },
        non_tensors={"uid": np.array(["a", "a", "b"], dtype=object)},
    )
    # Prompts of 2 and 3 tokens: 3 + 6 pairs. Responses of 2, 3 and 0: tokens 3; 3 and 4 of their rows.
    rows = SequenceRows.generated(batch)
    assert (rows.num_outputs, rows.computed) == (5, (5 + 1 + 2, 9 + 3 + 3 + 4))
