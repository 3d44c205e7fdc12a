"""The Megatron-core engine: `MegatronEngine` in `engine.py`. Importing this package imports megatron-core.

cpu            megatron-core on a machine without CUDA
layout         which processes share which part of the model, and which of them answers
architecture   Hugging Face settings -> Megatron's, one table entry per family
layers         the layers: torch's own kernels, packing and context parallelism
hf_weights     weights from and to Hugging Face names, a tensor at a time
pieces         what one process computes of a micro-batch
vocabulary     log-probs and entropy where the vocabulary is cut over processes
network        the model: GPTModel with the head that a kind needs
state          checkpoints that load under another layout
"""

import warnings

with warnings.catch_warnings():  # five warnings that a machine without Transformer Engine does not have it
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    import megatron.core.distributed
    import megatron.core.optimizer
    import megatron.core.parallel_state  # noqa: F401
