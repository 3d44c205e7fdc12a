"""Parity with plain Hugging Face models, as a table:

    python -m tests.support.workers.megatron_parity                 every layout, up to four processes each
    python -m tests.support.workers.megatron_parity TP2 "CP2 x DP2"   some of them, by name

A row is an engine and a layout. Its numbers are the largest differences from a Hugging Face model in float32 that does
the same without an engine. Logits are compared over the whole vocabulary, at every token that predicts another. For
PPO, the losses of actor (clipped surrogate, entropy bonus, KL) and critic are compared in both epochs of one step.
`tests/workers/engine/megatron/test_engine.py` asserts these numbers.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from hybridrl.protocol import DataProto
from tests.support.ranks import run_ranks
from tests.support.workers.engine_cases import (
    OPTIM,
    UNDETERMINED,
    case_batch,
    num_response_tokens,
    plain_outputs,
    policy_loss,
)
from tests.support.workers.megatron_models import (
    CASES,
    POLICY,
    PPO_EPOCHS,
    STEPS,
    all_tokens_as_response,
    ppo_losses,
    save_models,
)

LIMIT_S = 400
COMPARED = ("logits", *POLICY, "gradients", "weights", "ppo")
TITLES = ("logits", "log-probs", "entropy", "gradients", f"parameters, {STEPS} steps", "losses, PPO")


def run_cases(folder: Path, cases: Sequence[str]) -> None:
    """Run cases of the same number of processes, one after the other, in the same processes."""
    [num_ranks] = {CASES[case][0] for case in cases}
    module, log = "tests.support.workers.megatron_rank", folder / f"{cases[0]}.log"
    run_ranks(module, num_ranks, folder, *cases, log=log, timeout_s=LIMIT_S)


def compare(folder: Path, case: str, expected: dict) -> tuple[dict[str, float], dict]:
    """Return the largest differences of a case that has been run from `expected`, and the results of its rank 0."""
    found = torch.load(folder / f"{case}.pt")
    number = found["outputs"].pop("number")
    differences = {
        name: (found["outputs"][name] - expected["outputs"][name][number]).abs().max().item() for name in POLICY
    }
    differences["logits"] = (found["logits"] - expected["logits"]).abs().max().item()
    differences |= {name: difference(found[name], expected[name]) for name in ("gradients", "weights")}
    differences["ppo"] = max(abs(one - other) for one, other in zip(found["ppo"], expected["ppo"], strict=True))
    return differences, found


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference over all tensors of the same names."""
    assert found.keys() == expected.keys()
    return max(
        (found[name] - expected[name]).abs().max().item() for name in expected if not name.endswith(UNDETERMINED)
    )


def plain_results(folder: Path, case: str) -> dict:
    """Return what a Hugging Face model computes and becomes on the batch of a case."""
    _, model, _, settings = CASES[case]
    losses = hf_ppo_losses(folder, model, case_batch(settings))
    return hf_reference(folder, model, case_batch(settings)) | {"ppo": losses}


def hf_reference(folder: Path, name: str, batch: DataProto) -> dict:
    """Return what a Hugging Face model computes, and its weights after STEPS steps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    logits, optimizer = plain_logits(model, batch), adamw(model)
    norms, first, start = [], None, None
    for _ in range(STEPS):
        outputs = plain_outputs(model, batch)
        start = start or {name: tensor.detach().clone() for name, tensor in outputs.items()}
        policy_loss(num_response_tokens(batch))(outputs, batch)[0].backward()
        first = first or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"logits": logits, "outputs": start, "gradients": split_experts(first), "norms": norms, "weights": weights}


def hf_ppo_losses(folder: Path, name: str, batch: DataProto) -> list[float]:
    """Return the losses of actor and critic in every epoch of one PPO step."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    policy = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    critic = AutoModelForTokenClassification.from_pretrained(folder / f"{name} critic", dtype=torch.float32).eval()
    models = ((policy, adamw(policy), plain_outputs), (critic, adamw(critic), plain_values))

    def epoch(loss_fns: tuple) -> list[float]:
        found = []
        for (model, optimizer, read), loss_fn in zip(models, loss_fns, strict=True):
            loss, _ = loss_fn(read(model, batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    with torch.no_grad():
        start = plain_outputs(policy, batch) | plain_values(critic, batch)
    loss_fns = ppo_losses(batch, start, num_tokens=num_response_tokens(batch))
    return [loss for _ in range(PPO_EPOCHS) for loss in epoch(loss_fns)]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, betas=OPTIM.betas)


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return experts, which transformers keeps in one tensor, under their names on disk."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor.detach()):
                gate, up = both.chunk(2)
                prefix = name.removesuffix("gate_up_proj")
                found |= {f"{prefix}{number}.gate_proj.weight": gate, f"{prefix}{number}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            found |= {f"{prefix}{number}.down_proj.weight": each for number, each in enumerate(tensor.detach())}
        else:
            found[name] = tensor.detach()
    return found


@torch.no_grad()
def plain_logits(model: torch.nn.Module, batch: DataProto) -> torch.Tensor:
    """Return logits (B, L - 1, V) before every token except a row's first, 0 elsewhere."""
    wanted = all_tokens_as_response(batch).batch["response_mask"].bool()
    logits = torch.zeros(*wanted.shape, model.config.vocab_size)
    for row, real in enumerate(batch.batch["attention_mask"].bool()):
        ids = batch.batch["input_ids"][row][real]
        logits[row][wanted[row]] = model(input_ids=ids[None]).logits[0, :-1]
    return logits


def plain_values(model: torch.nn.Module, batch: DataProto) -> dict[str, torch.Tensor]:
    """Return values (B, R) of the state before each response token, 0 off the mask."""
    mask = batch.batch["response_mask"].bool()
    rows = []
    for real, ids, kept in zip(batch.batch["attention_mask"].bool(), batch.batch["input_ids"], mask, strict=True):
        after = torch.zeros(len(ids)).masked_scatter(real, model(input_ids=ids[real][None]).logits[0, :, 0])
        rows.append(after[-len(kept) - 1 : -1] * kept)
    return {"values": torch.stack(rows)}


def main(argv: list[str] | None = None) -> int:
    from transformers.utils import logging as transformers_logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    chosen = parser.parse_args(argv).cases or list(CASES)
    if unknown := [case for case in chosen if case not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; cases are {', '.join(CASES)}")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    print(
        f"| engine and layout | processes | model | {' | '.join(TITLES)} |\n|{'---|' * (3 + len(TITLES))}", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder, list(dict.fromkeys(CASES[case][1] for case in chosen)))
        expected: dict[tuple, dict] = {}
        for case in chosen:
            processes, model, _, settings = CASES[case]
            key = model, settings.get("share_prefixes")
            expected[key] = expected.get(key) or plain_results(folder, case)
            run_cases(folder, [case])
            differences, _ = compare(folder, case, expected[key])
            print(
                f"| {case} | {processes} | {model} | {' | '.join(f'{differences[name]:.1e}' for name in COMPARED)} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
