"""Measure what shared prefixes save of the vision tower.

That is patches and seconds of an update, for n responses to each prompt.

    python -m benchmarks.shared_images

One process, one thread, the FSDP engine on a tiny Qwen3-VL: 4 prompts with a picture of 64 tokens, responses of 16. It
prints one line per n: patches that the tower computes and seconds of a pass with gradients, rows apart (packed) and as
trees.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from examples.vision.build_model import PATCH, build_model
from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.config.schema.workers import FSDPConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.images import messages_with_images
from hybridrl.workers.engine.base import EngineSetup, MicroBatching
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
from hybridrl.workers.engine.image_model import vision_tower
from hybridrl.workers.images import ImageProcessor

PROMPTS, RESPONSE, SIDE, PASSES = 4, 16, 128, 5


def make_batch(path: Path, n: int) -> DataProto:
    """Return n responses to each prompt, all of the same lengths."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, token_id = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path).image_token_id
    processor = ImageProcessor(str(path), tokenizer, options={}, max_images=1, token_id=token_id)
    messages = messages_with_images([{"role": "user", "content": "<image>How many ?"}], 1, "prompt")
    ids = np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    drawn = np.random.default_rng(0)
    prompts, images = [], []
    for _ in range(PROMPTS):
        tokens, found = processor(ids, [Image.fromarray(drawn.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))])
        prompts += [torch.from_numpy(tokens)] * n
        images += [found] * n
    responses = torch.from_numpy(drawn.integers(8, len(tokenizer), (len(prompts), RESPONSE)))
    input_ids = torch.cat([torch.stack(prompts), responses], dim=1)
    columns = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    columns["response_mask"] = torch.ones_like(responses)
    return DataProto.from_dict(columns, {IMAGE_INPUTS: np.fromiter(images, dtype=object, count=len(images))})


def measured(path: Path, batch: DataProto, **layout: Any) -> tuple[int, float]:
    """Return patches and the least seconds of a pass with gradients."""
    settings = {"settings": FSDPConfig(), "optim": OptimConfig(), "total_steps": 1}
    engine, seen, seconds = FSDPEngine(EngineSetup(kind="causal_lm", path=str(path), **settings, **layout)), [0], []
    engine.setup()

    def count(tower: Any, args: Any) -> None:
        seen[0] += len(args[0])

    vision_tower(engine.model).register_forward_pre_hook(count)
    for _ in range(PASSES):
        seen[0], started = 0, time.perf_counter()
        engine.forward_backward(
            batch, MicroBatching(), lambda out, rows: (out["log_probs"].sum(), {}), outputs=("log_probs",)
        )
        seconds.append(time.perf_counter() - started)
    return seen[0], min(seconds)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = build_model(folder, hidden=128, layers=4)
        print(f"{PROMPTS} prompts, pictures of {(SIDE // PATCH) ** 2} patches, responses of {RESPONSE} tokens")
        for n in (1, 4, 16):
            batch = make_batch(path, n)
            (apart, slow), (shared, fast) = (
                measured(path, batch, **layout) for layout in ({"packed": True}, {"share_prefixes": True})
            )
            print(f"n={n:2}  apart {apart:6} patches {slow:.3f} s   shared {shared:6} patches {fast:.3f} s")


if __name__ == "__main__":
    main()
