"""The schemas of `python -m hybridrl.main_generation` and `python -m hybridrl.main_eval`, with verl's names."""

from dataclasses import dataclass

from hybridrl.config.fields import MAX_NODES, MAX_SEED, MAX_SLOTS, section, setting
from hybridrl.config.schema.data import FILES, ImageDataConfig
from hybridrl.config.schema.ppo import CustomRewardConfig
from hybridrl.config.schema.rollout import GeneratorConfig
from hybridrl.config.schema.workers import SandboxFusionConfig


@dataclass(frozen=True)
class GenerationTrainerConfig:
    nnodes: int = setting(1, "Number of machines.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = setting(
        1, "Rollout processes per machine, each with one device (a CPU slot without GPUs).", ge=1, le=MAX_SLOTS
    )
    backend: str = setting(
        "ray", "Run the rollouts on Ray, or one in this process (local: no Ray).", choices=("ray", "local")
    )
    device: str = setting(
        "auto", "Device of the rollouts; auto is cuda where there is one.", choices=("auto", "cpu", "cuda")
    )
    num_threads: int | None = setting(
        None, "CPU threads of the rollout with backend=local; null means all cores.", ge=1, le=1024
    )
    seed: int = setting(1, "Seed of the sampling.", ge=0, le=MAX_SEED)


@dataclass(frozen=True)
class GenerationDataConfig(ImageDataConfig):
    path: list[str] = setting([], f"Prompts {FILES}")
    prompt_key: str = setting("prompt", "Column with the prompt: a string or a list of chat messages.")
    n_samples: int = setting(1, "Responses per prompt.", ge=1)
    output_path: str | None = setting(
        None, "Parquet file to write: the rows of data.path with the column `responses`, a list of texts."
    )
    batch_size: int = setting(
        128, "Prompts of one part of the output; a repeated command generates missing parts.", ge=1
    )
    truncation: str = setting("error", "What to do with a longer prompt.", choices=("error", "left", "right", "middle"))
    apply_chat_template_kwargs: dict = setting({}, "Keyword arguments for the tokenizer's chat template.", free=True)


@dataclass(frozen=True)
class GenerationModelConfig:
    path: str | None = setting(None, "Directory, or name on the Hugging Face hub, of the model with its tokenizer.")
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model.")


@dataclass(frozen=True)
class GenerationRolloutConfig(GeneratorConfig):
    temperature: float = setting(1.0, "Softmax temperature; 0 is greedy.", ge=0)
    top_k: int = setting(-1, "Keep the k most likely tokens; -1 is off.", ge=-1)
    top_p: float = setting(1.0, "Keep the smallest set of tokens with this probability mass.", gt=0, le=1)
    do_sample: bool = setting(True, "Sample; false is greedy.")
    prompt_length: int = setting(512, "Longest prompt in tokens.", gt=0)
    response_length: int = setting(512, "Longest response in tokens.", gt=0)
    kv_cache_memory_mb: int = setting(512, "Memory of vLLM's KV cache in MB (CPU).", gt=0)
    tensor_model_parallel_size: int = setting(1, "Devices of one engine; this program uses one each.", ge=1, le=1)


@dataclass(frozen=True)
class GenerationConfig:
    trainer: GenerationTrainerConfig = section(GenerationTrainerConfig, "Machines and processes.")
    data: GenerationDataConfig = section(GenerationDataConfig, "Prompts and output.")
    model: GenerationModelConfig = section(GenerationModelConfig, "The model.")
    rollout: GenerationRolloutConfig = section(GenerationRolloutConfig, "Generation.")


@dataclass(frozen=True)
class EvaluationDataConfig:
    path: list[str] = setting([], f"Rows with responses, as main_generation writes them {FILES}")
    prompt_key: str = setting("prompt", "Column with the prompt; may be absent.")
    response_key: str = setting("responses", "Column with the responses: a text or a list of texts.")
    data_source_key: str = setting("data_source", "Column that chooses the score function.")
    reward_model_key: str = setting("reward_model", "Column with the ground truth, as a mapping.")
    output_path: str | None = setting(
        None, "JSON lines to write, one per response: text, score, what the function returned beside it; null: none."
    )


@dataclass(frozen=True)
class ScoringConfig:
    num_processes: int | None = setting(None, "Processes that score; null means one per core, at most 32.", ge=1)
    timeout_s: float = setting(10.0, "Wall-clock limit of one call in seconds.", gt=0)
    limits: dict = setting(
        {},
        "Limits of a reward process (memory_mb, file_mb, processes, output_mb), and env: names of environment "
        "variables that it sees.",
        free=True,
    )
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig, "The sandbox of responses that are programs.")


@dataclass(frozen=True)
class EvaluationConfig:
    data: EvaluationDataConfig = section(EvaluationDataConfig, "Rows to score.")
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig, "Your own compute_score function.")
    reward_model: ScoringConfig = section(ScoringConfig, "How scores are computed.")
