"""Stateful parts: one loop makes snapshots and checkpoints, and either brings every part back."""

import pytest
import torch

from hybridrl.algos.kl import AdaptiveKLController
from hybridrl.config.schema.trainer import ReplayConfig
from hybridrl.errors import CheckpointError
from hybridrl.trainer.checkpoint.step_ledger import StepLedger
from hybridrl.trainer.data.prompt_dataset import collate_fn
from hybridrl.trainer.data.prompt_loader import PromptLoader, StepPrompts
from hybridrl.trainer.ppo.sampling.replay_buffer import ReplayBuffer
from hybridrl.trainer.run.state import load_from_memory, load_states, save_states, states_in_memory


class NumberedPrompts:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, row: int) -> dict:
        return {"input_ids": torch.tensor([row])}


class Run:
    """The parts of a trainer's state, without workers."""

    def __init__(self, folder):
        self.loader = PromptLoader(
            NumberedPrompts(), batch_size=2, shuffle=True, seed=1, collate=lambda rows: collate_fn(rows, pad_token_id=0)
        )
        self.prompts = StepPrompts(self.loader, seed=1)
        self.kl_ctrl = AdaptiveKLController(0.1, target_kl=1.0, horizon=10)
        self.replay = ReplayBuffer(ReplayConfig(groups=1), n=1, staleness=9, pad_token_id=0)
        self.ledger = StepLedger(str(folder), rows=7)
        self.ledger.start()

    @property
    def stateful(self):
        return {
            "data": self.loader,
            "prompts": self.prompts,
            "kl_ctrl": self.kl_ctrl,
            "replay": self.replay,
            "ledger": self.ledger,
        }

    def step(self) -> tuple:
        batch = self.prompts.next_batch()
        self.kl_ctrl.update(3.0, 2)
        rows = batch.select()
        ids = rows.batch["input_ids"]
        rows.batch["prompts"], rows.batch["responses"] = ids, ids
        rows.batch["response_mask"] = torch.ones_like(ids)
        rows.batch["weights_version"] = torch.zeros(len(rows), dtype=torch.int64)
        rows.batch["reward_valid"] = torch.ones(len(rows), dtype=torch.bool)
        mixed = self.replay.mix_into(rows, version=1, seed=self.prompts.num_drawn)
        self.ledger.end_step(self.prompts.num_drawn, epoch=0, prompts=self.loader.rows)
        return self.prompts.num_drawn, mixed.batch["input_ids"].flatten().tolist(), self.kl_ctrl.value


def test_a_snapshot_brings_every_part_back_any_number_of_times(tmp_path):
    run = Run(tmp_path)
    run.step()
    snapshot = states_in_memory(run.stateful)
    expected = [run.step(), run.step()]
    for _ in range(2):
        load_from_memory(run.stateful, snapshot)
        assert [run.step(), run.step()] == expected and run.ledger.step == 3


def test_a_checkpoint_brings_every_part_back_in_another_process(tmp_path):
    run, other = Run(tmp_path / "run"), Run(tmp_path / "other")
    run.step()
    state = save_states(run.stateful, str(tmp_path / "global_step_1"))
    other.ledger.path, other.ledger.step = run.ledger.path, 1  # the same run; the trainer sets the step
    load_states(other.stateful, state, str(tmp_path / "global_step_1"))
    assert [other.step(), other.step()] == [run.step(), run.step()]


def test_a_part_that_an_older_checkpoint_does_not_have_is_empty_or_named(tmp_path):
    run = Run(tmp_path)
    run.step()
    state = save_states(run.stateful, str(tmp_path / "global_step_1"))
    del state["replay"]
    load_states(run.stateful, state, str(tmp_path / "global_step_1"))
    assert len(run.replay) == 0
    state["kl_ctrl"] = {}
    with pytest.raises(CheckpointError, match="has no adaptive KL coefficient"):
        load_states(run.stateful, state, str(tmp_path / "global_step_1"))
