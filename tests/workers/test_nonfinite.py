"""A loss or gradient that is not finite on any rank changes nothing on any rank.

A model that is not finite is never saved.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from hybridrl.config import SFTConfig, load_config
from hybridrl.errors import NonFiniteError, StorageError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.workers.mini_batch import MINI_BATCH_COMPUTE
from hybridrl.workers.process_setup import exact_sum
from hybridrl.workers.sft import SFTWorker, sft_loss


class NonFiniteWorker(SFTWorker):
    """Its last rank has a loss or a gradient that is not finite on request."""

    @register(MINI_BATCH_COMPUTE)
    def update_with(self, data: DataProto, how: str) -> DataProto:
        def make_loss(counts):
            own = sft_loss(counts)

            def nonfinite_loss_fn(outputs, rows):
                loss, stats = own(outputs, rows)
                if how == "loss":  # the gradient is finite
                    return loss, stats | {"loss": loss + math.inf}
                return loss + (outputs["log_probs"].sum() * 0).sqrt(), stats  # worth 0, with a slope of infinity * 0

            return nonfinite_loss_fn if how != "none" and self.rank == self.world_size - 1 else own

        metrics = self._update(
            self.model, data, self._micro(), make_loss=make_loss, outputs=("log_probs",), epochs=1, prefix="train"
        )
        return DataProto(meta_info={"metrics": metrics})

    @register(Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[int, str, str]:
        """Return optimizer steps taken, digest of the whole weights, digest of this rank's optimizer state."""
        weights, own = hashlib.sha256(), hashlib.sha256()
        for _, tensor in self.model.weights():
            weights.update(tensor.detach().numpy().tobytes())
        for state in self.model._optimizer.state.values():
            for tensor in state.values():
                own.update((tensor.to_local() if hasattr(tensor, "to_local") else tensor).numpy().tobytes())
        return self.model.num_updates, weights.hexdigest(), own.hexdigest()

    @register(Dispatch.ONE_TO_ALL)
    def poison(self) -> None:
        """Put an infinity into one parameter of the last rank, as an overflow would."""
        if self.rank == self.world_size - 1:
            parameter = next(p for p in self.model.model.parameters() if p.to_local().numel())
            parameter.detach().to_local().view(-1)[0] = math.inf


def batch() -> DataProto:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 300, (8, 12), generator=draw)
    mask = torch.ones_like(ids)
    position_ids = mask.cumsum(-1) - 1
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": position_ids,
            "responses": ids[:, 4:],
            "response_mask": mask[:, 4:],
        }
    )


@contextmanager
def started(model, size: int) -> Iterator[RayWorkerGroup | LocalWorkerGroup]:
    changes = {
        "model.path": model,
        "data.train_files": "none.parquet",
        "optim.lr": 1e-3,
        "optim.lr_scheduler_type": "cosine",
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
    }
    config = load_config(
        SFTConfig, [f"{key}={value}" for key, value in changes.items()], program="test", config_name="sft_trainer"
    )
    recipe = RayClassWithInitArgs(NonFiniteWorker, config, "sft")
    with ExitStack() as stack:
        if size == 1:
            group: RayWorkerGroup | LocalWorkerGroup = LocalWorkerGroup(None, recipe)
        else:
            pool = stack.enter_context(RayResourcePool([size], use_gpu=False))
            group = stack.enter_context(RayWorkerGroup(pool, recipe, role="sft"))
        group.init_model(4)
        yield group


def update(group, how: str) -> dict[str, list[float]]:
    metrics = group.update_with(batch(), how=how).meta_info["metrics"]
    return {name: torch.tensor(values).flatten().tolist() for name, values in metrics.items()}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_and_leaves_no_trace(
    tiny_qwen2, ray_cluster, tmp_path, size
):
    with started(tiny_qwen2, size) as group, started(tiny_qwen2, size) as twin:
        compare_with_a_twin(group, twin, tmp_path, size)


def compare_with_a_twin(group, twin, tmp_path, size: int) -> None:
    for _ in range(2):
        assert set(update(group, "none")["train/skipped"]) == set(update(twin, "none")["train/skipped"]) == {0.0}
    before = group.state()
    assert before == twin.state()
    for how in ("loss", "gradient"):
        metrics = update(group, how)
        assert set(metrics["train/skipped"]) == {1.0} and set(metrics["train/nonfinite_loss"]) == {float(how == "loss")}
        assert math.isfinite(metrics["loss"][0]) == (how == "gradient")
        assert math.isfinite(metrics["train/grad_norm"][0]) == (how == "loss")
        assert group.state() == before
    assert update(group, "none") == update(twin, "none")  # the learning rate and the norm, too
    after = group.state()
    assert after == twin.state() and {state[:2] for state in after} == {(3, after[0][1])} and after != before
    assert group.save_checkpoint(str(tmp_path / "whole")) == [3] * size
    group.poison()
    with pytest.raises(NonFiniteError, match="parameters or its optimizer's state are not finite"):
        group.save_checkpoint(str(tmp_path / "poisoned"))
    assert list((tmp_path / "poisoned").iterdir()) == []
    assert group.load_checkpoint(str(tmp_path / "whole")) == [3] * size
    assert group.state() == after
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="rank 0 cannot write .*file"):
        group.save_checkpoint(str(tmp_path / "file"))
    assert update(group, "none") == update(twin, "none")  # and all ranks continue


def test_opposite_infinities_of_two_ranks_are_a_nan_and_no_exception():
    assert math.isnan(exact_sum([math.inf, -math.inf])) and exact_sum([0.1] * 10) == 1.0
