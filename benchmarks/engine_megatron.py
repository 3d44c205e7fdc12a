"""One training step of the Megatron engine under several layouts against FSDP, on two processes.

    python benchmarks/engine_megatron.py

A step is forward_backward over the batch in micro-batches and an optimizer step. For each contender the table has

- the median step, its ratio to the first contender's, the quickest and the slowest step,
- CPU-seconds per step and process,
- the peak memory of a process (resident, Python and its libraries included), and its ratio to the first contender's,
- the log-prob of the responses after the last step, equal for all if all train alike.

Contenders run one after the other. FSDP runs once more at the end: the difference between its two lines shows the load
of the machine. Takes three to four minutes on two free cores.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.config.schema.workers import FSDPConfig, MegatronConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import EngineSetup, MicroBatching
from hybridrl.workers.engine_worker import make_engine

RANKS = 2
SIZES = {
    "4M": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    },
    "50M": {
        "vocab_size": 8192,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
    },
}
TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
AGAIN = "fsdp again"
LAYOUTS = {
    "fsdp": None,
    "megatron DP2": {},
    "megatron TP2": TP,
    "megatron TP2+SP": TP | {"sequence_parallel": True},
    "megatron PP2": PP,
    "megatron CP2": {"context_parallel_size": 2},
    AGAIN: None,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    for name, default in {"rows": 32, "length": 64, "micro_rows": 8, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", nargs=4, metavar=("RANK", "FOLDER", "SIZE", "LAYOUT"), help=argparse.SUPPRESS)
    return parser.parse_args()


def make_batch(options: argparse.Namespace, vocab_size: int) -> DataProto:
    draw, half = torch.Generator().manual_seed(0), options.length // 2
    ids = torch.randint(3, vocab_size, (options.rows, options.length), generator=draw)
    columns = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones_like(ids[:, half:]),
    }
    return DataProto.from_dict(tensors=columns)


def run_rank(options: argparse.Namespace) -> None:
    rank, folder, size, layout = int(options.child[0]), Path(options.child[1]), *options.child[2:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{size} {layout}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    settings = EngineSetup(
        kind="causal_lm",
        path=str(folder / size),
        optim=OptimConfig(lr=1e-4),
        settings=FSDPConfig() if LAYOUTS[layout] is None else MegatronConfig(**LAYOUTS[layout]),
    )
    engine = make_engine("fsdp" if LAYOUTS[layout] is None else "megatron", settings)
    engine.setup()
    batch, micro = make_batch(options, SIZES[size]["vocab_size"]), MicroBatching(max_rows=options.micro_rows)
    mine = batch.select_idxs(list(range(engine.mesh_position.dp_rank, len(batch), engine.mesh_position.dp_size)))
    num_tokens = float(batch.batch["response_mask"].sum())
    seconds, cpu = [], []
    for _ in range(options.steps + 1):  # the first step allocates buffers and optimizer state
        wall, own = time.perf_counter(), time.process_time()
        engine.forward_backward(
            mine, micro, lambda out, rows: (-out["log_probs"].sum() / num_tokens, {}), outputs=("log_probs",)
        )
        engine.optimizer_step()
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - own)
    log_probs = (
        engine.forward(mine, micro, outputs=("log_probs",))["log_probs"].sum() * engine.mesh_position.is_output_rank
    )
    numbers = torch.tensor([sum(cpu[1:]) / options.steps / RANKS, float(log_probs) / num_tokens])
    dist.all_reduce(numbers)
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        steps = sorted(seconds[1:])
        found = {"steps": steps, "cpu": float(numbers[0]), "peak_mb": float(peak[0]), "log_prob": float(numbers[1])}
        (folder / f"{size} {layout}.json").write_text(json.dumps(found))
    dist.barrier()


def save_model(folder: Path, size: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    settings = Qwen2Config(**SIZES[size], num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512)
    Qwen2ForCausalLM(settings).save_pretrained(folder / size)


def measure(options: argparse.Namespace, folder: str, size: str, layout: str) -> dict:
    """Run a contender in its own processes and return the figures of its rank 0."""
    arguments = [f"--{name}={getattr(options, name)}" for name in ("rows", "length", "micro_rows", "steps")]
    command = [sys.executable, "-W", "ignore", __file__, *arguments, "--child"]
    children = [subprocess.Popen([*command, str(rank), folder, size, layout], env=quiet()) for rank in range(RANKS)]
    if any([child.wait() for child in children]):
        sys.exit(f"{size} {layout} failed")
    return json.loads((Path(folder) / f"{size} {layout}.json").read_text())


def main() -> None:
    options = parse()
    if options.child:
        run_rank(options)
        return
    print(
        f"{RANKS} processes, a thread each; {options.rows} rows of {options.length} tokens in "
        f"micro-batches of {options.micro_rows} rows"
    )
    titles = ("s/step", "x first", "range", "CPU s", "peak MB", "x first", "log-prob")
    print(
        f"{'model':<6}{'engine':<17}" + "".join(f"{title:>{14 if title == 'range' else 10}}" for title in titles),
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            save_model(Path(folder), size)
            first: dict = {}
            for layout in options.layouts:
                found = measure(options, folder, size, layout)
                first = first or found
                step, own = (each["steps"][len(each["steps"]) // 2] for each in (found, first))
                spread = f"{found['steps'][0]:.2f}-{found['steps'][-1]:.2f}"
                print(
                    f"{size:<6}{layout:<17}{step:>10.2f}{step / own:>10.2f}{spread:>14}"
                    f"{found['cpu']:>10.2f}{found['peak_mb']:>10.0f}"
                    f"{found['peak_mb'] / first['peak_mb']:>10.2f}{found['log_prob']:>10.5f}",
                    flush=True,
                )


def quiet() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}


if __name__ == "__main__":
    main()
