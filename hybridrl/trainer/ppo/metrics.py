"""Metrics of a step's batch, of its timing and of a validation, under verl's metric names.

Pure functions, called by the trainer in the driver. Nothing is logged here. Shapes: B rows, R response columns. Rows
with an empty (aborted) response or without a valid reward are left out of reward, advantage, return and value metrics.
A metric without any row is nan, so every step has the same names.
"""

import math
import numbers
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridrl.algos.masked import masked_mean
from hybridrl.algos.rollout_correction.mismatch import mismatch_stats
from hybridrl.algos.value_losses import explained_variance
from hybridrl.config import PPOConfig
from hybridrl.errors import DataError
from hybridrl.framework.context import OnlineRLContext
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.step_settings import uses_critic
from hybridrl.trainer.ppo.update_batch import training_rows
from hybridrl.trainer.utilization import SequenceRows, Utilization

Metrics = dict[str, float]
NUM_RESAMPLES = 1000  # of the majority vote, verl's number

# -- training


def compute_data_metrics(
    batch: DataProto, *, use_critic: bool, max_response_length: int, max_prompt_length: int
) -> Metrics:
    """Return the metrics of rewards, advantages, returns, values and lengths.

    Names: `critic/*`, `response_length/*`, `response_length_non_aborted/*`, `response/aborted_ratio`,
    `prompt_length/*`. `clip_ratio` is the share of rows at the length limit. The batch has `attention_mask`,
    `response_mask`, `token_level_scores`, `token_level_rewards`, `advantages`, `returns`, with `use_critic` also
    `values`, and optionally `reward_valid`.
    """
    columns = batch.batch
    prompt_lengths, response_lengths = _lengths(batch)
    finished = response_lengths > 0
    counted = finished & columns["reward_valid"].bool() if "reward_valid" in columns else finished
    tokens = columns["response_mask"].bool() & counted[:, None]
    metrics = {
        **_mean_max_min("critic/score", columns["token_level_scores"].sum(-1)[counted]),
        **_mean_max_min("critic/rewards", columns["token_level_rewards"].sum(-1)[counted]),
        **_mean_max_min("critic/advantages", columns["advantages"][tokens]),
        **_mean_max_min("critic/returns", columns["returns"][tokens]),
        **_length_metrics("response_length", response_lengths, limit=max_response_length),
        **_length_metrics("response_length_non_aborted", response_lengths[finished], limit=max_response_length),
        "response/aborted_ratio": 1.0 - finished.double().mean().item(),
        **_length_metrics("prompt_length", prompt_lengths, limit=max_prompt_length),
    }
    if use_critic:
        metrics |= _mean_max_min("critic/values", columns["values"][tokens])
        explained = explained_variance(columns["values"], columns["returns"], tokens)
        metrics["critic/vf_explained_var"] = float(explained) if tokens.any() else math.nan
    return metrics


