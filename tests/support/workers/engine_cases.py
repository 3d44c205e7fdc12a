"""FSDP2 engines on the tiny model of `hybridrl.testing`, and what the engine tests read of them.

Not a test file.
"""

from dataclasses import fields

import torch

from hybridrl.config.schema.workers import FSDPConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.testing.engine_reference import (
    PROMPT,
    RESPONSE,
    UNDETERMINED,
    VOCAB,
    assert_same_weights,
    make_batch,
    num_response_tokens,
    plain_outputs,
    policy_loss,
    save_tiny_qwen2,
)
from hybridrl.workers.engine.base import EngineSetup, MicroBatching
from hybridrl.workers.engine.fsdp.engine import FSDPEngine

__all__ = [
    "OPTIM",
    "PROMPT",
    "RESPONSE",
    "UNDETERMINED",
    "VOCAB",
    "WHOLE",
    "assert_same_weights",
    "case_batch",
    "gradients",
    "make_batch",
    "make_engine",
    "num_response_tokens",
    "plain_outputs",
    "policy_loss",
    "save_scorer",
    "save_tiny_qwen2",
    "train",
    "unset_engine",
    "whole_weights",
]
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # whose sums differ from those of AVX2 in their last bits
WHOLE = MicroBatching()
OPTIM = OptimConfig(lr=1e-4, weight_decay=0.1)


def case_batch(settings: dict) -> DataProto:
    """Return the batch of a case: `make_batch`, with shared prompts if the engine shares prefixes."""
    batch = make_batch()
    if settings.get("share_prefixes"):
        drawn = torch.Generator().manual_seed(3)
        prompts = torch.randint(0, VOCAB, (len(batch) // 4, PROMPT), generator=drawn)
        batch.batch["input_ids"][:, :PROMPT] = prompts.repeat(4, 1)  # rows of one prompt are not adjacent
        batch.batch["attention_mask"][:, :PROMPT] = 1
    return batch


def save_scorer(policy: str, path) -> str:
    """Write a reward model: the policy's body with a new head."""
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(path)
    return str(path)


def make_engine(path: str, **settings) -> FSDPEngine:
    engine = unset_engine(path, **settings)
    engine.setup()
    return engine


def unset_engine(path: str, **settings) -> FSDPEngine:
    """Return an engine that has not been set up: its `config` only."""
    usual = {"kind": "causal_lm", "path": path, "optim": OPTIM, "grad_clip": 100.0, "total_steps": 10}
    own = {field.name: settings.pop(field.name) for field in fields(FSDPConfig) if field.name in settings}
    return FSDPEngine(EngineSetup(**usual | settings, settings=FSDPConfig(**own)))


def train(
    engine: FSDPEngine, batch: DataProto, micro: MicroBatching, *, num_tokens: float, steps: int = 2
) -> list[dict[str, float]]:
    """Apply optimizer steps on one batch and return the result of each step."""
    reports = []
    for _ in range(steps):
        engine.forward_backward(batch, micro, policy_loss(num_tokens), outputs=("log_probs", "entropy"))
        reports.append(engine.optimizer_step())
    return reports


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Return full gradients by name. Collective."""
    return {name: p.grad.full_tensor().clone() for name, p in engine.model.named_parameters() if p.requires_grad}


def whole_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}
