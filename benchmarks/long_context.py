"""Peak memory and time of one update of a long sequence, by how many processes share its tokens.

    python benchmarks/long_context.py                        prints the table of docs/figures.md
    python benchmarks/long_context.py --tokens 1024 4096     some of its rows

One row of tokens, FSDP2 on gloo, float32, activations recomputed; a Qwen2 of 2 layers, hidden size 128, 4 heads,
vocabulary 1,024. Every cell is a start of its own. Memory is the largest peak of any process (VmHWM) above that before
the pass, so it holds activations, gathered parameters and gradients. Seconds are those of all processes on shared
cores. The last columns are the activations that `memory_plan` predicts.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

TOKENS, SIZES = (1024, 2048, 4096, 8192, 16384, 32768), (1, 2, 4)
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": max(TOKENS),
}
TIME_LIMIT_S = 900
MIB = 2**20
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def resident(field: str) -> float:
    """Return this process's resident memory (VmRSS) or its peak (VmHWM), MiB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def run(rank: int, size: int, tokens: int, folder: str) -> None:
    """Write the peak and the seconds of the second update of one row in this process."""
    import torch
    import torch.distributed as dist

    from hybridrl.config.schema.workers import FSDPConfig, OptimConfig
    from hybridrl.protocol import DataProto
    from hybridrl.workers.engine.base import EngineSetup, MicroBatching
    from hybridrl.workers.engine.fsdp.engine import FSDPEngine

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIME_LIMIT_S))
    settings = FSDPConfig(dtype="float32", ulysses_sequence_parallel_size=size)
    options = {"packed": True, "gradient_checkpointing": True, "optim": OptimConfig()}
    engine = FSDPEngine(EngineSetup(kind="causal_lm", path=folder, settings=settings, **options))
    engine.setup()
    drawn = torch.Generator().manual_seed(0)

    def once(length: int) -> None:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, length), generator=drawn)
        real = torch.ones_like(ids)
        columns = {"input_ids": ids, "attention_mask": real, "response_mask": real[:, : length // 2]}
        batch = DataProto.from_single_dict(columns)
        loss = lambda found, rows: (-found["log_probs"].sum() / length, {})  # noqa: E731
        engine.forward_backward(batch, MicroBatching(max_rows=1), loss, outputs=("log_probs",))

    once(64)  # leaves gradients behind
    dist.barrier()
    before, start = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")
    once(tokens)
    found = {"mib": resident("VmHWM") - before, "s": time.perf_counter() - start}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(size: int, tokens: int) -> tuple[float, float]:
    """Return MiB and seconds of the largest, and slowest, of `size` processes."""
    context = multiprocessing.get_context("forkserver")  # imports the libraries once
    context.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2", "hybridrl.workers.engine.fsdp.engine"])
    with tempfile.TemporaryDirectory() as folder:
        writer = context.Process(target=write, args=(folder,))
        writer.start()
        writer.join(TIME_LIMIT_S)
        running = [context.Process(target=run, args=(rank, size, tokens, folder)) for rank in range(size)]
        for process in running:
            process.start()
        for process in running:
            process.join(TIME_LIMIT_S)
            process.kill()
        found = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(size)]
    return max(one["mib"] for one in found), max(one["s"] for one in found)


def write(folder: str) -> None:
    """Write the model with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder)


def predicted_mib(size: int, tokens: int) -> float:
    """Return the MiB of activations at the start of the backward pass, as the planner predicts them."""
    from transformers import Qwen2Config

    from hybridrl.workers.engine.memory_plan import EngineMemory, EngineSizes
    from hybridrl.workers.engine.model_shape import ModelShape

    sizes = EngineSizes(
        processes=size, context=size, tokens=tokens, dtype="float32", gradient_checkpointing=True, response_share=0.5
    )
    return EngineMemory(ModelShape.of(Qwen2Config(**SHAPE)), sizes).by_phase()["backward_start"].activations / MIB


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES))
    chosen = parser.parse_args(argv)
    os.environ |= FREED_AT_ONCE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    columns = [f"{size}: {what}" for what in ("MiB", "s") for size in chosen.sizes]
    columns += [f"{size}: predicted" for size in chosen.sizes]
    print(f"| tokens | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}", flush=True)
    for tokens in chosen.tokens:
        found = [measured(size, tokens) for size in chosen.sizes]
        cells = [f"{mib:,.0f}" for mib, _ in found] + [f"{seconds:.1f}" for _, seconds in found]
        cells += [f"{predicted_mib(size, tokens):,.0f}" for size in chosen.sizes]
        print(f"| {tokens:,} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
