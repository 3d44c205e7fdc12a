"""Forward and forward_backward of the FSDP engine against a bare Hugging Face loop: `python benchmarks/engine.py`.

The bare loop is the one written by hand: micro-batches in the batch's order with the batch's padding, logits of the
response only, their log-softmax, a policy-gradient loss; bfloat16 by autocast. All contenders compute the same
log-probs (the table has the largest difference) and run in turn. The table has the median round, and the median of the
ratios within a round. One rank, no optimizer step. Runs on the CPU, then on CUDA if present. There a larger model is
more telling: `--device cuda --dtype bfloat16 --hidden_size 1024 ...`.
"""

import argparse
import tempfile
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, logging

from hybridrl.config.schema.workers import FSDPConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import EngineSetup, LossFn, MicroBatching
from hybridrl.workers.engine.fsdp.engine import FSDPEngine

MODEL = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
OUTPUTS = ("log_probs",)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs="+", default=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    for name, default in (
        MODEL | {"rows": 256, "prompt": 30, "response": 26, "micro_rows": 64, "repeats": 9, "threads": 1}
    ).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def make_batch(options: argparse.Namespace) -> DataProto:
    """Return left-padded prompts and right-padded responses.

    Prompts have half to all of their width in tokens, responses a quarter to all of theirs.
    """
    B, P, R = options.rows, options.prompt, options.response
    prompts, responses = torch.randint(P // 2, P + 1, (B, 1)), torch.randint(R // 4, R + 1, (B, 1))
    mask = torch.cat([torch.arange(P) >= P - prompts, torch.arange(R) < responses], dim=1).long()
    columns = {"input_ids": torch.randint(3, options.vocab_size, (B, P + R)) * mask, "attention_mask": mask}
    columns |= {
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask[:, P:],
        "advantages": torch.randn(B, R),
    }
    return DataProto.from_dict(tensors=columns)


def policy_loss(
    outputs: dict[str, torch.Tensor], rows: DataProto
) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
    return -(outputs["log_probs"] * rows.batch["advantages"]).sum() / 1000, {}


class BareLoop:
    """Forward and backward by hand, with the engine's interface."""

    def __init__(self, path: str, device: str, dtype: str):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        self.device, self.autocast = device, torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bfloat16")

    def log_probs(self, rows: DataProto) -> torch.Tensor:
        columns = rows.to(self.device).batch
        inputs, R = (
            {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")},
            columns["response_mask"].shape[1],
        )
        with self.autocast:
            logits = self.model(**inputs, use_cache=False, logits_to_keep=R + 1).logits[:, :-1]
        return (
            logits.float().log_softmax(-1).gather(-1, columns["input_ids"][:, -R:, None]).squeeze(-1)
            * columns["response_mask"]
        )

    @torch.no_grad()
    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return {"log_probs": torch.cat([self.log_probs(rows).cpu() for rows in batch.split(micro.max_rows)])}

    def forward_backward(
        self, batch: DataProto, micro: MicroBatching, loss_fn: LossFn, *, outputs: tuple[str, ...]
    ) -> None:
        for rows in batch.split(micro.max_rows):
            loss_fn({"log_probs": self.log_probs(rows)}, rows)[0].backward()


def measure(loop: BareLoop | FSDPEngine, batch: DataProto, micro: MicroBatching) -> tuple[float, float]:
    """Return the milliseconds of a forward and of a forward_backward."""
    start = time.perf_counter()
    loop.forward(batch, micro, outputs=OUTPUTS)  # its result is on the CPU, so the device is idle again
    middle = time.perf_counter()
    loop.forward_backward(batch, micro, policy_loss, outputs=OUTPUTS)
    loop.model.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def compare(path: str, device: str, options: argparse.Namespace) -> None:
    """Print one device's table: milliseconds, and their ratio to the bare loop."""
    batch, micro = make_batch(options), MicroBatching(max_rows=options.micro_rows)
    settings = FSDPConfig(dtype=options.dtype)
    config = EngineSetup(kind="causal_lm", path=path, settings=settings, device=device, optim=OptimConfig())
    engines = {"padded engine": FSDPEngine(config), "packed engine": FSDPEngine(replace(config, packed=True))}
    for engine in engines.values():
        engine.setup()
    loops = {"bare loop": BareLoop(path, device, options.dtype)} | engines
    exact = loops["bare loop"].forward(batch, micro, outputs=OUTPUTS)["log_probs"]
    rounds = [[measure(loop, batch, micro) for loop in loops.values()] for _ in range(options.repeats + 1)]
    times = np.array(rounds[1:])  # (round, loop, part); the first round warms up
    medians, ratios = np.median(times, axis=0), np.median(times / times[:, :1], axis=0)
    print(
        f"{device}, {options.dtype}: {options.rows} rows, {int(batch.batch['attention_mask'].sum())} "
        "tokens without padding"
    )
    print(f"{'':14}{'forward ms':>12}{'of bare':>9}{'forward_backward ms':>21}{'of bare':>9}{'difference':>12}")
    for (name, loop), median, ratio in zip(loops.items(), medians, ratios, strict=True):
        worst = (loop.forward(batch, micro, outputs=OUTPUTS)["log_probs"] - exact).abs().max()
        print(f"{name:<14}{median[0]:>12.1f}{ratio[0]:>9.2f}{median[1]:>21.1f}{ratio[1]:>9.2f}{worst:>12.1e}")


def main() -> None:
    options = parse()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as path:
        sizes = {name: getattr(options, name) for name in MODEL} | {"num_key_value_heads": options.num_attention_heads}
        AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=True)).save_pretrained(path)
        for device in options.device:
            compare(path, device, options)
            dist.destroy_process_group()  # the next device has another backend


if __name__ == "__main__":
    main()
