"""Seconds of a push and of a snapshot by model size, beside a copy and a hash.

    python benchmarks/push_snapshot.py [--sizes 4 50 135 500] [--rounds 5] [--threads 2] [--dtype bfloat16]

Random models of so many million parameters with a vocabulary of 49,152, each in a process of its own: the FSDP engine
in float32 with Adam's moments, and the `hf` rollout in the dtype. Columns are the least seconds of the rounds:

    copy       the engine's weights into tensors of the dtype
    hash       one pass of the fingerprint over these
    push       engine to rollout, verified at both ends; aim: at most twice copy and hash
    adapters   rank 16 on all linear layers, only they are pushed (weight_sync.lora=adapter)
    bare       a copy of parameters and both moments, in float32
    snapshot   the same as `take_snapshot` returns it, copied once: what Ray does when it stores it
    stage      what the trainer's thread does for it: no copy at all

The 500 M model needs 10 GiB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 49_152
SHAPES = {  # millions of parameters: hidden size, layers
    4: (80, 1),
    50: (576, 6),
    135: (576, 30),
    500: (1152, 28),
}
HEAD = 64
RANK, PAD, PROMPT_TOKENS, RESPONSE_TOKENS = 16, 0, 8, 8
COLUMNS = ("copy", "hash", "push", "adapters", "bare", "snapshot", "stage")


def write_model(size: int, folder: str) -> int:
    """Write a model with random weights; return its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = SHAPES[size]
    heads = max(1, hidden // HEAD)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=8 * hidden // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def new_engine(folder: str, *, rank: int = 0) -> Any:
    from hybridrl.config.schema.workers import FSDPConfig, OptimConfig
    from hybridrl.workers.engine.base import EngineSetup, LoRA
    from hybridrl.workers.engine.fsdp.engine import FSDPEngine

    engine = FSDPEngine(
        EngineSetup(
            kind="causal_lm",
            path=folder,
            settings=FSDPConfig(dtype="float32"),
            optim=OptimConfig(),
            total_steps=1,
            lora=LoRA(rank, 2.0 * rank) if rank else None,
        )
    )
    engine.setup()
    return engine


def works(folder: str, dtype_name: str) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by column."""
    import torch

    from hybridrl.config.schema.rollout import RolloutConfig
    from hybridrl.workers.engine.snapshot import take_engine_state
    from hybridrl.workers.rollout import RolloutSetup, make_rollout
    from hybridrl.workers.weight_transfer.fingerprint import fingerprint

    dtype, engine, adapted = getattr(torch, dtype_name), new_engine(folder), new_engine(folder, rank=RANK)
    setup = RolloutSetup(folder, RolloutConfig(dtype=dtype_name), (1,), PAD, PROMPT_TOKENS, RESPONSE_TOKENS)
    rollout, other = make_rollout("hf", setup), make_rollout("hf", setup)
    other.load_weights(1, adapted.weights(lora="base_and_adapters"))
    weights = dict(engine.weights())
    copies = {name: torch.empty_like(tensor, dtype=dtype) for name, tensor in weights.items()}
    state = take_engine_state(engine, is_copy=False)["tensors"]
    stored = [array.copy() for array in state]

    def copy() -> None:
        for name, tensor in weights.items():
            copies[name].copy_(tensor)

    def store(arrays: list[Any]) -> None:
        for target, array in zip(stored, arrays, strict=True):
            target[:] = array

    return {
        "copy": copy,
        "hash": lambda: fingerprint(copies.items(), dtype),
        "push": lambda: rollout.load_weights(1, engine.weights()),
        "adapters": lambda: other.load_weights(1, adapted.weights(lora="adapters"), adapters=True),
        "bare": lambda: store(state),
        "snapshot": lambda: store(take_engine_state(engine, is_copy=False)["tensors"]),
        "stage": lambda: take_engine_state(engine, is_copy=False),
    }


def measure(job: dict[str, Any]) -> dict[str, float]:
    """Return the least wall seconds of each column; `cpu_` before a name means CPU seconds."""
    import torch

    from hybridrl.workers.process_setup import keep_freed_memory

    torch.set_num_threads(job["threads"])
    keep_freed_memory()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        found["params"] = write_model(job["size"], folder)
        for name, work in works(folder, job["dtype"]).items():
            taken = []
            for _ in range(job["rounds"] + 1):  # the first one allocates
                start = time.perf_counter(), time.process_time()
                work()
                taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            found[name], found[f"cpu_{name}"] = map(min, zip(*taken[1:], strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(measure(arguments.job)))
        return
    heads = [*COLUMNS, "push/(copy+hash)", "snapshot/bare"]
    print(f"{'parameters':>12} {'clock':>5} " + " ".join(f"{head:>9}" for head in heads))
    for size in arguments.sizes:
        job = {"size": size, **{name: getattr(arguments, name) for name in ("rounds", "threads", "dtype")}}
        environment = os.environ | {
            "OMP_NUM_THREADS": str(arguments.threads),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        command = [sys.executable, __file__, "--job", json.dumps(job)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        for clock, mark in (("wall", ""), ("cpu", "cpu_")):
            seconds = [found[mark + name] for name in COLUMNS]
            copy, once, push, _, bare, snapshot, _ = seconds
            cells = [
                *(f"{value:9.4f}" for value in seconds),
                f"{push / (copy + once):16.2f}",
                f"{snapshot / bare:13.2f}",
            ]
            print(
                f"{found['params']:12,d} {clock:>5} " + " ".join(cells) + f"  load {os.getloadavg()[0]:.1f}", flush=True
            )


if __name__ == "__main__":
    main()
