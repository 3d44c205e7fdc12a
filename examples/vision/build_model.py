"""Make a tiny vision-language model with random weights, its tokenizer and its image processor, without a download.

    python -m examples.vision.build_model --out DIRECTORY [--family qwen3_vl]

`run.sh` trains it. The tests use it, too. It knows nothing yet: neither words nor colours.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.vision.make_data import ANSWERS, QUESTIONS

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
PATCH, MERGE = 8, 2  # pixels of a patch, and patches of a token, in each direction
MIN_PIXELS, MAX_PIXELS = (PATCH * MERGE) ** 2, 64 * (PATCH * MERGE) ** 2  # 1 to 64 tokens
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
TEXTS = ["user assistant", *QUESTIONS.values(), *(answer for answers in ANSWERS.values() for answer in answers)]


def make_tokenizer(texts: Sequence[str]) -> Any:
    """Return a tokenizer whose tokens are the words of the texts, and no others."""
    words = pre_tokenizers.Whitespace()
    found = dict.fromkeys(word for text in texts for word, _ in words.pre_tokenize_str(text))
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *found])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = words
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token=SPECIAL[0],
        additional_special_tokens=SPECIAL[1:],
        chat_template=CHAT_TEMPLATE,
    )


def model_config(family: str, tokenizer: Any, *, hidden: int, layers: int, head: int = 16) -> Any:
    """Return the config of a tiny model that reads images.

    It has heads of 16 numbers or another multiple of 16, a tower of two blocks, and images of few tokens.
    """
    heads = hidden // head
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2 * head // 16, 3 * head // 16, 3 * head // 16],
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 64 // head,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
    }
    if family == "qwen3_vl":
        text["head_dim"] = head
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    elif family.startswith("qwen3_5"):
        text |= {"head_dim": head, "layer_types": [*["linear_attention"] * (layers - 1), "full_attention"]}
        text["rope_parameters"] |= {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
        text |= {f"linear_num_{name}_heads": heads for name in ("key", "value")}
        text |= {
            f"linear_{name}_head_dim": head if head < 32 else 128 for name in ("key", "value")
        }  # vLLM has kernels for 128
        if family == "qwen3_5_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2}
            text |= {f"{name}intermediate_size": hidden // 2 for name in ("moe_", "shared_expert_")}
        vision["num_position_embeddings"] = 64
    else:
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in PLACEHOLDERS.items()}
    settings = transformers.AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    settings.text_config.tie_word_embeddings = True
    return settings


PLACEHOLDERS = {
    "image_token_id": "image_pad",
    "video_token_id": "video_pad",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}


def build_model(
    folder: str | Path,
    *,
    texts: Sequence[str] = TEXTS,
    family: str = "qwen3_vl",
    hidden: int = 64,
    layers: int = 2,
    head: int = 16,
    seed: int = 0,
) -> Path:
    """Write model, tokenizer and image processor to a directory, as `save_pretrained` does."""
    tokenizer = make_tokenizer(texts)
    torch.manual_seed(seed)
    config = model_config(family, tokenizer, hidden=hidden, layers=layers, head=head)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    ).save_pretrained(folder)
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="directory of the model")
    parser.add_argument("--family", default="qwen3_vl", choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build_model(arguments.out, texts=TEXTS, family=arguments.family, seed=arguments.seed)


if __name__ == "__main__":
    main()
