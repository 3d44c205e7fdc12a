"""Validation: the whole validation set through the current policy, scored by rule, summed up per data source."""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from hybridrl.protocol import DataProto
from hybridrl.trainer.metrics import validation_metrics
from hybridrl.trainer.prompt_loader import PromptLoader
from hybridrl.trainer.prompts import identify
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run import run_directory
from hybridrl.trainer.samples import MAX_EXAMPLES, Example, answered, asked, first_examples, keep_examples, sample_rows, write_samples
from hybridrl.trainer.seeds import Purpose, call_seed
from hybridrl.trainer.weight_sync import check_health

logger = logging.getLogger(__name__)


def validate(trainer: Any, *, step: int, generate: Callable[[DataProto], DataProto] | None = None) -> dict[str, float]:
    """Return `val-core/...` and `val-aux/...` metrics. Same seeds each time; nothing is trained. One sample of each data source is shown.

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
    loader = PromptLoader(dataset, batch_size=data.val_batch_size or len(dataset), shuffle=False, seed=0, collate=trainer.collate)
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
