"""Tokens per second of the `hf` and `vllm` rollouts and of plain vLLM on the same prompts: `python benchmarks/rollout.py`.

Each engine runs in a process of its own, one after the other, on one thread (`--threads`): a first call that does not count, then
`--repeats` calls, of which the median is shown, by the clock and by the CPU time of the process (which other work on the machine
distorts less). "full" generates `--response` tokens for every sequence; "ending" stops at any of 5 %
of the vocabulary, so that lengths differ and the longest is several times the mean. All return log-probs. Plain vLLM is `LLM.generate`
with `n` samples per prompt, set up as one would by hand for a small model in process; its log-probs are vLLM's own.

The default model has the size of the quick start's, with heads of 32 in place of 24, which vLLM's CPU attention does not have.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridrl.config.workers import RolloutConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout

ENGINES = ("hf", "vllm", "plain vllm")
SAMPLES = 8
PROMPT_WIDTH = 30
ENDING_SHARE = 0.05

Generate = Callable[[DataProto, list[int]], int]  # prompts, stop ids -> number of generated tokens


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a causal LM; default: one of the quick start's size, made on the spot")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256], help=f"sequences per call, {SAMPLES} of each prompt")
    parser.add_argument("--response", type=int, default=26, help="most new tokens per sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


def save_quick_start_size(path: str) -> str:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        initializer_range=0.06,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def prompts_of(num_rows: int, vocab_size: int) -> DataProto:
    """Prompts of half to all of PROMPT_WIDTH tokens."""
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(rng.integers(PROMPT_WIDTH // 2, PROMPT_WIDTH + 1, num_rows))
    mask = (torch.arange(PROMPT_WIDTH) >= PROMPT_WIDTH - lengths[:, None]).long()
    ids = torch.from_numpy(rng.integers(3, vocab_size, (num_rows, PROMPT_WIDTH))) * mask
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return DataProto.from_dict(tensors=columns)


def start_ours(options: argparse.Namespace, stop_ids: list[int]) -> Generate:
    config = RolloutConfig(max_num_seqs=max(options.sequences))
    rollout = make_rollout(
        options.engine,
        RolloutSetup(options.model, config, tuple(stop_ids), 0, PROMPT_WIDTH, options.response, device=options.device),
    )

    def generate(prompts: DataProto, stop_ids: list[int]) -> int:
        sampling = SamplingParams(options.response, n=SAMPLES, ignore_eos=not stop_ids)
        return int(rollout.generate(prompts, sampling).batch["response_mask"].sum())

    return generate


def start_plain_vllm(options: argparse.Namespace) -> Generate:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if options.device == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # or it compiles for half a minute to rank log-probs
    import vllm

    memory: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20} if options.device == "cpu" else {"gpu_memory_utilization": 0.5}
    engine = vllm.LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype="float32" if options.device == "cpu" else "bfloat16",
        enforce_eager=True,
        max_model_len=PROMPT_WIDTH + options.response,
        max_num_seqs=max(options.sequences),
        max_num_batched_tokens=8192,
        generation_config="vllm",
        use_tqdm_on_load=False,
        **memory,
    )

    def generate(prompts: DataProto, stop_ids: list[int]) -> int:
        ids, masks = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
        requests = [{"prompt_token_ids": row[mask].tolist()} for row, mask in zip(ids, masks, strict=True)]
        params = vllm.SamplingParams(
            n=SAMPLES, max_tokens=options.response, logprobs=0, stop_token_ids=stop_ids, ignore_eos=True, detokenize=False
        )
        outputs = engine.generate(requests, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return generate


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return tokens per second and per CPU-second under "<sequences> <lengths>" for the engine of this process."""
    from transformers import AutoConfig

    torch.set_num_threads(options.threads)
    vocab_size = AutoConfig.from_pretrained(options.model).vocab_size
    ending = list(range(2, 2 + int(vocab_size * ENDING_SHARE)))
    generate = start_plain_vllm(options) if options.engine == "plain vllm" else start_ours(options, ending)
    speeds = {}
    for num_sequences in options.sequences:
        prompts = prompts_of(num_sequences // SAMPLES, vocab_size)
        for lengths, stop_ids in (("full", []), ("ending", ending)):
            generate(prompts, stop_ids)
            calls = [timed(generate, prompts, stop_ids) for _ in range(options.repeats)]
            speeds[f"{num_sequences} {lengths}"] = [statistics.median(speed) for speed in zip(*calls, strict=True)]
    return speeds


def timed(generate: Generate, prompts: DataProto, stop_ids: list[int]) -> tuple[float, float]:
    """Return the tokens per second and per CPU-second of one call."""
    start, cpu_start = time.perf_counter(), time.process_time()
    num_tokens = generate(prompts, stop_ids)
    return num_tokens / (time.perf_counter() - start), num_tokens / (time.process_time() - cpu_start)


def run_engine(engine: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return what `measure` returns in a process of its own."""
    sizes = [str(count) for count in options.sequences]
    command = [sys.executable, __file__, "--engine", engine, "--model", options.model, "--sequences", *sizes]
    for name in ("response", "repeats", "threads", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=1800).stdout
    return json.loads(output.splitlines()[-1])


def report(speeds: dict[str, dict[str, list[float]]]) -> None:
    for place, unit in enumerate(("tokens/s", "tokens/CPU-s")):
        print(f"{unit:<14}" + "".join(f"{engine:>12}" for engine in ENGINES) + f"{'hf/plain':>12}{'vllm/plain':>12}")
        for case in speeds["hf"]:
            row = [speeds[engine][case][place] for engine in ENGINES]
            print(f"{case:<14}" + "".join(f"{speed:>12.0f}" for speed in row) + f"{row[0] / row[2]:>12.2f}{row[1] / row[2]:>12.2f}")


def main() -> None:
    options = parse()
    if options.engine:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as directory:
        options.model = options.model or save_quick_start_size(directory)
        report({engine: run_engine(engine, options) for engine in ENGINES})


if __name__ == "__main__":
    main()
