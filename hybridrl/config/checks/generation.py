"""Rules over several settings of `main_generation` and `main_eval`, before anything starts."""

from hybridrl.config.build import Problems, raise_problems
from hybridrl.config.capabilities import RolloutCapabilities
from hybridrl.config.checks.rules import missing_files
from hybridrl.config.reward_limits import RewardLimits
from hybridrl.config.schema.generation import EvaluationConfig, GenerationConfig


def check_generation_config(config: GenerationConfig, *, rollout: RolloutCapabilities) -> None:
    """Raise one ConfigError with all contradictions in `config`.

    Args:
        config: Settings.
        rollout: What the rollout of `rollout.name` can do.
    """
    raise_problems([*_input_problems(config.data.path), *_generation_problems(config, rollout)])


def check_evaluation_config(config: EvaluationConfig) -> None:
    """Raise one ConfigError with all contradictions in `config`."""
    raise_problems([*_input_problems(config.data.path)])
    RewardLimits.of(config.reward_model.limits)


def _input_problems(paths: list[str]) -> Problems:
    if not paths:
        yield "data.path=[]: nothing to read; give a parquet or .jsonl file"
    yield from missing_files("path", paths)


def _generation_problems(config: GenerationConfig, rollout: RolloutCapabilities) -> Problems:
    data, chosen, trainer = config.data, config.rollout, config.trainer
    if data.output_path is None:
        yield "data.output_path=null: where should the responses go? give a parquet file"
    if config.model.path is None:
        yield "model.path=null: which model? give a directory or a name of the Hugging Face hub"
    if data.n_samples > 1 and (not chosen.do_sample or chosen.temperature == 0):
        yield f"data.n_samples={data.n_samples}: greedy responses are all the same; set rollout.temperature above 0"
    if not rollout.requests:
        yield f"rollout.name={chosen.name}: needs the capability requests, which it does not declare; use vllm or hf"
    if trainer.backend == "local" and trainer.nnodes * trainer.n_gpus_per_node > 1:
        yield "trainer.backend=local: runs one process; set trainer.backend=ray for several"
