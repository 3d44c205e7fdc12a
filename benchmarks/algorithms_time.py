"""Print the CPU seconds of estimators, policy losses and aggregations beside those of plain formulas, with one thread.

    python benchmarks/algorithms_time.py                                     2048 x 4096, 1.3 GiB
    python benchmarks/algorithms_time.py --rows 8192 --tokens 1024           1.3 GiB
    python benchmarks/algorithms_time.py --only gae grpo --repeats 9
    python benchmarks/algorithms_time.py --verl DIR      also beside verl's formulas from an unpacked wheel

The plain formulas (`_plain_formulas.py`) are those of the papers in full tensors: groups in a loop ("loop") and by
index ("vector"), GAE in a loop over tokens. What is compared is called in turn, `--repeats` times. The table has the
median of the process's CPU seconds with the least and the most, and the median ratio of ours to each other in a round.

Estimators get the mask in int64, as it is in a batch, and losses in float32. A result in fresh memory costs twice its
computation (page faults), so the same call may take 5 ms or 20 ms.

Losses are measured forward and backward, with their means over tokens, the clipped share and the KL. The rewards lie on
each row's last token, groups have 8 rows, and lengths are uniform between 1 and `--tokens`. `--peak` prints the peak of
the process's memory.
"""

import argparse
import inspect
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _plain_formulas as plain
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

Call = Callable[[], Any]
GROUP = 8
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TOLERANCE = 1e-3  # of float32 sums over all tokens, in another order
OWN_SETTINGS = {"dro_beta": 0.5, "tau_pos": 1.0, "tau_neg": 1.05}


