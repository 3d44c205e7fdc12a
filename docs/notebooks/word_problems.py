"""Word problems of one calculation, and a tiny language model that has learned to answer them, with a bad habit.

The notebooks use both in place of your data and your model, so that a run takes seconds on a CPU. The model is a Qwen2
with 0.2 million parameters. Fine-tuning on imperfect demonstrations teaches it to calculate, and to add whatever the
problem says: three in ten demonstrations are right, five add the two numbers, two take a calculation at random.
"""

import os
import random
import shutil
import sys
import warnings
from pathlib import Path

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
ROOT = Path(__file__).resolve().parents[2]
warnings.filterwarnings("ignore", message="IProgress not found")  # bars are text here
sys.path.insert(0, str(ROOT))  # examples/ is not installed

import pyarrow as pa  # noqa: E402
import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402

from examples.quickstart.build_model import make_model, train_tokenizer  # noqa: E402
from hybridrl import main_sft  # noqa: E402
from hybridrl.trainer.data.row_files import write_table  # noqa: E402

logging.disable_progress_bar()
torch.set_num_threads(1)
OUT = Path(os.path.relpath(ROOT / "outputs" / "notebooks"))
STEPS = 150  # of fine-tuning: about 15 s of one core
SHORT = {  # settings of every run here: a problem has at most 40 tokens, an answer 8
    "data.max_prompt_length": 40,
    "data.max_response_length": 8,
    "actor_rollout_ref.actor.optim.lr": 5e-4,
    "actor_rollout_ref.actor.optim.betas": [0.9, 0.95],
    "actor_rollout_ref.actor.use_kl_loss": False,
    "trainer.total_training_steps": 25,
    "trainer.num_threads": 1,
}


def new_directory(name: str) -> Path:
    """Return a directory for a run, without what an earlier execution of the notebook has left there."""
    shutil.rmtree(OUT / name, ignore_errors=True)
    return OUT / name


def problems(count: int, *, seed: int = 1) -> list[dict[str, str]]:
    """Return rows with a `prompt`, and the right result as `ground_truth`."""
    rng = random.Random(seed)
    return [
        {"prompt": text, "ground_truth": str(a + b if sign == "+" else a - b)} for text, a, sign, b in _draw(count, rng)
    ]


def _draw(count: int, rng: random.Random) -> list[tuple[str, int, str, int]]:
    drawn = []
    for _ in range(count):
        name, item = rng.choice(("Ann", "Ben", "Jo", "Tom")), rng.choice(("books", "cups", "pens", "toys"))
        a, sign, b = rng.randint(4, 9), rng.choice("+-"), rng.randint(1, 4)
        deed = f"buys {b} more" if sign == "+" else f"gives {b} away"
        drawn.append((f"{name} has {a} {item} and {deed}. How many?", a, sign, b))
    return drawn


def _demonstrations(count: int) -> list[list[dict[str, str]]]:
    """Return conversations in which an imperfect teacher answers."""
    rng = random.Random(2)
    found = []
    for text, a, right_sign, b in _draw(count, rng):
        sign = rng.choices((right_sign, "+", rng.choice("+-")), weights=(3, 5, 2))[0]
        answer = f"{a}{sign}{b}={a + b if sign == '+' else a - b}"
        found.append([{"role": "user", "content": text}, {"role": "assistant", "content": answer}])
    return found


def make_tiny_model() -> str:
    """Return the directory of the fine-tuned model; makes it, if an earlier notebook has not."""
    model = OUT / "sft" / f"global_step_{STEPS}" / "huggingface"
    if not model.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        talks = _demonstrations(4000)
        tokenizer = train_tokenizer(
            (f"{turn['role']}\n{turn['content']}" for talk in talks for turn in talk), vocabulary=320
        )
        for part in (tokenizer, make_model(tokenizer, seed=1, heads=2)):
            part.save_pretrained(OUT / "untrained")
        write_table(pa.table({"messages": talks}), str(OUT / "demonstrations.parquet"))
        _fine_tune(OUT / "untrained", OUT / "demonstrations.parquet", OUT / "sft")
    return str(model)


def _fine_tune(model: Path, conversations: Path, out: Path) -> None:
    words = [
        *(f"model.path={model}", f"data.train_files={conversations}", f"trainer.default_local_dir={out}"),
        *("data.train_batch_size=64", "data.max_length=48", "optim.lr=3e-3", "optim.lr_scheduler_type=cosine"),
        *("optim.lr_warmup_steps=20", f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}"),
        *("trainer.num_threads=1", "trainer.backend=local", "trainer.logger=[jsonl]"),
    ]
    if main_sft.main(words):
        raise RuntimeError(f"fine-tuning failed; its log is above, its files are in {out}")
