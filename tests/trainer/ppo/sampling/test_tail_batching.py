"""Tail batching: what is deferred is trained later, once, wherever the run is stopped and resumed."""

import logging
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import CheckpointError
from hybridrl.protocol import DataProto
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, StepLedger, read_ledger
from hybridrl.trainer.data.prompt_loader import EPOCH, ROW, StepPrompts
from hybridrl.trainer.ppo.sampling.tail_batching import TailPrompts
from tests.support.trainer.numbered_prompts import numbered_loader


class Run:
    """The driver's side of a run: draws rounds, defers, records in a ledger."""

    def __init__(self, *, rows: int, size: int, gen_size: int, steps: int, folder: str | None = None):
        self.step, self.steps, self.size = 0, steps, size
        self.loader = numbered_loader(rows, size=size)
        self.prompts = TailPrompts(
            self.loader,
            seed=3,
            batch_size=size,
            gen_batch_size=gen_size,
            step=lambda: self.step,
            total_steps=steps,
        )
        self.ledger = None if folder is None else StepLedger(folder, rows=rows)
        self.trained: list[tuple] = []  # step, epoch, row, seed

    def draw(self) -> DataProto:
        self.step += 1
        return self.prompts.next_batch()

    def train(self) -> dict[str, float]:
        """Take a step. The seed of a prompt says how long its responses are."""
        batch = self.draw()
        seeds = batch.batch["seeds"].tolist()
        chosen = None
        if (size := batch.meta_info.get("num_prompts")) is not None:
            chosen = sorted(sorted(range(len(seeds)), key=lambda place: seeds[place] % 997)[:size])
        self.prompts.defer(chosen)
        places = range(len(seeds)) if chosen is None else chosen
        rows, epochs = batch.non_tensor_batch[ROW], batch.non_tensor_batch[EPOCH]
        assert batch.batch["input_ids"][:, -1].tolist() == rows.tolist() and len(places) == self.size
        self.trained += [(self.step, epochs[place], rows[place], seeds[place]) for place in places]
        if self.ledger is not None:
            outcomes = self.prompts.trained()
            for epoch, found in self.prompts.outcomes().items():
                outcomes.setdefault(epoch, {}).update(found)
            used = [rows[place] for place in places]
            self.ledger.end_step(self.step, epoch=batch.meta_info["epoch"], prompts=used, outcomes=outcomes)
        return self.prompts.metrics()

    def commit(self) -> dict:
        state = {"step": self.step, "data": self.loader.state_dict(), "prompts": self.prompts.state_dict()}
        return state | ({} if self.ledger is None else {"ledger": self.ledger.commit({})})

    def resume(self, commit: dict) -> None:
        self.step = commit["step"]
        self.loader.load_state_dict(commit["data"])
        self.prompts.load_state_dict(commit["prompts"])
        if self.ledger is not None:
            self.ledger.resume_from(commit["ledger"], path="somewhere", step=self.step, num_updates={})


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 5),
    more=st.integers(1, 12),
    save_freq=st.integers(1, 4),
    killed_after=st.lists(st.integers(1, 6), max_size=4),
)
def test_every_prompt_is_trained_once_in_every_epoch_and_a_resumed_run_is_the_same(
    rows, size, more, save_freq, killed_after
):
    shape = {"rows": rows, "size": size, "gen_size": size + more, "steps": 3 * rows}  # `size` times three epochs
    whole = Run(**shape)
    for _ in range(whole.steps):
        whole.train()
    with tempfile.TemporaryDirectory() as folder:
        commit, done = None, []
        for num_steps in [*killed_after, whole.steps]:
            run = Run(**shape, folder=folder)
            run.ledger.start() if commit is None else run.resume(commit)
            run.trained = [entry for entry in done if entry[0] <= run.step]
            for _ in range(min(num_steps, whole.steps - run.step)):
                run.train()
                commit = run.commit() if run.step % save_freq == 0 or run.step == whole.steps else commit
            done = run.trained
            if run.step == whole.steps:
                break
        result = audit(read_ledger(str(Path(folder) / FILE)))
    assert done == whole.trained and whole.prompts.waiting == []
    assert Counter(entry[1:3] for entry in done) == Counter((e, row) for e in range(3 * size) for row in range(rows))
    assert result.problems() == [] and None not in {trained for _, trained in result.deferred().values()}


