"""Validation of the policy: generate for the whole validation set, score, and aggregate per data source.

The trainer calls `validate` between two steps. With `trainer.eval_n_gpus`, `RemoteEvaluator` calls
`validate_on_evaluator` instead, and training does not wait for it.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.protocol import DataProto
from hybridrl.trainer.data.prompt_loader import PromptLoader, assign_uids_and_seeds
from hybridrl.trainer.data.seeds import Purpose, call_seed
from hybridrl.trainer.ppo.metrics import validation_metrics
from hybridrl.trainer.ppo.policy.weight_sync import verify_push
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run import samples
from hybridrl.trainer.run.setup import run_directory

logger = logging.getLogger(__name__)


def validate(trainer: Any, *, step: int, generate: Callable[[DataProto], DataProto] | None = None) -> dict[str, float]:
    """Return `val-core/...` and `val-aux/...` metrics. Every validation uses the same seeds.

    Logs one sample of each data source, and writes all to `trainer.validation_data_dir` if set.

    Args:
        trainer: A `RayPPOTrainer`.
        step: Step to record the samples under.
        generate: Generates the responses. None: the rollout, with the present policy.
    """
    config = trainer.config
    seed = call_seed(seed=config.trainer.seed, purpose=Purpose.VALIDATION, step=0)
    records: list[dict[str, Any]] = []
    examples: dict[str, samples.Example] = {}
    columns: dict[str, list] = {"data_source": [], "uid": [], "reward": []}
    started_at, num_tokens = time.monotonic(), 0
    for number, batch in enumerate(_batches(trainer)):
        assign_uids_and_seeds(batch, seed=config.trainer.seed, purpose=Purpose.VALIDATION, step=number)
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        batch = trainer.pipeline.respond(batch, n=n, seed=seed, generate=generate)
        extra = trainer.score(batch, trainer.val_reward_fn, metrics={})
        _collect(columns, batch, extra)
        rows = list(samples.sample_rows(batch, trainer.tokenizer, step=step, extra=extra))
        examples = {example["data_source"]: example for example in samples.first_examples(batch, rows)} | examples
        records.extend(rows)
        num_tokens += int(batch.batch["response_mask"].sum())
        if (seconds := time.monotonic() - started_at) >= 2.0:  # a shorter validation needs no progress
            done = f"{len(records)} of {n * len(trainer.val_dataset)} responses in {seconds:.0f} s"
            logger.info("validated %s (%.0f generated tokens/s)", done, num_tokens / seconds)
    if generate is None:
        trainer.policy.sleep_rollout()
    if config.trainer.validation_data_dir:
        samples.write_samples(os.path.join(config.trainer.validation_data_dir, f"{step}.jsonl"), iter(records))
    _show(list(examples.values())[: samples.MAX_EXAMPLES], step=step, directory=run_directory(config.trainer))
    values = {k: v for k, v in columns.items() if k not in ("data_source", "uid")}
    return validation_metrics(columns["data_source"], columns["uid"], values)


def check_evaluator(trainer: Any, version: int, weights: Any) -> None:
    """Compare the evaluator's processes with the actor, whose weights these are, before their first validation.

    Raises:
        ParityError: Some process computes other log-probs with them than the actor.
    """
    if trainer.gate is None or trainer.gate.knows_evaluator:
        return
    probing = trainer.gate.new_probe()
    health = trainer.groups[Role.Evaluator].receive_weights(version, weights, False, probing.probe)
    verify_push(health, version)
    probing.found = [each.probed for each in health]
    trainer.gate.check(probing, version=version)
    trainer.gate.knows_evaluator = True


def validate_on_evaluator(trainer: Any, version: int, weights: Any) -> dict[str, float]:
    """Return the metrics of these weights, validated on the evaluator's processes."""
    evaluator = trainer.groups[Role.Evaluator]
    verify_push(evaluator.receive_weights(version, weights), version)

    def resend(ranks: Sequence[int]) -> None:
        evaluator.execute_ranks(ranks, "receive_weights", version, weights)

    generate = functools.partial(trainer.generator.generate_on, evaluator, version=version, resync=resend)
    return validate(trainer, step=version, generate=generate)


def _show(examples: list[samples.Example], *, step: int, directory: str) -> None:
    """Log the examples, and save them for the final report."""
    for example in examples:
        logger.info("%s\n  %s", samples.format_prompt(example), samples.format_answer(example))
    samples.save_examples(directory, examples, step=step)


def _batches(trainer: Any):
    dataset, data = trainer.val_dataset, trainer.config.data
    loader = PromptLoader(
        dataset, batch_size=data.val_batch_size or len(dataset), shuffle=False, seed=0, collate=trainer.collate
    )
    for _ in range(loader.steps_per_epoch):
        yield loader.next_batch()


def _collect(columns: dict[str, list], batch: DataProto, extra: dict[str, list]) -> None:
    """Append a scored batch's rows. A row whose scoring failed counts as missing, not as zero."""
    valid = batch.batch["reward_valid"].tolist()
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    columns["data_source"].extend(batch.non_tensor_batch["data_source"].tolist())
    columns["uid"].extend(batch.non_tensor_batch["uid"].tolist())
    columns["reward"].extend(score if ok else float("nan") for score, ok in zip(scores, valid, strict=True))
    for name in (extra.keys() | columns.keys()) - {"data_source", "uid", "reward"}:
        # A batch without this column gets None.
        column = columns.setdefault(name, [None] * (len(columns["reward"]) - len(batch)))
        column.extend(extra.get(name, [None] * len(batch)))
