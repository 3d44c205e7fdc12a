"""Snapshots sampled by vLLM: adapters in its own layers, and merged ones in turns.

The hf rollout is beside them.

    python -m benchmarks.adapters_in_vllm MODEL [--rounds 3]

draws adapters, and asks each way for the same samples of all snapshots and the base model. It prints the median CPU
seconds of this process, so other load does not count, and the memory of an adapter and of vLLM's slots. Adapters leave
out the output embedding, which cannot be merged where it is tied.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.training_service.computation.adapter_slots import TrainedLayers
from hybridrl.training_service.computation.snapshot_sampler import BASE, AdapterRollout, SnapshotSampler, Version
from hybridrl.training_service.computation.vllm_sampler import AdapterSampler, MergedRollout, make_vllm_sampler
from hybridrl.workers.rollout.base import RolloutSetup, load_special_tokens
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

RANK, SNAPSHOTS, PROMPTS, NEW_TOKENS, LENGTH = 16, 3, 8, 64, 128
SLICE_S = 0.2


def setup_of(model: str, name: str) -> RolloutSetup:
    """Return the setup that a sampling worker would use."""
    tokens = load_special_tokens(model)
    config = RolloutConfig(name=name, max_num_seqs=64)
    return RolloutSetup(
        model, config, tokens.eos_ids, tokens.pad_id, max_prompt_length=1, max_response_length=LENGTH - 1
    )


def drawn(layers: dict[str, Any], seed: int) -> Version:
    """Return an adapter of all layers but the output embedding."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, layer in layers.items():
        if name != "lm_head":
            tensors[f"{name}.lora_A"] = torch.randn(RANK, layer.in_features, generator=generator) * 0.02
            tensors[f"{name}.lora_B"] = torch.randn(layer.out_features, RANK, generator=generator) * 0.02
    return TrainedLayers(RANK, train_unembed=False), tensors


def seconds(sampler: Any, round_number: int) -> float:
    """Return the CPU seconds in which a sampler serves requests of all snapshots."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    names, num_done = [BASE, *map(str, range(SNAPSHOTS))], 0
    waiting = {
        name: [
            Request(f"{round_number}/{name}/{row}", tuple(range(20 + row, 36 + row)), params, seed=row)
            for row in range(PROMPTS)
        ]
        for name in names
    }
    started = time.process_time()
    while num_done < PROMPTS * len(names):
        for name in names:
            num_done += len(sampler.serve(name, waiting.pop(name, []), slice_s=SLICE_S))
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a model")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    by_hf = AdapterRollout(setup_of(args.model, "hf"), max_rank=RANK)
    versions = {str(number): drawn(by_hf._layers, number) for number in range(SNAPSHOTS)}
    native, reason = make_vllm_sampler(setup_of(args.model, "vllm"), max_rank=RANK, read=versions.__getitem__)
    assert isinstance(native, AdapterSampler), reason
    ways = {
        "hf, adapters, in turns": SnapshotSampler(by_hf, read=versions.__getitem__),
        "vllm, adapters, together": native,
        "vllm, merged, in turns": SnapshotSampler(
            MergedRollout(setup_of(args.model, "vllm")), read=versions.__getitem__
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, sampler in ways.items():
            found[name].append(seconds(sampler, number))
    num = PROMPTS * (SNAPSHOTS + 1)
    print(f"{num} samples of {NEW_TOKENS} tokens, of the base model and {SNAPSHOTS} snapshots of rank {RANK}:")
    for name, times in found.items():
        print(f"  {name:26} {statistics.median(times[1:]):6.2f} s of CPU")
    sizes = native._rollout.call_worker("adapter_bytes")
    held, slots = sizes["held"] / SNAPSHOTS / 2**20, sizes["slots"] / 2**20
    print(f"memory of an adapter {held:.2f} MiB, of vLLM's slots {slots:.2f} MiB")


if __name__ == "__main__":
    main()
