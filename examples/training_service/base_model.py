"""Make data and an untrained base model for the cookbook's arithmetic: "What is 37 + 54?".

    python -m examples.training_service.base_model --out outputs/training_service

writes `sft_train.parquet`, `sft_val.parquet` and `model/`. The chat template is the cookbook's renderer `role_colon`.
Supervised fine-tuning is to stop when the model knows the format and is right in a part of its samples, so that
`math_rl` has something to improve. `run.sh` has the whole way.
"""

import argparse
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.quickstart.build_model import make_model, train_tokenizer

TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- 'Assistant:' }}{%- generation %}{{- ' ' + message['content'] + '\\n\\nUser:' }}{%- endgeneration %}"
    "{%- else %}"
    "{%- if loop.first %}{{- 'User:' }}{%- endif %}{{- ' ' + message['content'] + '\\n\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"
)
NUM_ROWS = {"sft_train": 16000, "sft_val": 256}
NUM_QUESTIONS = 6  # of a conversation, after the example that the cookbook's environment begins with


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Return questions of the cookbook's environment with their answers."""
    numbers = [(4, 5), *((rng.randint(0, 100), rng.randint(0, 100)) for _ in range(NUM_QUESTIONS))]
    turns = [turn for x, y in numbers for turn in (f"What is {x} + {y}?", str(x + y))]
    return [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]


def rendered(messages: list[dict[str, str]]) -> str:
    """Return a conversation as the chat template renders it."""
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages) + "User:"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and weights (default: 1)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    for name, num in NUM_ROWS.items():
        rows = [{"messages": conversation(rng)} for _ in range(num)]
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{name}.parquet")
    texts = (rendered(messages) for messages in pq.read_table(args.out / "sft_train.parquet")["messages"].to_pylist())
    tokenizer = train_tokenizer(texts, chat_template=TEMPLATE)
    model = make_model(tokenizer, seed=args.seed)
    tokenizer.save_pretrained(args.out / "model")
    model.save_pretrained(args.out / "model")
    num = model.num_parameters() / 1e6
    print(f"{args.out}: {NUM_ROWS['sft_train']} conversations, a Qwen2 with {num:.2f} million random parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
