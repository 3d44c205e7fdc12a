"""Tokens per second of the `hf` and `vllm` rollouts and of plain vLLM on the same prompts.

    python benchmarks/rollout.py

Each engine has its own process with one thread (`--threads`). They are called in turn, one at a time, so that other
load on the machine affects all alike: a warm-up call, then `--repeats` rounds. The table has medians over rounds, of
the speeds and of the ratios within a round. Both are by wall-clock time and by the CPU time of the process, which other
load distorts less. "full" generates `--response` tokens for every sequence. "ending" stops at any of 5 % of the
vocabulary, so that lengths differ and the longest is several times the mean. All return log-probs.

Plain vLLM is `LLM.generate` with `n` samples per prompt, set up as by hand for a small model in process; its log-probs
are vLLM's own. The first lines are the engines' start times.

The default model has the size of the quick start's, with heads of 32 instead of 24, because vLLM's CPU attention has no
24.
"""

import argparse
import importlib
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

from hybridrl.config import model_folder
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout

ENGINES = ("hf", "vllm", "plain vllm")
SAMPLES = 8
PROMPT_WIDTH = 30
KV_CACHE_MB = 512
ENDING_SHARE = 0.05
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

Generate = Callable[[DataProto, list[int]], int]  # prompts, stop ids -> number of generated tokens


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        type=lambda path: model_folder(path, key="--model"),
        help="directory of a causal LM, or a GGUF file; default: one of the quick start's size, made on the spot",
    )
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[64, 256], help=f"sequences per call, {SAMPLES} of each prompt"
    )
    parser.add_argument("--response", type=int, default=26, help="most new tokens per sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="default: float32, on a GPU bfloat16")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


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
    """Return prompts of half to all of PROMPT_WIDTH tokens."""
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(rng.integers(PROMPT_WIDTH // 2, PROMPT_WIDTH + 1, num_rows))
    mask = (torch.arange(PROMPT_WIDTH) >= PROMPT_WIDTH - lengths[:, None]).long()
    ids = torch.from_numpy(rng.integers(3, vocab_size, (num_rows, PROMPT_WIDTH))) * mask
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return DataProto.from_dict(tensors=columns)


def start_ours(options: argparse.Namespace, stop_ids: list[int]) -> Generate:
    config = RolloutConfig(max_num_seqs=max(options.sequences), dtype=options.dtype, kv_cache_memory_mb=KV_CACHE_MB)
    rollout = make_rollout(
        options.engine,
        RolloutSetup(options.model, config, tuple(stop_ids), 0, PROMPT_WIDTH, options.response, device=options.device),
    )

    def generate(prompts: DataProto, stop_ids: list[int]) -> int:
        sampling = SamplingParams(options.response, n=SAMPLES, ignore_eos=not stop_ids)
        return int(rollout.generate(prompts, sampling).batch["response_mask"].sum())

    return generate


def start_plain_vllm(options: argparse.Namespace) -> Generate:
    import vllm

    memory: dict[str, Any] = (
        {"kv_cache_memory_bytes": KV_CACHE_MB << 20} if options.device == "cpu" else {"gpu_memory_utilization": 0.5}
    )
    engine = vllm.LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype=options.dtype,
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
            n=SAMPLES,
            max_tokens=options.response,
            logprobs=0,
            stop_token_ids=stop_ids,
            ignore_eos=True,
            detokenize=False,
        )
        outputs = engine.generate(requests, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return generate


def serve(options: argparse.Namespace) -> None:
    """Run one engine: report its start times, then [tokens, seconds, CPU seconds] for each case from standard input."""
    from transformers import AutoConfig

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep engines' own output apart from the answers
    torch.set_num_threads(options.threads)
    vocab_size = AutoConfig.from_pretrained(options.model).vocab_size
    ending = list(range(2, 2 + int(vocab_size * ENDING_SHARE)))
    parts = {}
    if options.engine != "hf":
        parts["import vllm"] = seconds(lambda: importlib.import_module("vllm"))[1]
    generate, parts["engine"] = seconds(
        lambda: start_plain_vllm(options) if "plain" in options.engine else start_ours(options, ending)
    )
    parts["first call"] = seconds(lambda: generate(prompts_of(1, vocab_size), []))[1]
    answers.write(json.dumps(parts) + "\n")
    for line in sys.stdin:
        num_sequences, lengths = line.split()
        prompts, cpu_start = prompts_of(int(num_sequences) // SAMPLES, vocab_size), time.process_time()
        num_tokens, wall = seconds(
            lambda prompts=prompts, lengths=lengths: generate(prompts, ending if lengths == "ending" else [])
        )
        answers.write(json.dumps([num_tokens, wall, time.process_time() - cpu_start]) + "\n")


def seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


class Contender:
    """An engine in its own process."""

    def __init__(self, engine: str, options: argparse.Namespace):
        command = [sys.executable, __file__, "--engine", engine, "--model", options.model]
        command += ["--sequences", *map(str, options.sequences)]
        for name in ("response", "threads", "device", "dtype"):
            command += [f"--{name}", str(getattr(options, name))]
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}
        if "plain" in engine and options.device == "cpu":
            environment["TORCHDYNAMO_DISABLE"] = "1"  # otherwise it compiles for half a minute to rank log-probs
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.start_s: dict[str, float] = self._answer()

    def run(self, case: str) -> list[float]:
        """Return tokens, seconds and CPU seconds of one call."""
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def compare(contenders: dict[str, Contender], cases: list[str], *, repeats: int) -> None:
    rounds = {}
    for case in cases:
        for contender in contenders.values():
            contender.run(case)
        rounds[case] = [[contender.run(case) for contender in contenders.values()] for _ in range(repeats)]
    for index, unit in ((1, "tokens/s"), (2, "tokens/CPU-s")):
        print(f"{unit:<14}" + "".join(f"{engine:>12}" for engine in ENGINES) + f"{'hf/plain':>12}{'vllm/plain':>12}")
        for case in cases:
            speeds = [[call[0] / call[index] for call in calls] for calls in rounds[case]]
            medians = [statistics.median(column) for column in zip(*speeds, strict=True)]
            ratios = [statistics.median(row[engine] / row[2] for row in speeds) for engine in (0, 1)]
            print(
                f"{case:<14}"
                + "".join(f"{speed:>12.0f}" for speed in medians)
                + "".join(f"{ratio:>12.2f}" for ratio in ratios)
            )


def main() -> None:
    options = parse()
    if options.engine:
        serve(options)
        return
    cases = [f"{count} {lengths}" for count in options.sequences for lengths in ("full", "ending")]
    contenders = {}
    with tempfile.TemporaryDirectory() as directory:
        options.model = options.model or save_quick_start_size(directory)
        try:
            for engine in ENGINES:
                contenders[engine] = Contender(engine, options)
                parts = contenders[engine].start_s
                print(
                    f"{engine} starts in {sum(parts.values()):.1f} s: "
                    + ", ".join(f"{name} {s:.1f}" for name, s in parts.items())
                )
            compare(contenders, cases, repeats=options.repeats)
        finally:
            for contender in contenders.values():
                contender.close()


if __name__ == "__main__":
    main()