def make_columns(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return the columns of a batch."""
    torch.manual_seed(0)
    lengths_B = torch.randint(1, tokens + 1, (rows,))
    mask_BT = (torch.arange(tokens) < lengths_B[:, None]).long()
    rewards_BT = torch.zeros(rows, tokens)
    rewards_BT[torch.arange(rows), lengths_B - 1] = torch.randint(0, 2, (rows,)).float()
    values_BT, log_probs_BT = torch.randn(rows, tokens), -torch.rand(rows, tokens)
    return {
        "rewards": rewards_BT,
        "mask": mask_BT,
        "float_mask": mask_BT.float(),
        "values": values_BT,
        "new_values": values_BT + 0.1,
        "log_probs": log_probs_BT,
        "new_log_probs": log_probs_BT + 0.3 * torch.randn(rows, tokens),
        "group": torch.arange(rows) // GROUP,
        "baseline": torch.rand(rows),
    }


def estimator_calls(c: dict[str, torch.Tensor]) -> dict[str, Call]:
    """Return a call of each estimator."""
    more = {
        "values_BT": c["values"],
        "group_B": c["group"],
        "valid_B": torch.ones(len(c["group"]), dtype=torch.bool),
        "old_log_probs_BT": c["log_probs"],
        "sum_pi_squared_BT": c["log_probs"].exp(),
        "baseline_B": c["baseline"],
        "components_BK": torch.rand(len(c["group"]), 2),
        "is_weights_BT": c["log_probs"].exp(),
    }

    def call(name: str, *, gamma: float) -> Call:
        estimator = ADVANTAGE_ESTIMATORS[name]
        names = set(inspect.signature(estimator.fn).parameters) | {"valid_B"}
        given = {key: value for key, value in more.items() if key in names}
        return lambda: estimator(c["rewards"], c["mask"], gamma=gamma, lam=0.95 if gamma < 1 else 1.0, **given)

    calls = {name: call(name, gamma=1.0) for name in ADVANTAGE_ESTIMATORS}
    return calls | {"gae, gamma 0.99, lambda 0.95": call("gae", gamma=0.99)}


def loss_calls(c: dict[str, torch.Tensor]) -> dict[str, Call]:
    """Return calls of policy losses with backward pass, of the value loss, and of aggregations."""
    old_BT, mask_BT, advantages_BT = c["log_probs"], c["float_mask"], c["values"]
    num_tokens, num_seqs = loss_counts(mask_BT)

    def aggregate(losses_BT: torch.Tensor, mode: str) -> torch.Tensor:
        return agg_loss(losses_BT, mask_BT, mode, num_tokens=num_tokens, num_seqs=num_seqs)

    def policy(name: str) -> Call:
        loss = POLICY_LOSSES[name]
        own = {key: value for key, value in OWN_SETTINGS.items() if key in inspect.signature(loss).parameters}
        mode = "seq-mean-token-mean" if name == "geo_mean" else "token-mean"

        def run(log_probs_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parts = loss(log_probs_BT, old_BT, advantages_BT, mask_BT, clip_low=0.2, clip_high=0.2, clip_c=3.0, **own)
            shares = (aggregate(terms_BT, "token-mean") for terms_BT in (parts.clipped_BT, parts.approx_kl_BT))
            return aggregate(parts.losses_BT, mode), *shares

        return with_gradient(run, c["new_log_probs"])

    def value(values_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
        losses_BT, _ = clipped_value_loss(values_BT, c["values"], c["rewards"], cliprange=0.5)
        return (aggregate(losses_BT, "token-mean"),)

    return {
        **{f"loss {name}": policy(name) for name in POLICY_LOSSES},
        "loss of values": with_gradient(value, c["new_values"]),
        **{f"aggregation {mode}": lambda mode=mode: (aggregate(old_BT, mode),) for mode in MODES},
        "kl low_var_kl": lambda: kl_penalty(old_BT, c["values"], "low_var_kl"),
        "masked_whiten": lambda: masked_whiten(c["values"], c["mask"]),
        "rollout_is_weights, token": lambda: rollout_is_weights(
            old_BT, old_BT + 0.01, mask_BT, level="token", threshold=2.0
        ),
    }


def with_gradient(
    loss: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], inputs_BT: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a call that computes the loss (the first result) and its gradient in the inputs."""

    def run() -> tuple[torch.Tensor, ...]:
        leaf_BT = inputs_BT.detach().requires_grad_()
        results = loss(leaf_BT)
        results[0].backward()
        return *(result.detach() for result in results), leaf_BT.grad

    return run


def plain_calls(c: dict[str, torch.Tensor]) -> dict[str, dict[str, Call]]:
    """Return the plain formulas of an estimator, loss or aggregation by their names, which are kinds of formulas."""
    mask_BT, old_BT, group = c["float_mask"], c["log_probs"], (c["rewards"], c["mask"], c["group"])
    calls: dict[str, dict[str, Call]] = defaultdict(dict)
    for name, fn in plain.GROUP_LOOPS.items():
        calls[name]["loop"] = lambda fn=fn: fn(*group)
    for name, fn in plain.GROUP_VECTORS.items():
        calls[name]["vector"] = lambda fn=fn: fn(*group)
    gae = (c["rewards"], c["mask"], c["values"])
    calls["gae"]["loop"] = lambda: plain.gae(*gae, 1.0, 1.0)
    calls["gae, gamma 0.99, lambda 0.95"]["loop"] = lambda: plain.gae(*gae, 0.99, 0.95)
    calls["reinforce_plus_plus"]["loop"] = lambda: plain.reinforce_plus_plus(c["rewards"], c["mask"], 1.0)
    calls["remax"]["plain"] = lambda: plain.remax(c["rewards"], c["mask"], c["baseline"])
    for name, fn in plain.POLICY_LOSSES.items():
        calls[f"loss {name}"]["plain"] = with_gradient(
            lambda new_BT, fn=fn: fn(new_BT, old_BT, c["values"], mask_BT), c["new_log_probs"]
        )
    calls["loss of values"]["plain"] = with_gradient(
        lambda new_BT: (plain.value_loss(new_BT, c["values"], c["rewards"], mask_BT),), c["new_values"]
    )
    for mode, fn in plain.AGGREGATIONS.items():
        calls[f"aggregation {mode}"]["plain"] = lambda fn=fn: (fn(old_BT, mask_BT),)
    calls["masked_whiten"]["plain"] = lambda: plain.whiten(c["values"], c["mask"])
    return calls


def verl_calls(c: dict[str, torch.Tensor], folder: Path) -> dict[str, Call]:
    """Return verl's calls by the names of ours, where it has the formula."""
    verl, mask_BT = load_verl(folder), c["float_mask"]
    more = {
        "old": c["log_probs"],
        "sum_pi_squared": c["log_probs"].exp(),
        "baseline": c["baseline"],
        "components": torch.rand(len(c["group"]), 2),
    }
    gae, gdpo = {"gamma": 1.0, "lam": 1.0}, {"component_weights": [1.0, 1.0]}

    def estimator(name: str) -> Call:
        settings = {"gae": gae, "gdpo": gdpo}.get(name, {})
        arguments = verl_arguments(name, c | more, settings)
        return lambda: verl.ADV_ESTIMATOR_REGISTRY[name](**arguments)

    def loss(name: str) -> Call:
        own = VERL_LOSSES[name]
        config = Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0) | own
        config = Settings(config | {"global_batch_info": {}, "policy_loss": Settings(own)})

        def run(log_probs_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
            arguments = (c["log_probs"], log_probs_BT, c["values"], mask_BT, "token-mean")
            return (verl.POLICY_LOSS_REGISTRY[name](*arguments, config=config)[0],)

        return with_gradient(run, c["new_log_probs"])

    return {
        **{name: estimator(name) for name in verl.ADV_ESTIMATOR_REGISTRY},
        **{f"loss {name}": loss(name) for name in VERL_LOSSES},
        **{f"aggregation {mode}": lambda mode=mode: verl.agg_loss(c["log_probs"], mask_BT, mode) for mode in MODES},
        "kl low_var_kl": lambda: verl.kl_penalty(c["log_probs"], c["values"], "low_var_kl"),
    }


def measure(calls: dict[str, Call], *, repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each call in each round. A round calls each once."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    return seconds


def report(name: str, calls: dict[str, Call], *, repeats: int) -> str:
    """Return the line of one formula."""
    seconds = measure(calls, repeats=repeats)
    ours = seconds["ours"]
    parts = [f"{name:<32}{_with_range(ours)}"]
    for other in list(seconds)[1:]:
        ratio = statistics.median(a / b for a, b in zip(ours, seconds[other], strict=True))
        parts.append(f"{other} {_with_range(seconds[other])}, ratio {ratio:.2f}")
        if other != "verl" and (distance := _distance(calls["ours"](), calls[other]())) > TOLERANCE:
            parts.append(f"RESULTS DIFFER by {distance:.1e}")
    return "; ".join(parts)


def _with_range(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def _distance(ours: Any, others: Any) -> float:
    """Return the largest difference of the results, relative to the largest number of each."""
    pairs = [(ours, others)] if isinstance(ours, torch.Tensor) else zip(ours, others, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names, or beginnings of names")
    parser.add_argument("--peak", action="store_true", help="print the peak of the memory")
    parser.add_argument("--verl", type=Path, help="folder of verl's unpacked wheel: also print its seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = make_columns(arguments.rows, arguments.tokens)
    plain_by_name = plain_calls(columns)
    verl_by_name = verl_calls(columns, arguments.verl) if arguments.verl else {}
    print(
        f"CPU seconds, one thread, {arguments.rows} x {arguments.tokens}, median (least to most) of "
        f"{arguments.repeats} rounds; ratio: ours by theirs",
        flush=True,
    )
    for name, call in (estimator_calls(columns) | loss_calls(columns)).items():
        if not arguments.only or name.startswith(tuple(arguments.only)):
            calls = {"ours": call} | plain_by_name.get(name, {})
            if name in verl_by_name:
                calls["verl"] = verl_by_name[name]
            print(report(name, calls, repeats=arguments.repeats), flush=True)
    if arguments.peak:
        print(f"peak of the memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
