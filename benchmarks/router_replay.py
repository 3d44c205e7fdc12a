"""Measure what a replay of experts changes.

A bfloat16 rollout and a float32 trainer have a mixture of experts with near-tied routers.

Small router weights make near ties, as in a trained model with hundreds of experts. The `hf` rollout generates in
bfloat16 and records its routes; the FSDP engine computes log-probs of the same tokens in float32, as it does for
`old_log_probs`: with its own experts (disabled, and R2, which replays the trainer's own pass), and with those of the
rollout (R3). Columns: tokens for which some layer would have chosen other experts than it computed with; mean and
largest |difference| of log-probs to the rollout.

    python benchmarks/router_replay.py [--prompts 32] [--response 32] [--router-scale 0.02]

Exits with status 1 if R3 does not lower the mean difference.
"""

import argparse
import sys
import tempfile
from dataclasses import replace

import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.workers import FSDPConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import ROUTED_EXPERTS, EngineSetup, MicroBatching
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
from hybridrl.workers.engine.routing.routes import unpack
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout

PROMPT, VOCAB = 16, 256
MICRO = MicroBatching(max_rows=16)


def save_model(folder: str, *, router_scale: float) -> None:
    """Write a random Qwen3-MoE of 4 layers, 32 experts and 4 of them for a token."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight *= router_scale / 0.1
    model.bfloat16().save_pretrained(folder)  # both sides then have the same weights


def generated(folder: str, *, prompts: int, response: int) -> DataProto:
    """Return sampled rows of a bfloat16 rollout with their log-probs and routes."""
    config = replace(RolloutConfig(), dtype="bfloat16", enable_rollout_routing_replay=True)
    setup = RolloutSetup(folder, config, (VOCAB,), 0, PROMPT, response)
    ids = torch.randint(1, VOCAB, (prompts, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
    return make_rollout("hf", setup).generate(DataProto.from_dict(tensors=columns), SamplingParams(response))


def row(name: str, batch: DataProto, found: torch.Tensor, differ: float) -> float:
    """Print a row of the table and return its mean difference."""
    mask = batch.batch["response_mask"].bool()
    difference = (found - batch.batch["rollout_log_probs"])[mask].abs()
    print(f"{name:<10}{differ:>16.1%}{difference.mean():>18.2e}{difference.max():>18.2e}", flush=True)
    return float(difference.mean())


def share_of_others(one: DataProto, other: DataProto) -> float:
    """Return the share of tokens with other experts in some layer, among those that both have routes of."""
    pairs = zip(one.non_tensor_batch[ROUTED_EXPERTS], other.non_tensor_batch[ROUTED_EXPERTS], strict=True)
    same = [(unpack(a[: len(b)]).sort(-1).values == unpack(b).sort(-1).values).all(-1).all(-1) for a, b in pairs]
    return 1 - float(torch.cat(same).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--router-scale", type=float, default=0.02, help="standard deviation of router weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, router_scale=arguments.router_scale)
        batch = generated(folder, prompts=arguments.prompts, response=arguments.response)
        setup = EngineSetup(kind="causal_lm", path=folder, settings=FSDPConfig(dtype="float32"), replays_routes=True)
        engine = FSDPEngine(setup)
        engine.setup()
        plain = batch.select(non_tensor_batch_keys=[])
        own, routes = engine.forward_with_routes(plain, MICRO, outputs=("log_probs",))
        recorded = batch.select()
        recorded.non_tensor_batch = {ROUTED_EXPERTS: routes}
        print(f"{'mode':<10}{'other experts':>16}{'mean |d log p|':>18}{'largest':>18}")
        disabled = row("disabled", batch, own["log_probs"], share_of_others(recorded, batch))
        r2 = engine.forward(recorded, MICRO, outputs=("log_probs",))["log_probs"]
        row("R2", batch, r2, share_of_others(recorded, batch))
        r3 = engine.forward(batch, MICRO, outputs=("log_probs",))["log_probs"]
        replayed = row("R3", batch, r3, 0.0)
    sys.exit(0 if replayed < disabled else 1)


if __name__ == "__main__":
    main()
