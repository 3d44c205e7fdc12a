"""Print the first checkpoint of an SFT run whose samples are right often enough.

    python -m examples.training_service.right_answers outputs/training_service/sft --least 0.2

Questions are those of the cookbook's environment, with its example before them; samples are drawn at temperature 1.
"""

import argparse
import random
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_QUESTIONS = 256
PROMPT = "User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is {} + {}?\n\nAssistant:"


@torch.inference_mode()
def share_of_right_answers(path: Path) -> float:
    """Return the share of questions that a model's sample answers."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    rng, num_right = random.Random(0), 0
    torch.manual_seed(0)
    by_length: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for _ in range(NUM_QUESTIONS):
        x, y = rng.randint(0, 100), rng.randint(0, 100)
        ids = tokenizer(PROMPT.format(x, y), add_special_tokens=False).input_ids
        by_length[len(ids)].append((ids, x + y))
    for length, questions in by_length.items():
        sampling = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        found = model.generate(torch.tensor([ids for ids, _ in questions]), **sampling)
        for tokens, (_, answer) in zip(found, questions, strict=True):
            num_right += tokenizer.decode(tokens[length:]).split("\n\n")[0].strip() == str(answer)
    return num_right / NUM_QUESTIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--least", type=float, default=0.2, help="share of right answers (default: 0.2)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for path in sorted(args.run.glob("global_step_*/huggingface"), key=lambda one: int(one.parent.name.split("_")[-1])):
        share = share_of_right_answers(path)
        print(f"{path}: {share:.3f} of the samples are right", file=sys.stderr)
        if share >= args.least:
            print(path)
            return 0
    print(f"error: no checkpoint of {args.run} is right in {args.least} of its samples; train longer", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
