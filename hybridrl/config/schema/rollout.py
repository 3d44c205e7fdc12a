"""Settings of generation: the rollout, its pushes of weights, validation and agents.

Keys and defaults follow verl where verl has them.
"""

from dataclasses import dataclass

from hybridrl.config.fields import MAX_NODES, MAX_SLOTS, section, setting
from hybridrl.config.schema.engine import BUDGET, DYNAMIC, MICRO

SHAPES = "Log-probs are computed without it."
QUANTIZATION = ("fp8", "int8", "int4")


@dataclass(frozen=True)
class ValKwargs:
    n: int = setting(1, "Samples per validation prompt.", ge=1)
    do_sample: bool = setting(False, "Sample in validation; false is greedy.")
    temperature: float = setting(1.0, "Temperature in validation, when sampling.", gt=0)
    top_k: int = setting(-1, "Top-k in validation; -1 is off.", ge=-1)
    top_p: float = setting(1.0, "Top-p in validation.", gt=0, le=1)
    min_p: float = setting(0.0, "Min-p in validation; 0 is off.", ge=0, le=1)


TRANSPORTS_BY_PLACEMENT = ("auto", "in_process")
"""Values of `weight_sync.transport` that name no transport."""


@dataclass(frozen=True)
class WeightSyncConfig:
    transport: str = setting(
        "auto",
        "How new weights are sent to rollout processes; auto: in_process if actor and rollout share them, "
        "object_store if generation runs ahead of training, else shared_memory on one machine and broadcast between "
        "several. Also disk, or a class of your own, as package.module:Name or path/to/file.py:Name.",
    )
    lora: str = setting(
        "merged",
        "With LoRA, a push contains merged weights, or, after a first full push, the adapters alone; the rollout "
        "then keeps the base weights in host memory and merges the adapters itself.",
        choices=("merged", "adapter"),
    )
    bucket_mb: int = setting(
        64, "Size in MB of the buckets in which weights are sent; a sender allocates one or two of them.", ge=1
    )
    directory: str | None = setting(
        None, "Where transport=disk writes weights: a directory or URL that all machines can access."
    )

    @property
    def by_placement(self) -> bool:
        """Whether the placement of actor and rollout decides the transport, if there is any."""
        return self.transport in TRANSPORTS_BY_PLACEMENT


@dataclass(frozen=True)
class AgentConfig:
    default_agent_loop: str = setting(
        "single_turn_agent", "Agent loop that generates responses (mode=async), unless a row has an agent_name."
    )
    path: str | None = setting(None, "Python file or module that registers agent loops of your own (mode=async).")
    program: str | None = setting(
        None,
        "What the agent loop http_agent starts for each row: a Python function (file.py:name or package.module:name), "
        "or a command.",
    )
    timeout_s: float | None = setting(
        None,
        "Seconds for one response of an agent loop, which fails after that (mode=async), without those in which it "
        "waits for new weights; null: only trainer.call_timeout_s limits all of them together. outside_agent needs it.",
        gt=0,
    )
    train_branches: bool = setting(
        True,
        "Train every conversation of an agent, also those of sub-agents, parallel calls and before a compaction "
        "(mode=async); false: the main one only.",
    )
    min_group_share: float = setting(
        0.5,
        "Share of a batch's sample groups that a step needs (mode=async); the others are left out because their agent "
        "loops failed.",
        gt=0,
        le=1,
    )


@dataclass(frozen=True)
class MultiTurnConfig:
    function_tool_path: str | None = setting(
        None, "Python file; agents may call its functions marked @function_tool (mode=async)."
    )
    max_assistant_turns: int | None = setting(
        None, "Turns of the policy in one response; null: as many as fit (mode=async).", ge=1
    )
    interaction_config_path: str | None = setting(
        None, "YAML or JSON file of the environments that rows name (agent loop environment_agent or verifiers_agent)."
    )


