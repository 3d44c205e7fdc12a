"""Make a language model for the quick start: train a tokenizer, and initialise a Qwen2 with random weights.

    python -m examples.quickstart.build_model --data data/arithmetic --out data/model

reads `sft_train.parquet` (from `data_preprocess.arithmetic`) and writes a directory that `AutoTokenizer` and
`AutoModelForCausalLM` load: about 500 tokens, 0.38 million parameters. The model is untrained; `hybridrl.main_sft`
teaches it the format of an answer. `--heads 4` makes it wider (0.56 million parameters): two tensor-parallel processes
can share it, two heads each. `--vocabulary 2048` makes a larger tokenizer, for other text than the arithmetic.
`--chat-template FILE` replaces the chat template, for example by one that shows tools. `--family` makes a model of
another family, with the layers that it is known for: `qwen3_5_text` (recurrent layers beside attention) or `gpt_oss`
(experts, attention sinks, sliding windows).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Tokenizer

VOCABULARY = 512
HEADS, HEAD_SIZE = 3, 32
FAMILIES: dict[str, dict[str, Any]] = {  # transformers' model_type: what it is known for
    "qwen2": {},
    "qwen3_5_text": {
        "head_dim": HEAD_SIZE,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": HEADS,
        "linear_num_value_heads": HEADS,
        "linear_key_head_dim": HEAD_SIZE,
        "linear_value_head_dim": HEAD_SIZE,
    },
    "gpt_oss": {
        "head_dim": HEAD_SIZE,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ChatML. The text between the generation markers is the assistant's. The loss of supervised fine-tuning is on these
# tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def read_texts(path: Path) -> Iterator[str]:
    """Yield the turns of all conversations as the chat template renders them, without special tokens."""
    for messages in pq.read_table(path, columns=["messages"])["messages"].to_pylist():
        for message in messages:
            yield f"{message['role']}\n{message['content']}"


def train_tokenizer(
    texts: Iterator[str], *, vocabulary: int = VOCABULARY, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer (any text can be encoded) in which every digit is its own token.

    Separate digits let the model see a number's places; merged ones would be as many unrelated symbols.
    """
    # For a Qwen2 model AutoTokenizer always splits text by Qwen2's rules and ignores the tokenizer's file, so train
    # with the same rules.
    rules = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = (
        rules.normalizer,
        rules.pre_tokenizer,
        rules.decoder,
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, heads: int = HEADS, family: str = "qwen2"
) -> PreTrainedModel:
    """Return the model in float32. Heads are 32 wide, the minimum of vLLM's CPU attention."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": heads * HEAD_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.06,  # the usual 0.02 suits much wider models; here it learns the arithmetic much later
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | FAMILIES[family]))
    return model


def build(data: Path, out: Path, *, of_model: dict[str, Any], of_tokenizer: dict[str, Any]) -> int:
    """Write tokenizer and model to `out` and return the number of parameters.

    `of_model`, `of_tokenizer`: for `make_model` and `train_tokenizer`.
    """
    tokenizer = train_tokenizer(read_texts(data / "sft_train.parquet"), **of_tokenizer)
    model = make_model(tokenizer, **of_model)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    return model.num_parameters()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with sft_train.parquet")
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights (default: 1)")
    parser.add_argument(
        "--heads", type=int, default=HEADS, help=f"attention heads of {HEAD_SIZE} each (default: {HEADS})"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=VOCABULARY, help=f"tokens of the tokenizer (default: {VOCABULARY})"
    )
    parser.add_argument("--chat-template", type=Path, default=None, help="file of another chat template")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2", help="kind of model (default: qwen2)")
    args = parser.parse_args(argv)
    source = args.data / "sft_train.parquet"
    if not source.is_file():
        print(
            f"error: no {source}; make it with: python -m data_preprocess.arithmetic --local_dir {args.data}",
            file=sys.stderr,
        )
        return 2
    template = CHAT_TEMPLATE if args.chat_template is None else args.chat_template.read_text()
    of_tokenizer = {"vocabulary": args.vocabulary, "chat_template": template}
    of_model = {"seed": args.seed, "heads": args.heads, "family": args.family}
    count = build(args.data, args.out, of_model=of_model, of_tokenizer=of_tokenizer)
    print(f"{args.out}: a {args.family} model with {count / 1e6:.2f} million random parameters and its tokenizer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
