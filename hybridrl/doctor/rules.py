"""Rules about the metrics of a run: what may be seen in them, and what to change then.

A threshold is a reason to look, not a proof; docs/monitoring.md has the sources and the healthy ranges.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridrl.doctor.curves import Curves
from hybridrl.doctor.finding import Finding

SCORE, ENTROPY, LENGTH = "critic/score/mean", "actor/entropy", "response_length/mean"
FLAT = 1e-3  # a score that moves less does not move
MIN_FALL = 0.05  # of a score; a smaller one may be noise
LOW_ENTROPY = 0.005  # nats; the quick start ends with 0.012 and 99 % right answers
FALL = 0.4  # to this share of the first values: of length or entropy, where the held-out accuracy does not rise
RESULTS = ("reward_extra/acc/mean", "reward_extra/accuracy/mean", "reward_extra/correct/mean")
FAR_STEP = 1.0  # of actor/ppo_kl: one step that leaves no doubt
FAILURES = "reward/"  # metrics that count failed calls
MIN_STAGE_SHARE = 0.1  # of a step, for a stage worth naming


@dataclass(frozen=True)
class Limit:
    """A metric that should stay within limits at the end of a run.

    Attributes:
        metric: Its name.
        low, high: The limits.
        says: What a value outside of them says.
        change: What to change then.
    """

    metric: str
    says: str
    change: str
    high: float = float("inf")
    low: float = float("-inf")


LIMITS = (
    Limit(
        "training/rollout_probs_diff_mean",
        "trainer and rollout disagree about probabilities",
        "check the push (docs/weights.md) and rollout.dtype; algorithm.rollout_correction.rollout_is=token",
        high=0.02,
    ),
    Limit(
        "rollout_corr/kl",
        "the rollout's policy is far from the trainer's",
        "trainer.lag down; algorithm.rollout_correction.rollout_is=token",
        high=0.1,
        low=-0.1,
    ),
    Limit(
        "rollout_corr/eff_sample_size",
        "few tokens carry the importance weights: the trained weights are stale",
        "trainer.lag down; algorithm.rollout_correction.rollout_rs",
        low=0.3,
    ),
    Limit(
        "rollout_corr/rollout_rs_masked_fraction",
        "most of the generation is rejected",
        "algorithm.rollout_correction.rollout_rs_threshold wider; trainer.lag down",
        high=0.3,
    ),
    Limit(
        "reward/timeout_ratio",
        "reward calls run out of time",
        "reward_model.timeout_s up, reward_model.num_processes up; or mend the reward function",
        high=0.01,
    ),
    Limit(
        "reward/error_ratio",
        "reward calls fail",
        "read the warnings about rewards in the log, and mend the reward function",
        high=0.01,
    ),
    Limit(
        "response_length/clip_ratio",
        "responses are cut at the length limit and scored as wrong",
        "data.max_response_length up, or a length penalty (reward_model.overlong_buffer)",
        high=0.2,
    ),
    Limit(
        "actor/ppo_kl",
        "a step moves the policy too far",
        "actor_rollout_ref.actor.optim.lr down; fewer ppo_epochs; larger ppo_mini_batch_size",
        high=0.1,
    ),
    Limit(
        "actor/pg_clipfrac",
        "the clip removes the gradient of many tokens",
        "actor_rollout_ref.actor.optim.lr down; fewer ppo_epochs",
        high=0.3,
    ),
    Limit(
        "critic/vf_explained_var",
        "the critic is worse than a constant",
        "critic.optim.lr up or down; trainer.critic_warmup; algorithm.normalize_reward",
        low=-0.1,
    ),
)
"""By the median of a run's last fifth, except for shares of failures, where the mean counts."""


def findings(curves: Curves, *, lag: int) -> Iterator[Finding]:
    """Yield what the rules find in a run.

    Args:
        curves: Its metrics.
        lag: `trainer.lag`.
    """
    yield from _collapse(curves)
    yield from failure_shares(curves)
    for limit in LIMITS:
        if not limit.metric.startswith(FAILURES):
            yield from _beyond(limit, curves.end(limit.metric))
    for rule in RULES:
        yield from rule(curves)
    if (age := curves.end("async/age_mean")) > lag + 0.5:
        seen = f"async/age_mean is {age:.2g} with trainer.lag={lag}"
        yield Finding("trained tokens are old", seen, "trainer.staleness down, or trainer.stale_tokens=drop")


