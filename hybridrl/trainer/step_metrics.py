"""The figures that every PPO step has, whatever its algorithm."""

from hybridrl.config import PPOConfig
from hybridrl.framework import OnlineRLContext
from hybridrl.trainer.metrics import Metrics, compute_data_metrics, compute_throughput_metrics, compute_timing_metrics
from hybridrl.trainer.stages import uses_critic


def step_metrics(ctx: OnlineRLContext, config: PPOConfig, *, num_gpus: int) -> Metrics:
    """Return figures of the samples that are no replayed ones, of the time that all took, and of tokens per second."""
    metrics = compute_data_metrics(
        ctx.batch[: ctx.get("num_new")],
        use_critic=uses_critic(config),
        max_response_length=config.data.max_response_length,
        max_prompt_length=config.data.max_prompt_length,
    )
    return metrics | compute_timing_metrics(ctx.batch, ctx.timing) | compute_throughput_metrics(ctx.batch, ctx.timing, num_gpus)
