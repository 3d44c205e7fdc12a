"""Write games of Nim: random ones for supervised fine-tuning, heaps to play for reinforcement learning and its tests.

python -m examples.two_agent_game.make_data --local_dir data/nim
"""

import random
import sys
from pathlib import Path

from data_preprocess.command import make_parser, rl_row, run_command, write_parquet
from examples.two_agent_game.nim import MOST, describe

RULES = {"role": "system", "content": "Take 1, 2 or 3 sticks. Who takes the last one wins."}
LARGEST = 7
NUM_GAMES, NUM_HEAPS = 2048, 512


def random_game(numbers: random.Random) -> list[dict[str, str]]:
    """Return a game of two random players, as the conversation of the first one."""
    sticks, messages = numbers.randint(1, LARGEST), [RULES]
    while sticks:
        own = numbers.randint(1, min(MOST, sticks))
        messages += [{"role": "user", "content": describe(sticks)}, {"role": "assistant", "content": str(own)}]
        sticks -= own
        sticks -= numbers.randint(1, min(MOST, sticks)) if sticks else 0
    return messages


def heap(sticks: int, *, split: str, index: int, name: str, agent: str) -> dict:
    """Return a row: a heap, its environment, and the agent loop that plays."""
    row = rl_row(
        data_source="environment",
        question="",
        ability="game",
        reward_model={"style": "rule", "ground_truth": ""},
        extra_info={"split": split, "index": index, "interaction_kwargs": {"name": name, "sticks": sticks}},
    )
    return row | {"prompt": [RULES], "agent_name": agent}


def write(folder: Path, *, seed: int, agent: str, name: str) -> None:
    numbers = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet([{"messages": random_game(numbers)} for _ in range(NUM_GAMES)], folder / "sft_train.parquet")
    heaps = [numbers.randint(1, LARGEST) for _ in range(NUM_HEAPS)]
    rows = [heap(sticks, split="train", index=i, name=name, agent=agent) for i, sticks in enumerate(heaps)]
    write_parquet(rows, folder / "train.parquet")
    winnable = [sticks for sticks in range(1, LARGEST + 1) if sticks % (MOST + 1)]
    tests = [
        heap(sticks, split="test", index=i, name="nim_test", agent="environment_agent")
        for i, sticks in enumerate(winnable)
    ]
    write_parquet(tests, folder / "test.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__ or "", default_dir="data/nim")
    parser.add_argument("--seed", type=int, default=1, help="of the games (default: 1)")
    parser.add_argument("--opponent", choices=("itself", "script"), default="itself", help="whom training plays")
    args = parser.parse_args(argv)
    agent, name = ("self_play", "nim_table") if args.opponent == "itself" else ("environment_agent", "nim")
    return run_command(lambda: write(Path(args.local_dir), seed=args.seed, agent=agent, name=name))


if __name__ == "__main__":
    sys.exit(main())
