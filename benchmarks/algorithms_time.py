"""Print the CPU seconds of every estimator, policy loss and aggregation, with one thread.

    python benchmarks/algorithms_time.py --rows 8192 --tokens 4096
    python benchmarks/algorithms_time.py --rows 2048 --tokens 4096 --only gae grpo
    python benchmarks/algorithms_time.py --verl DIR      beside verl's formulas from an unpacked wheel

The least of `--repeats` runs counts, measured as the process's CPU time. Losses are measured forward and backward. The
rewards lie on each row's last token, groups have 8 rows, and lengths are uniform between 1 and `--tokens`.
"""

import argparse
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _other_formulas import Settings, load_verl

from hybridrl.algos import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    agg_loss,
    clipped_value_loss,
    kl_penalty,
    loss_counts,
    masked_whiten,
    rollout_is_weights,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from _verl_numbers import VERL_LOSSES, verl_arguments

GROUP = 8
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OWN_SETTINGS = {"dro_beta": 0.5, "tau_pos": 1.0, "tau_neg": 1.05}


def make_columns(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return the columns of a batch."""
    torch.manual_seed(0)
    lengths_B = torch.randint(1, tokens + 1, (rows,))
    mask_BT = (torch.arange(tokens) < lengths_B[:, None]).long()
    rewards_BT = torch.zeros(rows, tokens)
    rewards_BT[torch.arange(rows), lengths_B - 1] = torch.randint(0, 2, (rows,)).float()
    return {
        "rewards": rewards_BT,
        "mask": mask_BT,
        "values": torch.randn(rows, tokens),
        "log_probs": -torch.rand(rows, tokens),
        "group": torch.arange(rows) // GROUP,
    }


def estimator_calls(c: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return a call of each estimator."""
    more = {
        "values_BT": c["values"],
        "group_B": c["group"],
        "valid_B": torch.ones(len(c["group"]), dtype=torch.bool),
        "old_log_probs_BT": c["log_probs"],
        "sum_pi_squared_BT": c["log_probs"].exp(),
        "baseline_B": torch.rand(len(c["group"])),
        "components_BK": torch.rand(len(c["group"]), 2),
        "is_weights_BT": c["log_probs"].exp(),
    }

    def call(name: str, *, gamma: float) -> Callable[[], object]:
        estimator = ADVANTAGE_ESTIMATORS[name]
        names = set(inspect.signature(estimator.fn).parameters) | {"valid_B"}
        given = {key: value for key, value in more.items() if key in names}
        return lambda: estimator(c["rewards"], c["mask"], gamma=gamma, lam=0.95 if gamma < 1 else 1.0, **given)

    calls = {name: call(name, gamma=1.0) for name in ADVANTAGE_ESTIMATORS}
    return calls | {"gae, gamma 0.99, lambda 0.95": call("gae", gamma=0.99)}


def loss_calls(c: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return calls of policy losses with backward pass, of the value loss, and of aggregations."""
    old_BT, mask_BT, advantages_BT = c["log_probs"], c["mask"].float(), c["values"]
    num_tokens, num_seqs = loss_counts(mask_BT)

    def aggregate(losses_BT: torch.Tensor, mode: str) -> torch.Tensor:
        return agg_loss(losses_BT, mask_BT, mode, num_tokens=num_tokens, num_seqs=num_seqs)

    def policy(name: str) -> Callable[[], object]:
        loss = POLICY_LOSSES[name]
        own = {key: value for key, value in OWN_SETTINGS.items() if key in inspect.signature(loss).parameters}

        def run() -> None:
            log_probs_BT = (old_BT + 0.01).requires_grad_()
            parts = loss(log_probs_BT, old_BT, advantages_BT, mask_BT, clip_low=0.2, clip_high=0.2, clip_c=3.0, **own)
            aggregate(parts.losses_BT, "token-mean").backward()

        return run

    def value() -> None:
        values_BT = (c["values"] + 0.1).requires_grad_()
        losses_BT, _ = clipped_value_loss(values_BT, c["values"], c["rewards"], cliprange=0.5)
        aggregate(losses_BT, "token-mean").backward()

    return {
        **{f"loss {name}": policy(name) for name in POLICY_LOSSES},
        "loss of values": value,
        **{f"aggregation {mode}": lambda mode=mode: aggregate(old_BT, mode) for mode in MODES},
        "kl low_var_kl": lambda: kl_penalty(old_BT, c["values"], "low_var_kl"),
        "masked_whiten": lambda: masked_whiten(c["values"], c["mask"]),
        "rollout_is_weights, token": lambda: rollout_is_weights(
            old_BT, old_BT + 0.01, mask_BT, level="token", threshold=2.0
        ),
    }


def verl_calls(c: dict[str, torch.Tensor], folder: Path) -> dict[str, Callable[[], object]]:
    """Return verl's calls by the names of ours, where it has the formula."""
    verl, mask_BT = load_verl(folder), c["mask"].float()
    more = {
        "old": c["log_probs"],
        "sum_pi_squared": c["log_probs"].exp(),
        "baseline": torch.rand(len(c["group"])),
        "components": torch.rand(len(c["group"]), 2),
    }
    gae, gdpo = {"gamma": 1.0, "lam": 1.0}, {"component_weights": [1.0, 1.0]}

    def estimator(name: str) -> Callable[[], object]:
        settings = {"gae": gae, "gdpo": gdpo}.get(name, {})
        arguments = verl_arguments(name, c | more | {"mask": mask_BT}, settings)
        return lambda: verl.ADV_ESTIMATOR_REGISTRY[name](**arguments)

    def loss(name: str) -> Callable[[], object]:
        own = VERL_LOSSES[name]
        config = Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0) | own
        config = Settings(config | {"global_batch_info": {}, "policy_loss": Settings(own)})

        def run() -> None:
            log_probs_BT = (c["log_probs"] + 0.01).requires_grad_()
            arguments = (c["log_probs"], log_probs_BT, c["values"], mask_BT, "token-mean")
            verl.POLICY_LOSS_REGISTRY[name](*arguments, config=config)[0].backward()

        return run

    return {
        **{name: estimator(name) for name in verl.ADV_ESTIMATOR_REGISTRY},
        **{f"loss {name}": loss(name) for name in VERL_LOSSES},
        **{f"aggregation {mode}": lambda mode=mode: verl.agg_loss(c["log_probs"], mask_BT, mode) for mode in MODES},
        "kl low_var_kl": lambda: verl.kl_penalty(c["log_probs"], c["values"], "low_var_kl"),
    }


def least_seconds(call: Callable[[], object], *, repeats: int) -> float:
    """Return the least CPU seconds of a call."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names, or beginnings of names")
    parser.add_argument("--verl", type=Path, help="folder of verl's unpacked wheel: also print its seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = make_columns(arguments.rows, arguments.tokens)
    theirs = verl_calls(columns, arguments.verl) if arguments.verl else {}
    print(f"CPU seconds, one thread, {arguments.rows} x {arguments.tokens}, least of {arguments.repeats}")
    for name, call in (estimator_calls(columns) | loss_calls(columns)).items():
        if not arguments.only or name.startswith(tuple(arguments.only)):
            ours = least_seconds(call, repeats=arguments.repeats)
            line = f"{ours:8.3f}  {name}"
            if name in theirs:
                other = least_seconds(theirs[name], repeats=arguments.repeats)
                line += f", verl {other:.3f}, ratio {ours / other:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