def global_seqlen_metrics(lengths: Sequence[int], partitions: Sequence[Sequence[int]]) -> Metrics:
    """Return `global_seqlen/*`: tokens per rank with rows in order, and with `partitions` (row indices per rank)."""
    size, longer = divmod(len(lengths), len(partitions))
    cuts = [rank * size + min(rank, longer) for rank in range(len(partitions) + 1)]
    in_order = [sum(lengths[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    balanced = [sum(lengths[row] for row in rows) for rows in partitions]
    return {
        "global_seqlen/min": float(min(in_order)),
        "global_seqlen/max": float(max(in_order)),
        "global_seqlen/minmax_diff": float(max(in_order) - min(in_order)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(lengths) / len(partitions),
    }


def log_prob_metrics(batch: DataProto, entropys_BR: torch.Tensor) -> Metrics:
    """Return `actor/entropy` (nats), and `rollout_mismatch_metrics` if the batch has `rollout_log_probs`."""
    metrics = {"actor/entropy": float(masked_mean(entropys_BR, batch.batch["response_mask"]))}
    return metrics | (rollout_mismatch_metrics(batch) if "rollout_log_probs" in batch.batch.keys() else {})


def metrics_of_update(batch: DataProto, updated: DataProto) -> Metrics:
    """Return `log_prob_metrics` of the tokens that an update trained on, before its optimizer step.

    Args:
        batch: All rows of the step.
        updated: What `update_actor` returned: `batch_row`, and of these rows the mask, log-probs and entropy.
    """
    trained = updated.select()
    if "rollout_log_probs" in batch.batch.keys():
        trained.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"][trained.batch["batch_row"]]
    return log_prob_metrics(trained, trained.batch["entropys"])


def rollout_mismatch_metrics(batch: DataProto) -> Metrics:
    """Return differences between the trainer's and the rollout's probabilities of the response tokens.

    The batch has `rollout_log_probs`, `old_log_probs` and `response_mask`. The correlation is nan when either side is
    constant. `rollout_corr/*` is what `mismatch_stats` returns: divergences, perplexities, and the effective
    sample size under untruncated importance weights, as a share of the tokens: 1 where both agree.
    """
    columns = batch.batch
    mask = columns["response_mask"].bool()
    rollout, actor = columns["rollout_log_probs"][mask].double(), columns["old_log_probs"][mask].double()
    differences = (rollout.exp() - actor.exp()).abs()
    both = torch.stack([rollout.exp(), actor.exp()])
    divergence = mismatch_stats(columns["old_log_probs"], columns["rollout_log_probs"], mask)
    return {
        "training/rollout_probs_diff_max": _or_nan(differences, torch.Tensor.max),
        "training/rollout_probs_diff_mean": _or_nan(differences, torch.Tensor.mean),
        "training/rollout_probs_diff_std": _or_nan(differences, torch.Tensor.std, min_count=2),
        "training/rollout_actor_probs_pearson_corr": torch.corrcoef(both)[0, 1].item() if mask.sum() > 1 else math.nan,
        "training/rollout_log_probs_diff_max": _or_nan((rollout - actor).abs(), torch.Tensor.max),
        "training/rollout_log_probs_diff_mean": _or_nan((rollout - actor).abs(), torch.Tensor.mean),
        **{f"rollout_corr/{name}": value for name, value in divergence.items()},
    }


def reward_extra_metrics(extra: Mapping[str, Sequence[Any]]) -> Metrics:
    """Return `reward_extra/{name}/mean` of the numbers that a reward function returned beside its score.

    The mean is over the rows that have the value. Columns with anything else than numbers are left out.
    """
    metrics: Metrics = {}
    for name, column in extra.items():
        rows = [[row] for row in range(len(column))]
        if _is_numeric(column, rows):
            metrics[f"reward_extra/{name}/mean"] = float(np.mean([float(v) for v in column if _has_value(v)]))
    return metrics


# -- time


def compute_timing_metrics(batch: DataProto, timing: Mapping[str, float]) -> Metrics:
    """Return `timing_s/{stage}` for every entry of `timing` (seconds), and `timing_per_token_ms/{stage}`.

    Per-token times exist for generation (per response token) and for stages that read whole sequences (per prompt and
    response token).
    """
    prompt_lengths, response_lengths = _lengths(batch)
    num_responses = int(response_lengths.sum())
    num_all = num_responses + int(prompt_lengths.sum())
    num_tokens = {"gen": num_responses}
    num_tokens |= dict.fromkeys(("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"), num_all)
    metrics = {f"timing_s/{name}": float(seconds) for name, seconds in timing.items()}
    for name in timing.keys() & num_tokens.keys():
        if num_tokens[name]:
            metrics[f"timing_per_token_ms/{name}"] = timing[name] * 1000 / num_tokens[name]
    return metrics


def compute_throughput_metrics(batch: DataProto, timing: Mapping[str, float], num_devices: int) -> Metrics:
    """Return `perf/*`: tokens of the batch, seconds of the step (`timing["step"]`), tokens per second and device."""
    num_tokens = int(batch.batch["attention_mask"].sum())
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": float(timing["step"]),
        "perf/throughput": num_tokens / (timing["step"] * num_devices),
    }


# -- validation


def validation_metrics(
    data_sources: Sequence[str], uids: Sequence[str], infos: Mapping[str, Sequence[Any]], *, seed: int = 42
) -> Metrics:
    """Return `val-core/{data_source}/{acc or reward}/...` and `val-aux/...` over prompts with N samples each.

    For every column: `mean@N`; with N > 1 `std@N`, and for k = 2, 4, ... and N `best@k`, `worst@k`, `maj@k` (`/mean`,
    `/std`) and, for 0/1 columns, `pass@k` over the prompts that have k samples left. best and worst are the exact
    values of what verl estimates by resampling; maj is resampled. `val-core` has mean, best and maj at N of `acc`, or
    of `reward` without `acc`; `val-aux` has all other metrics.

    Args:
        data_sources: Data source of each sample.
        uids: Prompt of each sample; samples of one prompt share a uid.
        infos: Columns with an entry per sample. Numeric ones (`reward`, `acc`, ...) are measured; `pred` has the
            answers for majority voting. None and nan are missing entries. A sample without a `reward` was not scored:
            it is left out of every column and counted in `val-aux/{data_source}/reward/invalid_ratio`.
        seed: Seed of the resampling.

    Raises:
        DataError: A column has another length than `uids`, or `reward` is missing.
    """
    for name, column in infos.items():
        if len(column) != len(uids):
            raise DataError(f"validation column {name!r} has {len(column)} entries for {len(uids)} samples")
    if "reward" not in infos:
        raise DataError(f"validation needs the column 'reward'; columns are {', '.join(infos) or 'none'}")
    rewards = infos["reward"]
    metrics: Metrics = {}
    for source, prompts in _rows_by_prompt(data_sources, uids).items():
        num_samples = max(len(rows) for rows in prompts)
        usable = [[row for row in rows if _has_value(rewards[row])] for rows in prompts]
        names = [name for name in infos if name != "pred" and _is_numeric(infos[name], usable)]
        core = "acc" if "acc" in names else "reward"
        for name in names:
            for metric, value in _column_metrics(infos[name], infos.get("pred"), usable, num_samples, seed).items():
                is_core = name == core and metric in (
                    f"mean@{num_samples}",
                    f"best@{num_samples}/mean",
                    f"maj@{num_samples}/mean",
                )
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
        num_rows = sum(len(rows) for rows in prompts)
        metrics[f"val-aux/{source}/reward/invalid_ratio"] = 1 - sum(len(rows) for rows in usable) / num_rows
    return metrics


def expected_best(values: np.ndarray, k: int) -> tuple[float, float]:
    """Return the exact mean and standard deviation of the largest of k draws with replacement from `values`.

    With values in ascending order x_1..x_n, P(largest = x_i) = (i/n)^k - ((i-1)/n)^k.
    """
    ranks = np.arange(len(values) + 1) / len(values)
    probabilities = np.diff(ranks**k)
    ordered = np.sort(values)
    mean = float(probabilities @ ordered)
    return mean, math.sqrt(float(probabilities @ (ordered - mean) ** 2))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased pass@k estimate 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374).

    The estimate from n samples, c of them correct, is the probability that at least one of k is correct. Needs k <= n.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_vote(values: np.ndarray, answers: Sequence[Any], k: int, *, seed: int) -> tuple[float, float]:
    """Return mean and standard deviation of the value of the most frequent answer among k draws with replacement.

    Estimated with `NUM_RESAMPLES` resamples. Of equally frequent answers the one drawn first wins.
    """
    codes = np.unique([str(answer) for answer in answers], return_inverse=True)[1]
    draws = np.random.default_rng(seed).integers(len(values), size=(NUM_RESAMPLES, k))
    hits = codes[draws][:, :, None] == np.arange(codes.max() + 1)  # (resample, draw, answer)
    first = np.where(hits.any(1), hits.argmax(1), k)
    winners = (hits.sum(1) * (k + 1) - first).argmax(1)
    resamples = np.arange(NUM_RESAMPLES)
    won = values[draws[resamples, first[resamples, winners]]]
    return float(won.mean()), float(won.std())


def _column_metrics(
    column: Sequence, answers: Sequence | None, prompts: list[list[int]], num_samples: int, seed: int
) -> Metrics:
    """Return every metric of one column, averaged over the prompts that have it."""
    prompts = [present for rows in prompts if (present := [row for row in rows if _has_value(column[row])])]
    is_binary = all(column[row] in (0, 1) for rows in prompts for row in rows)
    collected: defaultdict[str, list[float]] = defaultdict(list)
    for rows in prompts:
        values = np.array([float(column[row]) for row in rows])
        of_prompt = _spread_metrics(values, num_samples)
        if answers is not None and num_samples > 1:
            of_prompt |= _vote_metrics(values, [answers[row] for row in rows], num_samples, seed)
        if is_binary:
            sizes = [k for k in sample_sizes(num_samples) if k <= len(rows)]
            of_prompt |= {f"pass@{k}": pass_at_k(len(rows), int(values.sum()), k) for k in sizes}
        for metric, value in of_prompt.items():
            collected[metric].append(value)
    return {metric: float(np.mean(values)) for metric, values in collected.items()}


def _spread_metrics(values: np.ndarray, num_samples: int) -> Metrics:
    metrics = {f"mean@{num_samples}": float(values.mean())}
    if num_samples > 1:
        metrics[f"std@{num_samples}"] = float(values.std())
    for k in sample_sizes(num_samples):
        best, best_std = expected_best(values, k)
        worst, worst_std = expected_best(-values, k)
        metrics |= {
            f"best@{k}/mean": best,
            f"best@{k}/std": best_std,
            f"worst@{k}/mean": -worst,
            f"worst@{k}/std": worst_std,
        }
    return metrics


def _vote_metrics(values: np.ndarray, votes: Sequence, num_samples: int, seed: int) -> Metrics:
    metrics: Metrics = {}
    for k in sample_sizes(num_samples):
        metrics[f"maj@{k}/mean"], metrics[f"maj@{k}/std"] = majority_vote(values, votes, k, seed=seed)
    return metrics


def sample_sizes(num_samples: int) -> list[int]:
    """Return 2, 4, 8, ... below `num_samples`, then `num_samples`. Empty for a single sample."""
    if num_samples == 1:
        return []
    return [2**power for power in range(1, num_samples.bit_length()) if 2**power < num_samples] + [num_samples]


def _rows_by_prompt(data_sources: Sequence[str], uids: Sequence[str]) -> dict[str, list[list[int]]]:
    rows: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        rows[str(source)][uid].append(row)
    return {source: list(prompts.values()) for source, prompts in rows.items()}


def _is_numeric(column: Sequence, prompts: list[list[int]]) -> bool:
    """Return whether `column` has entries in these rows and all of them are numbers."""
    present = [column[row] for rows in prompts for row in rows if _has_value(column[row])]
    return bool(present) and all(isinstance(value, numbers.Real | np.bool_) for value in present)


def _has_value(value: Any) -> bool:
    return value is not None and value == value  # nan is not equal to itself


# -- a step


def step_metrics(
    ctx: OnlineRLContext, config: PPOConfig, *, num_gpus: int, step: int, utilization: Utilization
) -> Metrics:
    """Return data metrics of the new samples, and timing, throughput and utilization metrics of all samples."""
    metrics = compute_data_metrics(
        ctx.batch[: ctx.get("num_new")],
        use_critic=uses_critic(config),
        max_response_length=config.data.max_response_length,
        max_prompt_length=config.data.max_prompt_length,
    )
    return (
        metrics
        | compute_timing_metrics(ctx.batch, ctx.timing)
        | compute_throughput_metrics(ctx.batch, ctx.timing, num_gpus)
        | utilization.metrics(ctx.timing, computed_rows(ctx, config, step=step))
    )


def computed_rows(ctx: OnlineRLContext, config: PPOConfig, *, step: int) -> dict[str, SequenceRows]:
    """Return stage -> the rows that it has computed in this step."""
    columns = ctx.batch.batch
    trained = SequenceRows.of(columns, training_rows(ctx.batch, config, step=step)[0])
    found = dict.fromkeys(("old_log_prob", "ref", "values"), SequenceRows.of(columns))
    found |= {"gen": SequenceRows.generated(ctx.batch[: ctx.get("num_new")]), "update_critic": trained}
    found |= {"update_actor": trained} if ctx.get("updated") else {}
    computed: dict[str, dict[str, Any]] = ctx.get("computed", {})
    return {stage: rows.with_computed(computed.get(stage, {})) for stage, rows in found.items()}


# -- helpers


def _lengths(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompt and response lengths (B,) in tokens, including tokens that are not trained on."""
    mask = batch.batch["attention_mask"]
    num_columns = batch.batch["responses"].shape[-1]
    return mask[:, :-num_columns].sum(-1), mask[:, -num_columns:].sum(-1)


def _length_metrics(group: str, lengths: torch.Tensor, *, limit: int) -> Metrics:
    return {**_mean_max_min(group, lengths), f"{group}/clip_ratio": _or_nan(lengths >= limit, torch.Tensor.mean)}


def _mean_max_min(group: str, values: torch.Tensor) -> Metrics:
    reductions = {"mean": torch.Tensor.mean, "max": torch.Tensor.max, "min": torch.Tensor.min}
    return {f"{group}/{name}": _or_nan(values, reduce) for name, reduce in reductions.items()}


def _or_nan(values: torch.Tensor, reduce: Any, *, min_count: int = 1) -> float:
    return float(reduce(values.double())) if values.numel() >= min_count else math.nan