def test_a_deferred_prompt_keeps_its_seed_and_its_age_is_logged():
    run, seeds, logged = Run(rows=40, size=4, gen_size=6, steps=10), {}, []
    while run.step < 10:
        logged.append(run.train())
        seeds |= {(prompt.epoch, prompt.row): prompt.seed for prompt in run.prompts.waiting}
    trained = {(epoch, row): seed for _, epoch, row, seed in run.trained}
    assert len(seeds) == sum(row["rollout/deferred"] for row in logged) > 4
    assert {prompt: trained[prompt] for prompt in seeds} == seeds and len({*trained.values()}) == 40
    # Two short rounds defer 2 prompts each; the third round trains these 4, which have waited for 2 and for 1 step.
    assert [row["rollout/deferred"] for row in logged[:3]] == [2.0, 2.0, 0.0]
    assert [row["rollout/deferred_waiting"] for row in logged[:3]] == [2.0, 4.0, 0.0]
    assert (logged[2]["rollout/deferred_age_mean"], logged[2]["rollout/deferred_age_max"]) == (1.5, 2.0)
    assert (logged[2]["rollout/deferred_trained"], logged[1]["rollout/deferred_trained"]) == (4.0, 0.0)


DEFERS = {"1": {"trained": [0], "deferred": [1]}}


@pytest.mark.parametrize(
    "later, problems, waiting",
    [
        ({}, [], 1),
        ({"1": {"trained": [1]}}, [], 0),
        ({"1": {"filtered": [1]}}, [], 0),
        ({"2": {"trained": [1]}}, [], 1),  # the same row, drawn again in the next epoch
        ({"1": {"trained": [0, 1]}}, ["epoch 1: prompts [0] were used more than once (1 in all)"], 0),
        ({"1": {"trained": [1, 1]}}, ["epoch 1: prompts [1] were used more than once (1 in all)"], 0),
        ({"1": {"trained": [2], "deferred": [0]}}, ["epoch 1: prompts [0] were used more than once (1 in all)"], 2),
    ],
)
def test_the_audit_counts_a_deferred_prompt_once(later, problems, waiting):
    lines = ({"step": step, "stages": {}, "updates": {}, "drawn": drawn} for step, drawn in ((1, DEFERS), (2, later)))
    result = audit([{"begin": 0, "rows": 3}, *lines])
    assert [line for line in result.problems() if "not used" not in line] == problems
    assert [trained for _, trained in result.deferred().values()].count(None) == waiting
    assert result.num_left_out() == ({"filtered": 1} if "filtered" in later.get("1", {}) else {})


def test_a_step_that_runs_again_from_its_snapshot_draws_and_defers_the_same():
    run = Run(rows=20, size=3, gen_size=7, steps=8)
    run.train()
    snapshot, before = run.commit(), list(run.trained)
    assert run.prompts.waiting
    run.draw()  # the step was lost after its prompts were drawn
    run.resume(snapshot)
    run.train()
    first = run.trained
    run.resume(snapshot)
    run.trained = before
    run.train()
    assert run.trained == first


def test_settings_without_long_rounds_refuse_waiting_prompts():
    run = Run(rows=20, size=3, gen_size=7, steps=8)
    plain = StepPrompts(numbered_loader(20, size=3), seed=3)
    plain.load_state_dict(run.prompts.state_dict())  # nothing waits
    run.prompts.load_state_dict(plain.state_dict())
    run.train()
    with pytest.raises(CheckpointError, match="4 prompts that wait for a long round.*order=tail_batching"):
        plain.load_state_dict(run.prompts.state_dict())


def test_a_run_that_is_resumed_with_fewer_steps_says_what_it_does_not_train(caplog):
    run = Run(rows=40, size=2, gen_size=8, steps=10)
    run.train()
    run.train()
    shorter = Run(rows=40, size=2, gen_size=8, steps=3)
    shorter.resume(run.commit())
    with caplog.at_level(logging.WARNING):
        shorter.train()
    num_left = len(shorter.prompts.waiting)
    assert num_left > 0 and f"{num_left} deferred prompts were not trained" in caplog.text
