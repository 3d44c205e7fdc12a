"""Print the CPU seconds of every estimator, policy loss and aggregation on tensors of a given size, with one thread.

    python benchmarks/algorithms_time.py --rows 8192 --tokens 4096
    python benchmarks/algorithms_time.py --rows 2048 --tokens 4096 --only gae grpo

The least of `--repeats` runs counts, measured as the process's CPU time. Losses are measured forward and backward. The
rewards lie on each row's last token, groups have 8 rows, and lengths are uniform between 1 and `--tokens`.
"""

import argparse
import inspect
import time
from collections.abc import Callable

import torch

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
    """Return a call of each policy loss with its backward pass, of the value loss, and of each aggregation."""
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = make_columns(arguments.rows, arguments.tokens)
    print(f"CPU seconds, one thread, {arguments.rows} x {arguments.tokens}, least of {arguments.repeats}")
    for name, call in (estimator_calls(columns) | loss_calls(columns)).items():
        if not arguments.only or name.startswith(tuple(arguments.only)):
            print(f"{least_seconds(call, repeats=arguments.repeats):8.3f}  {name}", flush=True)


if __name__ == "__main__":
    main()
