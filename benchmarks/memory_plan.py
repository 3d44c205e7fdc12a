"""Memory of an engine on one process, as `memory_plan` predicts it and as the operating system measures it.

    python benchmarks/memory_plan.py                  prints the table of docs/figures.md
    python benchmarks/memory_plan.py "packed"         one of its rows

Each row is a process of its own, which trains a random model for two steps. Peaks are those of its resident memory
(VmHWM, reset before each phase) above what Python and the libraries take before the engine is set up. Needs 4 GiB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridrl.workers.engine.memory_plan import EngineMemory, EngineSizes
from hybridrl.workers.engine.model_shape import ModelShape

ROOT = Path(__file__).parents[1]
MIB = 2**20
TIME_LIMIT_S = 1500
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}
# name: (changes of SHAPE, changes of the settings)
CASES: dict[str, tuple[dict, dict]] = {
    "2048 tokens": ({}, {"tokens": 2048}),
    "4096 tokens": ({}, {"tokens": 4096}),
    "2048 tokens, recomputed": ({}, {"tokens": 2048, "gradient_checkpointing": True}),
    "2048 tokens, adapters": ({}, {"tokens": 2048, "lora_rank": 8}),
    "1024 tokens, tied, vocabulary 150k": (
        {"vocab_size": 150_000, "num_hidden_layers": 4, "hidden_size": 256, "tie_word_embeddings": True},
        {"tokens": 1024, "entropy_bonus": True, "chunk": 256},
    ),
    "2048 tokens, whole logits": ({}, {"tokens": 2048, "whole_logits": True}),
    "2048 tokens, bfloat16": ({}, {"tokens": 2048, "dtype": "bfloat16"}),
    "2048 tokens, reference": ({}, {"tokens": 2048, "trains": False}),
    "Megatron, 2048 tokens": ({}, {"tokens": 2048, "strategy": "megatron"}),
    "Megatron, 2048 tokens, recomputed": (
        {},
        {"tokens": 2048, "strategy": "megatron", "gradient_checkpointing": True},
    ),
    "Megatron, 1024 tokens, vocabulary 150k": (
        {"vocab_size": 150_000, "num_hidden_layers": 4, "hidden_size": 256},
        {"tokens": 1024, "strategy": "megatron"},
    ),
    "Megatron, 2048 tokens, reference": ({}, {"tokens": 2048, "strategy": "megatron", "trains": False}),
}
NUM_MICRO_BATCHES = 2  # the first leaves gradients behind
PHASES = ("rest", "log_probs", "update", "optimizer_step")


def sizes_of(settings: dict) -> EngineSizes:
    """Return the settings of a row."""
    return EngineSizes(**{"dtype": "float32", "chunk": 256, "response_share": 0.75} | settings)


def predicted(model: dict, settings: dict) -> dict[str, float]:
    """Return MiB by phase; both ends of the backward pass are one phase here."""
    from transformers import Qwen2Config

    phases = EngineMemory(ModelShape.of(Qwen2Config(**SHAPE | model)), sizes_of(settings)).by_phase()
    found = {name: parts.total / MIB for name, parts in phases.items()}
    if "backward_start" in found:
        found["update"] = max(found.pop("backward_start"), found.pop("backward_end"))
    return found


def measured(name: str) -> dict[str, float]:
    """Return MiB by phase, of a process of its own."""
    freed_at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name],
        stderr=subprocess.DEVNULL,
        env=os.environ | freed_at_once | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIME_LIMIT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def resident(field: str) -> float:
    """Return this process's resident memory (VmRSS) or its peak (VmHWM), MiB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def measure(name: str) -> dict[str, float]:
    """Return the peak of each phase of the second step in this process.

    The optimizer's state exists after the first.
    """
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    sizes = sizes_of(CASES[name][1])
    batch = random_batch((SHAPE | CASES[name][0])["vocab_size"], sizes)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--write", folder, name], check=True, stdout=subprocess.DEVNULL)
        engine = new_engine(folder, sizes)
        warm_up()
        before = resident("VmRSS")
        engine.setup()
    outputs = ("log_probs", "entropy") if sizes.entropy_bonus else ("log_probs",)

    def loss_fn(found: dict, rows: Any) -> tuple:
        return -sum(column.mean() for column in found.values()), {}

    def peak(work: Callable[[], Any]) -> float:
        Path("/proc/self/clear_refs").write_text("5")
        work()
        return resident("VmHWM") - before

    found: dict[str, float] = {}
    for _ in range(2):
        found["rest"] = resident("VmRSS") - before
        found["log_probs"] = peak(lambda: engine.forward(batch, engine.micro, outputs=("log_probs",)))
        if sizes.trains:
            found["update"] = peak(lambda: engine.forward_backward(batch, engine.micro, loss_fn, outputs=outputs))
            found["optimizer_step"] = peak(engine.optimizer_step)
    return found


