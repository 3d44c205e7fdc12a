"""Megatron-core engine: `MegatronEngine` in `engine.py`. Importing this package imports megatron-core.

cpu_backend        megatron-core on a machine without CUDA
parallel_groups    Megatron's process groups and this process's mesh position
architecture       Hugging Face settings to Megatron's, one table entry per model family
layers             layers on torch's own kernels, with packing and context parallelism
adapters           low-rank adapters (LoRA) on tensor-parallel layers
hf_weights         weights from and to Hugging Face names, one tensor at a time
local_tokens       the tokens of a micro-batch that one process computes
sharded_log_probs  log-probs and entropy where the vocabulary is sharded
network            the model: GPTModel with the head of the engine's kind
checkpoint         checkpoints that load under another layout
"""

import warnings

with warnings.catch_warnings():  # megatron-core warns five times that Transformer Engine is missing
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    import megatron.core.distributed
    import megatron.core.optimizer
    import megatron.core.parallel_state  # noqa: F401