@dataclass(frozen=True)
class GeneratorConfig:
    """The generation engine, of a run and of `main_generation`."""

    name: str = setting(
        "vllm", "Generation engine: vllm, hf, or a class of your own, as package.module:Name or path/to/file.py:Name."
    )
    dtype: str = setting(
        "auto",
        "Dtype of generation; auto is bfloat16 on CUDA, float32 on CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_num_seqs: int = setting(1024, "Sequences generated at the same time per process.", ge=1)
    max_num_batched_tokens: int = setting(8192, "Tokens of one vLLM engine step.", ge=1)
    gpu_memory_utilization: float = setting(0.5, "Share of device memory for vLLM (CUDA).", gt=0, le=1)
    enforce_eager: bool = setting(True, "Do not capture CUDA graphs.")


@dataclass(frozen=True)
class RolloutConfig(GeneratorConfig):
    mode: str = setting(
        "sync",
        "One batched call per step; async: requests through agent loops and a router.",
        choices=("sync", "async"),
    )
    nnodes: int = setting(1, "Machines of the rollout's own pool, if it has one.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = setting(
        0, "Rollout processes per machine in a pool of their own; 0: in the trainer's processes.", ge=0, le=MAX_SLOTS
    )
    n: int = setting(1, "Samples per prompt.", ge=1, le=100_000)
    temperature: float = setting(1.0, "Softmax temperature, also of the training log-probs.", gt=0)
    top_k: int = setting(-1, "Keep the k most likely tokens; -1 is off.", ge=-1)
    top_p: float = setting(1.0, "Keep the smallest set of tokens with this probability mass.", gt=0, le=1)
    min_p: float = setting(
        0.0, "Keep tokens with at least this share of the likeliest one's probability; 0 is off.", ge=0, le=1
    )
    repetition_penalty: float = setting(
        1.0, f"Divides logits of tokens in prompt and response; 1 is off. {SHAPES}", gt=0, le=2
    )
    presence_penalty: float = setting(0.0, f"Subtracted from logits of tokens in the response. {SHAPES}", ge=-2, le=2)
    frequency_penalty: float = setting(
        0.0, f"Subtracted from logits for each occurrence in the response. {SHAPES}", ge=-2, le=2
    )
    min_tokens: int = setting(0, "Minimum number of tokens of a response.", ge=0)
    stop: list[str] = setting([], "Strings that end a response, which includes them (one or a list).")
    stop_token_ids: list[int] = setting(
        [], "Tokens that end a response in addition to the model's own, also with ignore_eos.", ge=0
    )
    ignore_eos: bool = setting(False, "Continue to generate after the end-of-sequence token.")
    quantization: str | None = setting(
        None,
        "Generate with weights of one byte per value (fp8: e4m3) and a scale per block of 128 x 128; null: as trained.",
        choices=QUANTIZATION,
    )
    calculate_log_probs: bool = setting(
        True, "Return the sampled tokens' log-probs and log their difference to the trainer's."
    )
    enable_rollout_routing_replay: bool = setting(
        False, "Return the experts of every token (column routed_experts), which router_replay.mode=R3 needs."
    )
    kv_cache_memory_mb: int = setting(128, "Memory of vLLM's KV cache in MB (CPU).", gt=0)
    tensor_model_parallel_size: int = setting(
        1, "Worker processes that share one generation engine (vLLM, on one machine).", ge=1
    )
    engine_kwargs: dict = setting(
        {},
        "Further arguments of vLLM's engine, also as engine_kwargs.vllm.KEY, or of a rollout of your own.",
        free=True,
    )
    free_cache_engine: bool = setting(
        True, "Free weights and KV cache between generation phases; on CPU the KV cache of vLLM."
    )
    enable_chunked_prefill: bool = setting(True, "Mix prefill and decode in one vLLM step.")
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    log_prob_use_dynamic_bsz: bool = setting(False, DYNAMIC)
    log_prob_max_token_len_per_gpu: int = setting(16384, BUDGET, gt=0)
    progress_timeout_s: float = setting(
        300.0, "Seconds without an answer after which a process counts as stuck (mode=async).", gt=0
    )
    endpoint_port: int = setting(
        0,
        "Port on the driver's machine of an OpenAI-compatible endpoint to the current policy (mode=async); 0 means "
        "none.",
        ge=0,
        le=65535,
    )
    endpoint_host: str = setting(
        "127.0.0.1",
        "Address on which the endpoint listens; 0.0.0.0 means all of the machine's. Clients need a key only if the "
        "environment variable HYBRIDRL_API_KEY sets one.",
    )
    agent: AgentConfig = section(AgentConfig, "Agent loops.")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "Responses of several turns.")
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling in validation.")
    weight_sync: WeightSyncConfig = section(WeightSyncConfig, "Transport of the actor's weights to the rollout.")