def random_batch(vocab: int, sizes: EngineSizes) -> Any:
    """Return rows of 512 tokens, of which a share is the response."""
    import torch

    from hybridrl.protocol import DataProto

    rows, length = NUM_MICRO_BATCHES * sizes.tokens // 512, 512
    return DataProto.from_single_dict(
        {
            "input_ids": torch.randint(0, vocab, (rows, length)),
            "attention_mask": torch.ones(rows, length, dtype=torch.int64),
            "response_mask": torch.ones(rows, int(length * sizes.response_share), dtype=torch.int64),
        }
    )


def new_engine(path: str, sizes: EngineSizes) -> Any:
    """Return an engine that has not been set up."""
    from hybridrl.config.schema.workers import FSDPConfig, MegatronConfig, OptimConfig
    from hybridrl.workers.engine.base import EngineSetup, LoRA, MicroBatching
    from hybridrl.workers.engine_worker import make_engine

    setup = EngineSetup(
        kind="causal_lm",
        path=path,
        settings={"fsdp": FSDPConfig, "megatron": MegatronConfig}[sizes.strategy](dtype=sizes.dtype),
        optim=OptimConfig() if sizes.trains else None,
        gradient_checkpointing=sizes.gradient_checkpointing,
        lora=LoRA(sizes.lora_rank, 16.0) if sizes.lora_rank else None,
        whole_logits=sizes.whole_logits,
        logits_chunk=sizes.chunk,
    )
    engine: Any = make_engine(sizes.strategy, setup)
    engine.micro = MicroBatching(max_rows=sizes.tokens // 512)
    return engine


def warm_up() -> None:
    """Load what torch and transformers load at first use."""
    import torch
    from transformers import Qwen2ForCausalLM  # noqa: F401  # loads its module

    import hybridrl.workers.engine.megatron.engine  # noqa: F401

    layer = torch.nn.Linear(8, 8)
    layer(torch.ones(2, 8)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()


def write(folder: str, name: str) -> None:
    """Write a row's model with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    Qwen2ForCausalLM(Qwen2Config(**SHAPE | CASES[name][0])).save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="ROW", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--measure", metavar="ROW", help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, metavar=("FOLDER", "ROW"), help=argparse.SUPPRESS)
    found = parser.parse_args(argv)
    if found.write:
        write(*found.write)
    elif found.measure:
        print(json.dumps(measure(found.measure)))
    else:
        print(
            f"| one process; MiB predicted / measured (error) | {' | '.join(PHASES)} |\n|{'---|' * 5}",
            flush=True,
        )
        for name in found.cases or CASES:
            ours, theirs = predicted(*CASES[name]), measured(name)
            cells = [
                f"{ours[phase]:,.0f} / {theirs[phase]:,.0f} ({ours[phase] / theirs[phase] - 1:+.0%})"
                if phase in theirs
                else ""
                for phase in PHASES
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
