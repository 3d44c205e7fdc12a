"""`ParityGate`: stop a run whose rollout and trainer give the same tokens different log-probs.

A fingerprint says that a rollout holds the pushed weights. It cannot say that the rollout reads them right: experts in
another order, a kernel that drops attention sinks, or a bias in fewer bits leave it equal. So after some pushes every
rollout process samples a few tokens (`workers/rollout/probe.py`), and the actor computes their log-probs with the same
weights. `RolloutPipeline` uses a gate in the driver: at the first push, after processes were replaced, and then every
`trainer.parity_freq` pushes.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.config.engines import engine_settings
from hybridrl.errors import ParityError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.policy.weight_sync import Probing
from hybridrl.workers.engine.base import resolve_dtype
from hybridrl.workers.rollout.base import rollout_class
from hybridrl.workers.rollout.requests import Probe, ProbedTokens
from hybridrl.workers.rollout.responses import padded, prompt_columns, sequence_columns

logger = logging.getLogger(__name__)

TEXTS = (
    "The 3 boxes hold 4 pens each, and",
    "Question: how many days are there in 2 weeks?\nAnswer:",
    "Once upon a time there was",
    "def add(a, b):\n",
    "The capital of France is",
    "Tom has 5 apples and eats 2,",
    "Water boils at",
)
MAX_PROMPT, MAX_NEW = 16, 16  # tokens of a prompt and of its response
# Mean difference of the log-probs of about 100 tokens. float32 engines differ by 4e-6 (docs/figures.md), on CUDA more:
# attention may compute in TF32. In bfloat16 SmolLM2-135M has 0.02 to 0.06, with 4-bit weights most; any 16 of those
# tokens have up to 0.09, so few tokens would not do. gpt-oss has 0.02 with right kernels, and 0.08 to 0.14 without its
# sinks (github.com/radixark/miles issue 1500).
FLOAT32_LIMITS, LIMIT_OF_16_BITS = {"cpu": 1e-4, "cuda": 1e-3}, 0.08
# Weights of 8 bits differ by their rounding, which is no mistake: in that model by 0.15, a probe by at most 0.23 (fp8,
# int8), with int4 by 3.2.
LIMIT_QUANTIZED = 0.3
LogProbs = Sequence[Sequence[float]]  # of each prompt's sampled tokens


class ParityGate:
    """Probes rollouts after pushes, and compares what they sampled with the actor.

    Args:
        config: Settings of the job.
        tokenizer: The policy's tokenizer.
        actor: Worker group of the actor.

    Attributes:
        metrics: Of the newest comparison, by their names in the log.
        knows_evaluator: Whether the processes of `trainer.eval_n_gpus` have been compared.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any, actor: Any):
        self._config, self._actor = config, actor
        longest = min(MAX_PROMPT, config.data.max_prompt_length)
        encoded = [tokenizer.encode(text, add_special_tokens=False)[:longest] for text in TEXTS]
        self._prompts = tuple(tuple(ids) or (0,) for ids in encoded)
        self._pushes: int | None = None  # since the last check; None: the next push is checked
        self.metrics: dict[str, float] = {}
        self.knows_evaluator = False

    def reset(self) -> None:
        """Check the next push and the next validation, because processes were replaced."""
        self._pushes, self.knows_evaluator = None, False

    def next_probe(self) -> Probing | None:
        """Return what goes with the next push; None if it is not checked."""
        freq = self._config.trainer.parity_freq
        if self._pushes is not None:
            self._pushes += 1
            if not freq or self._pushes < freq:
                return None
        self._pushes = 0
        return self.new_probe()

    def new_probe(self) -> Probing:
        """Return what rollout processes sample for a comparison."""
        most = min(MAX_NEW, self._config.data.max_response_length)
        return Probing(Probe(self._prompts, most, self._config.actor_rollout_ref.rollout.temperature))

    def check(self, probing: Probing, *, version: int) -> None:
        """Compare what every rollout process sampled with the actor.

        Raises:
            ParityError: The mean difference of some process is above the limit.
        """
        began = time.perf_counter()
        different = dict.fromkeys(each.token_ids for each in probing.found)
        expected = {tokens: self._trained_log_probs(probing.probe, tokens) for tokens in different}
        differences = [_differences(found.log_probs, expected[found.token_ids]) for found in probing.found]
        means, limit = [sum(each) / max(1, len(each)) for each in differences], self._limit(probing.found[0])
        self.metrics = {
            "parity/log_prob_diff_mean": max(means),
            "parity/log_prob_diff_max": max(chain.from_iterable(differences), default=0.0),
            "parity/time_s": time.perf_counter() - began + max(found.time_s for found in probing.found),
        }
        if max(means) > limit:
            raise ParityError(self._problem(probing.found, means, limit=limit, version=version))
        logger.info(
            "Rollout and trainer agree at version %d: mean log-prob difference %.1e over %d tokens (limit %g).",
            version,
            max(means),
            len(differences[0]),
            limit,
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of a comparison since the last call; empty without one."""
        taken, self.metrics = self.metrics, {}
        return taken

    def _trained_log_probs(self, probe: Probe, tokens: Sequence[Sequence[int]]) -> LogProbs:
        scored = self._actor.compute_log_prob(_rows(probe.prompts, tokens)).batch["old_log_probs"].tolist()
        return [row[: len(ids)] for row, ids in zip(scored, tokens, strict=True)]

    def _limit(self, found: ProbedTokens) -> float:
        """Return the limit of the settings, or that of the coarser dtype of rollout and actor."""
        limit = self._config.trainer.parity_limit
        if isinstance(limit, float):
            return limit
        if self._config.actor_rollout_ref.rollout.quantization is not None:
            return LIMIT_QUANTIZED
        in_float32 = {self._trained_dtype(found), found.dtype} == {torch.float32}
        return FLOAT32_LIMITS[found.device] if in_float32 else LIMIT_OF_16_BITS

    def _trained_dtype(self, found: ProbedTokens) -> torch.dtype:
        return resolve_dtype(engine_settings(self._config.actor_rollout_ref.actor).dtype, found.device)

    def _problem(self, found: Sequence[ProbedTokens], means: list[float], *, limit: float, version: int) -> str:
        model, chosen = self._actor.describe_model()[0], self._config.actor_rollout_ref.rollout
        ranks = [rank for rank, mean in enumerate(means) if mean > limit]
        return (
            f"rollout ranks {ranks} of {len(means)} ({chosen.name}) and the trainer differ by {max(means):.2g} on "
            f"average in the log-probs of the same tokens, with the same weights (version {version}); the limit is "
            f"{limit:g} "
            f"(trainer.parity_limit={self._config.trainer.parity_limit}). Training on them would be off-policy without "
            f"a sign. The model: {model}. Try, one at a time: {'; '.join(self._remedies(found[0]))}"
        )

    def _remedies(self, found: ProbedTokens) -> Iterator[str]:
        """Yield settings that may make rollout and trainer equal, then those that let the run go on."""
        policy = self._config.actor_rollout_ref
        if policy.rollout.quantization is not None:
            yield "leave actor_rollout_ref.rollout.quantization out"
        if policy.model.override_config.get("attn_implementation") != "eager":
            yield "actor_rollout_ref.model.override_config.attn_implementation=eager"
        if policy.model.use_remove_padding:
            yield "actor_rollout_ref.model.use_remove_padding=false"
        if policy.actor.use_prefix_grouper:
            yield "actor_rollout_ref.actor.use_prefix_grouper=false"
        if (trained := self._trained_dtype(found)) != found.dtype:
            yield f"actor_rollout_ref.rollout.dtype={str(trained).removeprefix('torch.')}"
        if policy.rollout.name != "hf":
            yield "actor_rollout_ref.rollout.name=hf"
        yield "trainer.parity_limit=NUMBER, or off, to train nevertheless, with algorithm.rollout_correction"


def make_parity_gate(config: PPOConfig, tokenizer: Any, actor: Any) -> ParityGate | None:
    """Return the gate of a run, or None.

    It is off, or the rollout returns no log-probs that could be compared.
    """
    name = config.actor_rollout_ref.rollout.name
    if config.trainer.parity_limit == "off" or config.only_generates:
        return None
    if not rollout_class(name).capabilities.log_probs:
        logger.info("The rollout %s returns no log-probs, so nothing compares them with the trainer's.", name)
        return None
    return ParityGate(config, tokenizer, actor)


def _differences(sampled: LogProbs, trained: LogProbs) -> list[float]:
    """Return |sampled - trained| of each token, infinite where one is not a number."""
    pairs = zip(chain.from_iterable(sampled), chain.from_iterable(trained), strict=True)
    differences = [abs(left - right) for left, right in pairs]
    return [math.inf if math.isnan(difference) else difference for difference in differences]


def _rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> DataProto:
    """Return the batch that the actor scores: prompts padded on the left, responses on the right."""
    mask = padded([[1] * len(ids) for ids in responses])
    columns = sequence_columns(prompt_columns(prompts, pad_token_id=0), padded(responses), mask)
    return DataProto.from_dict(tensors=columns | {"response_mask": mask})
