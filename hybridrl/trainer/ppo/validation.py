"""Validation: the whole validation set through the current policy, scored by rule, summed up per data source.

Validation in processes of its own, beside training. Training never waits for it, and what it finds says which weights
it saw.

The newest request wins: weights that become due while an older evaluation is running replace those that are still
waiting. The driver's part (decoding, scoring) runs in a thread. What goes wrong there is raised in the training loop at
its next look.
"""

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from hybridrl.errors import WorkerLost
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.prompt_loader import PromptLoader, identify
from hybridrl.trainer.data.seeds import Purpose, call_seed
from hybridrl.trainer.ppo.metrics import validation_metrics
from hybridrl.trainer.ppo.weight_sync import check_health
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run.samples import (
    MAX_EXAMPLES,
    Example,
    answered,
    asked,
    first_examples,
    keep_examples,
    sample_rows,
    write_samples,
)
from hybridrl.trainer.run.setup import run_directory

logger = logging.getLogger(__name__)


def validate(trainer: Any, *, step: int, generate: Callable[[DataProto], DataProto] | None = None) -> dict[str, float]:
    """Return `val-core/...` and `val-aux/...` metrics. Same seeds each time; nothing is trained. One sample of each
    data source is shown.

    generate: who responds; by default the rollout, with the policy as it stands.
    """
    config = trainer.config
    seed = call_seed(seed=config.trainer.seed, purpose=Purpose.VALIDATION, step=0)
    records: list[dict[str, Any]] = []
    examples: dict[str, Example] = {}
    columns: dict[str, list] = {"data_source": [], "uid": [], "reward": []}
    for number, batch in enumerate(_batches(trainer)):
        identify(batch, seed=config.trainer.seed, purpose=Purpose.VALIDATION, step=number)
        batch = trainer.respond(batch, n=config.actor_rollout_ref.rollout.val_kwargs.n, seed=seed, generate=generate)
        extra = trainer.score(batch, trainer.val_reward_fn, metrics={})
        _collect(columns, batch, extra)
        rows = list(sample_rows(batch, trainer.tokenizer, step=step, extra=extra))
        examples = {example["data_source"]: example for example in first_examples(batch, rows)} | examples
        records.extend(rows)
    if generate is None:
        trainer.policy.rest()
    if config.trainer.validation_data_dir:
        write_samples(os.path.join(config.trainer.validation_data_dir, f"{step}.jsonl"), iter(records))
    _show(list(examples.values())[:MAX_EXAMPLES], step=step, directory=run_directory(config.trainer))
    values = {k: v for k, v in columns.items() if k not in ("data_source", "uid")}
    return validation_metrics(columns["data_source"], columns["uid"], values)


def validate_elsewhere(trainer: Any, version: int, weights: Any) -> dict[str, float]:
    """Return the metrics of these weights, validated in the evaluator's processes."""
    evaluator, loops = trainer.groups[str(Role.Evaluator)], trainer.agent_loops
    check_health(evaluator.receive_weights(version, weights), version)
    if loops is None:
        return validate(trainer, step=version, generate=evaluator.generate_sequences)

    def refill(rank: int) -> None:
        evaluator.execute_rank(rank, "receive_weights", version, weights)

    generate = functools.partial(loops.generate_on, evaluator, version=version, refill=refill)
    return validate(trainer, step=version, generate=generate)


def _show(examples: list[Example], *, step: int, directory: str) -> None:
    """Write the examples to the log, and keep them for the closing report."""
    for example in examples:
        logger.info("%s\n  %s", asked(example), answered(example))
    keep_examples(directory, examples, step=step)


def _batches(trainer: Any):
    dataset, data = trainer.val_dataset, trainer.config.data
    loader = PromptLoader(
        dataset, batch_size=data.val_batch_size or len(dataset), shuffle=False, seed=0, collate=trainer.collate
    )
    for _ in range(loader.steps_per_epoch):
        yield loader.next_batch()


def _collect(columns: dict[str, list], batch: DataProto, extra: dict[str, list]) -> None:
    """Append a scored batch's rows; a row whose scoring failed counts as missing, not as zero."""
    valid = batch.batch["reward_valid"].tolist()
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    columns["data_source"].extend(batch.non_tensor_batch["data_source"].tolist())
    columns["uid"].extend(batch.non_tensor_batch["uid"].tolist())
    columns["reward"].extend(score if ok else float("nan") for score, ok in zip(scores, valid, strict=True))
    for name in (extra.keys() | columns.keys()) - {"data_source", "uid", "reward"}:
        # A column that some batches lack is there with gaps.
        column = columns.setdefault(name, [None] * (len(columns["reward"]) - len(batch)))
        column.extend(extra.get(name, [None] * len(batch)))


Evaluate = Callable[[int, Any], dict[str, float]]  # version, weights (a reference) -> metrics
FINISH_TIMEOUT_S = 1800.0  # for the last evaluation when training is over


class Evaluation:
    """Runs `evaluate(version, weights)` in a thread, one at a time."""

    def __init__(self, evaluate: Evaluate):
        self._evaluate = evaluate
        self._requests: queue.Queue = queue.Queue(maxsize=1)
        self._results: queue.Queue = queue.Queue()
        self._lost: tuple[int, Any] | None = None  # what was asked for when a process of the evaluator was lost
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def request(self, version: int, weights: Any) -> None:
        """Evaluate these weights as soon as the running evaluation is over, instead of any that were waiting."""
        if not self._thread.is_alive():
            self._start()
        while True:
            try:
                self._requests.put_nowait((version, weights))
                return
            except queue.Full:
                _take(self._requests)

    def ask_again(self) -> None:
        """Evaluate what was lost with a process of the evaluator, which has a new one now, unless newer weights are
        waiting.
        """
        lost, self._lost = self._lost, None
        if lost is not None and self._requests.empty():
            self.request(*lost)

    def finished(self) -> list[dict[str, float]]:
        """Return the metrics of evaluations that ended since the last look, oldest first, each with `val/version`;
        waits for nothing.
        """
        found = []
        while (result := _take(self._results)) is not None:
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        return found

    def finish(self) -> list[dict[str, float]]:
        """Wait for what is running and waiting, and return its metrics. Raises TimeoutError when it does not end."""
        self._requests.put(None, timeout=FINISH_TIMEOUT_S)
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the last evaluation did not end within {FINISH_TIMEOUT_S:g} s of the end of training")
        return self.finished()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            version, weights = request
            try:
                self._results.put(self._evaluate(version, weights) | {"val/version": float(version)})
            except BaseException as error:
                self._lost = request if isinstance(error, WorkerLost) else None
                self._results.put(error)


def _take(source: queue.Queue) -> Any:
    try:
        return source.get_nowait()
    except queue.Empty:
        return None
