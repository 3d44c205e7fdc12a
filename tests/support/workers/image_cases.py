"""Tiny models that read images, batches of prompts with pictures, and what plain transformers makes of them.

Not a test file.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from examples.vision.build_model import build_model
from examples.vision.make_data import make_rows
from hybridrl.algos.partition.row_images import IMAGE_INPUTS, RowImages
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.images import messages_with_images
from hybridrl.workers.engine.image_model import pixels_of
from hybridrl.workers.images import ImageProcessor, decoded_image

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
RESPONSE = 6
TEXTS = ["user assistant What is it ? no picture Compare to . a b c d e f g h i j k l m n o p q r s t u v w x y z"]


def save_tiny(folder: Path, family: str, **settings: Any) -> str:
    """Write a tiny model of this family whose outputs depend visibly on its images."""
    path = build_model(folder / family, texts=TEXTS, family=family, **settings)
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(path)
    return str(path)


def tower_runs(path: str) -> dict[str, Any]:
    """Return what `override_config` needs so that the model of `save_tiny` reads images."""
    return {"language_model_only": False} if Path(path).name.startswith("qwen3_5") else {}


@cache
def read_processor(path: str) -> tuple[Any, ImageProcessor]:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, token_id = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path).image_token_id
    return tokenizer, ImageProcessor(path, tokenizer, options={}, max_images=8, token_id=token_id)


def picture(seed: int, *, width: int = 32, height: int = 32) -> Image.Image:
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


PROMPTS: list[tuple[str, list[tuple[int, int, int]]]] = [
    ("<image>What is it?", [(1, 32, 32)]),
    ("no picture", []),
    ("Compare <image> to <image>.", [(2, 64, 32), (3, 16, 48)]),
    ("<image>What is it?", [(4, 32, 32)]),  # the tokens of the first one, with another picture
]


def image_rows(number: int) -> list[dict]:
    """Return rows of a data file: one question about different pictures, and the last one without a picture."""
    asked = {"role": "user", "content": "<image>What is it ?"}
    rows = [row | {"prompt": [asked]} for row in make_rows(number - 1, seed=3, kinds=("colour",))]
    rows.append({"prompt": [{"role": "user", "content": "no picture"}]})
    return [row | {"ground_truth": str(i), "data_source": "pictures"} for i, row in enumerate(rows)]


def image_batch(path: str, *, prompts: Any = PROMPTS, n: int = 2, seed: int = 0) -> DataProto:
    """Return n responses of random text tokens to each prompt, of unequal lengths, padded on both sides."""
    tokenizer, processor = read_processor(path)
    drawn, rows = torch.Generator().manual_seed(seed), []
    for text, pictures in prompts:
        images = [picture(number, width=width, height=height) for number, width, height in pictures]
        messages = messages_with_images([{"role": "user", "content": text}], len(images), "row")
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        tokens, inputs = np.array(ids), None
        if images:
            tokens, inputs = processor(tokens, images)
        rows += [(torch.from_numpy(tokens), inputs)] * n
    width = max(len(tokens) for tokens, _ in rows)
    input_ids = torch.zeros(len(rows), width + RESPONSE, dtype=torch.int64)
    mask, response_mask = torch.zeros_like(input_ids), torch.zeros(len(rows), RESPONSE, dtype=torch.int64)
    for row, (tokens, _) in enumerate(rows):
        length = RESPONSE - row % 3
        input_ids[row, width - len(tokens) : width] = tokens
        input_ids[row, width : width + length] = torch.randint(7, 25, (length,), generator=drawn)
        mask[row, width - len(tokens) : width + length] = 1
        response_mask[row, :length] = 1
    tensors = {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": input_ids[:, width:].clone(),
        "response_mask": response_mask,
        "advantages": torch.randn(len(rows), RESPONSE, generator=drawn),
    }
    column = np.fromiter((inputs for _, inputs in rows), dtype=object, count=len(rows))
    return DataProto.from_dict(tensors, {IMAGE_INPUTS: column})


def plain_answers(path: str, rows: list[dict], *, length: int) -> list[str]:
    """Return greedy answers of plain transformers to rows of a data file, which sample no image tokens."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    (tokenizer, processor), texts = read_processor(path), []
    for row in rows:
        images = [decoded_image(image["bytes"], "row") for image in row.get("images") or []]
        messages = messages_with_images(row["prompt"], len(images), "row")
        tokens = np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        more: dict[str, Any] = {}
        if images:
            tokens, inputs = processor(tokens, images)
            more = model_inputs(inputs)
            more["mm_token_type_ids"] = torch.from_numpy(tokens == model.config.image_token_id).int()[None]
        banned = [model.config.image_token_id, model.config.video_token_id]
        options = {"do_sample": False, "max_new_tokens": length, "suppress_tokens": banned, "attention_mask": None}
        found = model.generate(torch.from_numpy(tokens)[None], **more, **options)[0, len(tokens) :]
        texts.append(tokenizer.decode(found, skip_special_tokens=True))
    return texts


def model_inputs(images: RowImages) -> dict[str, torch.Tensor]:
    """Return the images of a row as transformers takes them."""
    grids = torch.from_numpy(images["image_grid_thw"])
    return {"pixel_values": torch.from_numpy(pixels_of(images)), "image_grid_thw": grids}


def plain_log_probs(model: Any, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor:
    """Return log-probs (B,R) of plain transformers, which computes each row alone and its positions itself."""

    def of_row(logits: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        return (logits.float() / temperature).log_softmax(-1).gather(-1, responses[:, None])[:, 0]

    return _by_row(model, batch, of_row)


def plain_values(model: Any, batch: DataProto) -> torch.Tensor:
    """Return the outputs (B,R) of a model with one output before each response token."""
    return _by_row(model, batch, lambda values, responses: values[:, 0])


def _by_row(model: Any, batch: DataProto, of_row: Any) -> torch.Tensor:
    """Return numbers (B,R) of the model's outputs before response tokens, 0 elsewhere."""
    rows, width = [], batch.batch["response_mask"].shape[1]
    for row, inputs in enumerate(batch.non_tensor_batch[IMAGE_INPUTS]):
        real = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][real][None]
        more = {}
        if inputs is not None:
            more = {
                **model_inputs(inputs),
                "mm_token_type_ids": (ids == model.config.image_token_id).int(),
            }
        model.model.rope_deltas = None
        outputs = model(input_ids=ids, **more).logits[0]
        length = int(batch.batch["response_mask"][row].sum())
        found = of_row(outputs[-length - 1 : -1], ids[0, -length:])
        rows.append(torch.cat([found, found.new_zeros(width - length)]))
    return torch.stack(rows)