def _score(curves: Curves) -> Iterator[Finding]:
    values = curves.values(SCORE)
    if not values or curves.spread(SCORE) >= FLAT:
        return
    seen = f"{SCORE} stays at {values[-1]:.4g} for {len(values)} steps"
    if curves.end("critic/advantages/max") == curves.end("critic/advantages/min") == 0.0:
        change = "no group has different scores: algorithm.filter_groups.enable=true, rollout.n up, or other prompts"
    else:
        change = "read samples (trainer.rollout_data_dir) and test the reward function on right answers"
    yield Finding("the reward does not move", seen, change)


def failure_shares(curves: Curves) -> Iterator[Finding]:
    """Yield shares of failed calls above their limits; a few steps are enough to judge them."""
    for limit in LIMITS:
        if limit.metric.startswith(FAILURES):
            yield from _beyond(limit, curves.mean_end(limit.metric))


def _beyond(limit: Limit, value: float) -> Iterator[Finding]:
    if value > limit.high or value < limit.low:
        bound = f"above {limit.high:g}" if value > limit.high else f"below {limit.low:g}"
        yield Finding(limit.says, f"{limit.metric} is {value:.4g}, {bound}", limit.change)


def _collapse(curves: Curves) -> Iterator[Finding]:
    values = curves.values(SCORE)
    first, last = max(values[: max(1, len(values) // 5)], default=0.0), curves.end(SCORE)
    if first > 0 and last < min(0.5 * first, first - MIN_FALL):
        seen = f"{SCORE} fell from {first:.3g} to {last:.3g}"
        lowest, entropy = min(curves.values(ENTROPY), default=math.nan), curves.end(ENTROPY)
        if entropy > 2 * lowest:
            seen += f", {ENTROPY} rose from {lowest:.3g} to {entropy:.3g}"
        change = "actor_rollout_ref.actor.optim.lr down, by 10 at first; actor.use_kl_loss=true; then start again"
        yield Finding("the policy was destroyed", seen, change)


def _accuracies(curves: Curves) -> list[str]:
    """Return the metrics that show whether responses are right: of validation, and beside the training score."""
    return [name for name in [*curves.names("val-core/"), *RESULTS] if len(curves.values(name)) > 1]


def _rises(curves: Curves, name: str) -> bool:
    return curves.end(name) > curves.start(name) + MIN_FALL


def far_steps(curves: Curves, learning_rate: Any) -> Iterator[Finding]:
    """Yield the first step that moved the policy beyond doubt, with the learning rate; one step is enough."""
    steps, values = curves.series("actor/ppo_kl")
    far = next(((step, value) for step, value in zip(steps, values, strict=True) if value > FAR_STEP), None)
    if far is not None:
        seen = f"actor/ppo_kl is {far[1]:.3g} at step {far[0]}, with optim.lr={learning_rate}; below 0.05 is usual"
        change = "actor_rollout_ref.actor.optim.lr down by 10 or more (1e-6 to 1e-5 is usual), and start again"
        yield Finding("the learning rate is too high", seen, change)


def _entropy(curves: Curves) -> Iterator[Finding]:
    first, last = curves.start(ENTROPY), curves.end(ENTROPY)
    accuracies = _accuracies(curves)
    is_useless = bool(accuracies) and not any(_rises(curves, name) for name in accuracies)
    if (last < LOW_ENTROPY and last < 0.2 * first) or (last < FALL * first and is_useless):
        change = "actor_rollout_ref.actor.clip_ratio_high up (0.28), entropy_coeff up, optim.lr down"
        yield Finding("the policy no longer explores", f"{ENTROPY} fell from {first:.3g} to {last:.3g}", change)


def _gradient(curves: Curves) -> Iterator[Finding]:
    norms = curves.values("actor/grad_norm")
    if not norms:
        return
    usual = statistics.median(norms)
    if usual == 0.0:
        yield Finding("there is nothing to learn from", "actor/grad_norm is 0", "see the reward and the advantages")
    elif norms[-1] > 10 * usual:
        seen = f"actor/grad_norm is {norms[-1]:.3g}, usually {usual:.3g}"
        yield Finding("the gradient has jumped", seen, "optim.lr down, grad_clip down; resume from an earlier step")


def _skipped(curves: Curves) -> Iterator[Finding]:
    skipped = sum(value > 0 for value in curves.values("actor/skipped"))
    if skipped > 1:
        change = "trainer.nonfinite=rollback; actor_rollout_ref.actor.optim.lr down"
        yield Finding("updates were skipped", f"NaN or infinity in {skipped} steps", change)
    if (empty := curves.end("actor/empty")) > 0:
        change = "algorithm.rollout_correction.rollout_rs_threshold wider: the rejections leave nothing"
        yield Finding("updates have no tokens", f"actor/empty is {empty:.2g}", change)


def _length(curves: Curves) -> Iterator[Finding]:
    first, last = curves.start(LENGTH), curves.end(LENGTH)
    seen = f"{LENGTH} fell from {first:.3g} to {last:.3g}"
    if last < 3 and first > 3 * last:
        yield Finding("responses have become empty", seen, "read samples; the reward may pay for saying nothing")
    elif last < FALL * first and not any(_rises(curves, name) for name in _accuracies(curves)):
        if curves.end(SCORE) > curves.start(SCORE):
            seen += f" while {SCORE} rose from {curves.start(SCORE):.3g} to {curves.end(SCORE):.3g}"
        change = "read samples (hybridrl view RUN): the reward may pay for short responses; pay for right ones only"
        yield Finding("responses have collapsed", seen, change)


def _results(curves: Curves) -> Iterator[Finding]:
    """Yield a score that rises without what it should stand for, as with a bonus for the format."""
    gain = curves.end(SCORE) - curves.start(SCORE)
    for name in RESULTS:
        if curves.values(name) and gain > MIN_FALL and curves.end(name) - curves.start(name) < 0.2 * gain:
            seen = f"{SCORE} rose by {gain:.2g}, {name} went from {curves.start(name):.3g} to {curves.end(name):.3g}"
            change = "pay the bonus for right answers only, or less; read samples (hybridrl view RUN)"
            yield Finding("the reward rises without right answers", seen, change)


def _validation(curves: Curves) -> Iterator[Finding]:
    for name in curves.names("val-core/"):
        values = curves.values(name)
        rises = curves.end(SCORE) > curves.start(SCORE)
        best = max(values, default=math.nan)
        if len(values) > 1 and values[-1] < best - max(MIN_FALL, 0.2 * best) and rises:
            change = "stop at the best step, add data, or look for a gamed reward in the samples"
            seen = f"{name} fell from {best:.3g} to {values[-1]:.3g} while {SCORE} rose"
            yield Finding("the gain does not generalise", seen, change)


def _stages(curves: Curves) -> Iterator[Finding]:
    step = curves.end("timing_s/step")
    for name in curves.names("timing_s/"):
        first, last = curves.begin(name), curves.end(name)
        usual = statistics.median(curves.values(name) or [0.0])  # low, if only some steps validate or save
        if name != "timing_s/step" and last > 2 * first > 0 and min(last, 3 * usual) > MIN_STAGE_SHARE * step:
            grows = curves.end(LENGTH) > 1.5 * curves.begin(LENGTH)
            change = "responses grew as well; data.max_response_length" if grows else STAGES.get(name, TRACE)
            yield Finding("a stage has become slower", f"{name} went from {first:.3g} to {last:.3g} s", change)


def _agents(curves: Curves) -> Iterator[Finding]:
    for name in curves.names("rollout/agent/"):
        if "failed" in name or "left_out" in name:
            values = curves.values(name)
            if sum(value > 0 for value in values) > len(values) / 2:
                seen = f"{name} is {curves.mean_end(name):.3g} per step"
                change = "read the warnings about agent loops in the log; mend the environment or raise its time limit"
                yield Finding("agent loops fail", seen, change)


TRACE = "trainer.trace=true, and look at the timeline: hybridrl view RUN"
STAGES = {
    "timing_s/reward": "reward_model.num_processes up; trainer.overlap=true",
    "timing_s/gen": "rollout.gpu_memory_utilization up; a rollout pool with trainer.lag=1",
    "timing_s/update_weights": "see docs/weights.md for another transport",
}
RULES: tuple[Callable[[Curves], Iterator[Finding]], ...] = (
    _score,
    _entropy,
    _gradient,
    _skipped,
    _length,
    _results,
    _validation,
    _stages,
    _agents,
)
