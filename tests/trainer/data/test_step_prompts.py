"""Prompts: each is used once per epoch, for every lag and wherever the run is stopped and resumed."""

import tempfile
from collections import Counter, deque
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.protocol import DataProto
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, StepLedger, read_ledger
from hybridrl.trainer.data.prompt_loader import ROW, StepPrompts
from tests.support.trainer.numbered_prompts import numbered_loader


class Run:
    """The driver's side of a run: draws prompts `lag` batches early, trains in order, records in a ledger."""

    def __init__(self, folder: str, *, rows: int, size: int, lag: int, steps: int):
        self.lag, self.steps = lag, steps
        self.loader = numbered_loader(rows, size=size)
        self.prompts = StepPrompts(self.loader, seed=3)
        self.ledger, self.pending, self.step = StepLedger(folder, rows=rows), deque[DataProto](), 0

    def resume(self, commit: dict | None) -> None:
        if commit is None:
            self.ledger.start()
        else:
            self.step, self.pending = commit["step"], deque(commit["ahead"])
            self.loader.load_state_dict(commit["data"])
            self.ledger.resume_from(commit["ledger"], path="somewhere", step=self.step, num_updates={})
        self.prompts.num_drawn = self.step + len(self.pending)
        self.fill(self.step + self.lag)

    def fill(self, until: int) -> None:
        while self.prompts.num_drawn < min(until, self.steps):
            self.pending.append(self.prompts.next_batch())

    def train(self) -> None:
        self.step += 1
        self.fill(self.step + self.lag)
        batch = self.pending.popleft()
        assert batch.batch["input_ids"][:, -1].tolist() == list(batch.non_tensor_batch[ROW])
        self.ledger.end_step(self.step, epoch=batch.meta_info["epoch"], prompts=batch.non_tensor_batch[ROW])

    def commit(self) -> dict:
        return {
            "step": self.step,
            "ahead": list(self.pending),
            "data": self.loader.state_dict(),
            "ledger": self.ledger.commit({}),
        }


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 5),
    lag=st.integers(0, 4),
    save_freq=st.integers(1, 4),
    killed_after=st.lists(st.integers(1, 6), max_size=4),
)
def test_every_prompt_is_used_once_in_every_epoch(rows, size, lag, save_freq, killed_after):
    steps = 3 * -(-rows // size)  # three epochs
    with tempfile.TemporaryDirectory() as folder:
        commit = None
        for num_steps in [*killed_after, steps]:
            run = Run(folder, rows=rows, size=size, lag=lag, steps=steps)
            run.resume(commit)
            for _ in range(min(num_steps, steps - run.step)):
                run.train()
                commit = run.commit() if run.step % save_freq == 0 or run.step == steps else commit
            if run.step == steps:
                break
        result = audit(read_ledger(str(Path(folder) / FILE)))
        assert result.problems() == [] and sorted(result.steps) == list(range(1, steps + 1))
        assert {epoch: Counter(used) for epoch, used in result.prompts().items()} == dict.fromkeys(
            range(3), Counter(range(rows))
        )
