"""An update and a log-prob pass with and without shared prefixes: `python benchmarks/shared_prefix.py`.

For prompts with 1, 4 and 16 samples and prompt-to-response ratios of 4:1, 1:1 and 1:4. Both engines compute the same
rows under the same token budget: packed rows without padding, each computed alone, and prefix trees. The table has the
tokens that the model computes, CPU seconds of a forward and of a forward_backward (all threads of the process), and the
memory that a forward_backward adds to the process at its peak. Both take turns; seconds are medians, in brackets the
range between quartiles. One rank, a small Qwen2 in float32, no optimizer step.
"""

import argparse
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, logging

from hybridrl.config.schema.workers import FSDPConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import COMPUTED_TOKENS, EngineSetup, MicroBatching
from hybridrl.workers.engine.fsdp.engine import FSDPEngine

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SAMPLES = (1, 4, 16)
RATIOS = {"4:1": (256, 64), "1:1": (160, 160), "1:4": (64, 256)}
"""Tokens of prompt and response, 320 in every row."""
MEMORY_REPEATS = 2  # after all times: memory that was given back has to be mapped again, which takes time


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of every case")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--max_tokens", type=int, default=5120, help="token budget of a micro-batch")
    return parser.parse_args()


def make_batch(num_rows: int, num_samples: int, prompt: int, response: int) -> DataProto:
    """Return rows of full width; `num_samples` adjacent rows share their prompt."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(MODEL["vocab_size"], (num_rows // num_samples, prompt), generator=draw)
    responses = torch.randint(MODEL["vocab_size"], (num_rows, response), generator=draw)
    ids = torch.cat([prompts.repeat_interleave(num_samples, 0), responses], dim=1)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": torch.ones_like(responses)}
    return DataProto.from_dict(tensors=columns | {"advantages": torch.randn(num_rows, response, generator=draw)})


def policy_loss(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    return -(outputs["log_probs"] * rows.batch["advantages"]).sum() / 1000, {}


def resident(field: str) -> float:
    """Return this process's resident memory (VmRSS) or its peak (VmHWM), MiB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def added_mib(act: Callable[[], object]) -> float:
    """Return the MiB that a call adds to this process at its peak, as the kernel counts them."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have freed would otherwise be used again, uncounted
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    act()
    return resident("VmHWM") - before


def cpu_seconds(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def update(engine: FSDPEngine, batch: DataProto, micro: MicroBatching) -> None:
    engine.forward_backward(batch, micro, policy_loss, outputs=("log_probs",))
    engine.model.zero_grad()


def seconds(engine: FSDPEngine, batch: DataProto, micro: MicroBatching) -> tuple[float, float]:
    """Return CPU seconds of a forward and of a forward_backward."""
    forward = cpu_seconds(lambda: engine.forward(batch, micro, outputs=("log_probs",)))
    return forward, cpu_seconds(lambda: update(engine, batch, micro))


def cell(values: np.ndarray, digits: int) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def compare(engines: list[FSDPEngine], batch: DataProto, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the cells of a row of both tables: time, and tokens and memory."""
    micro = MicroBatching(max_tokens=options.max_tokens)
    log_probs = [engine.forward(batch, micro, outputs=("log_probs",))["log_probs"] for engine in engines]
    stats = engines[1].forward_backward(batch, micro, policy_loss, outputs=("log_probs",))
    tokens = [float(batch.batch["attention_mask"].sum()), sum(float(one[COMPUTED_TOKENS]) for one in stats)]
    rounds = [[seconds(engine, batch, micro) for engine in engines] for _ in range(options.repeats + 1)]
    found = np.array(rounds[1:])  # (round, engine, figure); the first round warms up
    mib = [max(added_mib(partial(update, engine, batch, micro)) for _ in range(MEMORY_REPEATS)) for engine in engines]
    ratios = found[:, 1] / found[:, 0]
    difference = (log_probs[1] - log_probs[0]).abs().max()
    times = [text for n in (0, 1) for text in (cell(found[:, 0, n], 3), cell(found[:, 1, n], 3), cell(ratios[:, n], 2))]
    rest = [f"{tokens[0]:.0f}", f"{tokens[1]:.0f}", f"{tokens[1] / tokens[0]:.2f}"]
    rest += [f"{mib[0]:.0f}", f"{mib[1]:.0f}", f"{difference:.0e}"]
    return times, rest


def table(title: str, heads: list[str], rows: list[list[str]]) -> None:
    heads = ["samples", "prompt:response", *heads]
    print(f"\n{title}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    options = parse()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times, rest = [], []
    with tempfile.TemporaryDirectory() as path:
        AutoModelForCausalLM.from_config(Qwen2Config(**MODEL, tie_word_embeddings=True)).save_pretrained(path)
        setup = EngineSetup(kind="causal_lm", path=path, settings=FSDPConfig(), packed=True, optim=OptimConfig())
        engines = [FSDPEngine(setup), FSDPEngine(replace(setup, share_prefixes=True))]
        for engine in engines:
            engine.setup()
        for samples in SAMPLES:
            for name, (prompt, response) in RATIOS.items():
                cells = compare(engines, make_batch(options.rows, samples, prompt, response), options)
                for rows, own in zip((times, rest), cells, strict=True):
                    rows.append([str(samples), name, *own])
    passes = [f"{name}, {how}" for name in ("forward", "forward_backward") for how in ("apart", "shared", "ratio")]
    print(f"load average {os.getloadavg()[0]:.1f}, {options.rows} rows, medians of {options.repeats}")
    table("CPU seconds", passes, times)
    heads = ["tokens, apart", "tokens, shared", "ratio", "MiB, apart", "MiB, shared", "difference of log-probs"]
    table("Tokens and memory", heads, rest)


if __name__ == "__main__":
    main()
