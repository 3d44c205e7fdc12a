"""Generate greedily with vLLM: a model, the model with an adapter of peft's format, and a merged model.

Not a test file.

    python -m tests.support.end_to_end.vllm_lora MODEL ADAPTER MERGED RESULT.json
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
PROMPTS = [[5, 9, 30, 17], [40, 41], [100, 7, 7, 7, 60], [200]]
NUM_TOKENS = 16
SETTINGS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 8 << 20,
    "disable_log_stats": True,
}


def generate(engine, **request) -> dict:
    """Return tokens and their log-probs for every prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [answer.outputs[0] for answer in engine.generate(prompts, sampling, use_tqdm=False, **request)]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "log_probs": [
            [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
    }


def main(model: str, adapter: str, merged: str, result: str) -> None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    rank = json.loads((Path(adapter) / "adapter_config.json").read_text())["r"]
    engine = LLM(model, enable_lora=True, max_lora_rank=rank, **SETTINGS)
    found = {"base": generate(engine), "adapter": generate(engine, lora_request=LoRARequest("ours", 1, adapter))}
    del engine
    gc.collect()
    found["merged"] = generate(LLM(merged, **SETTINGS))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
