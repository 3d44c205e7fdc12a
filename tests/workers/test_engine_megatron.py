"""The Megatron engine on real processes (gloo), against plain Hugging Face models in float32: the table of parity.

python -m pytest -q tests/workers/test_engine_megatron.py            a layout of each sort, up to two processes
python -m pytest -q tests/workers/test_engine_megatron.py -m slow    the others, up to four processes
"""

from pathlib import Path

import pytest
import torch

from tests.workers.engine_cases import OPTIM, UNDETERMINED, make_batch, num_response_tokens, plain_outputs, policy_loss
from tests.workers.megatron_models import CASES, NEEDS_MEGATRON, POLICY, STEPS, run_ranks, save_models

QUICK = ("one process", "TP2", "PP2, untied, packed", "CP2", "qwen3_moe, EP2")
START_AND_RUN_S = 240
ATOL = 1e-5

pytestmark = [NEEDS_MEGATRON, pytest.mark.timeout(START_AND_RUN_S + 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    save_models(path, sorted({model for _, model, _, _ in CASES.values()}))
    return path


@pytest.fixture(scope="module")
def plainly(folder):
    """What a Hugging Face model computes and becomes, by model; computed once."""
    found: dict[str, dict] = {}
    return lambda model: found.setdefault(model, {}) or found[model].update(by_hand(folder / model)) or found[model]


def by_hand(path: Path) -> dict:
    from transformers import AutoModelForCausalLM

    batch, model = make_batch(), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, betas=OPTIM.betas)
    norms, first, start = [], None, None
    for _ in range(STEPS):
        outputs = plain_outputs(model, batch)
        start = start or {name: tensor.detach().clone() for name, tensor in outputs.items()}
        policy_loss(num_response_tokens(batch))(outputs, batch)[0].backward()
        first = first or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {"outputs": start, "gradients": one_by_one(first), "norms": norms, "weights": one_by_one(dict(model.named_parameters()))}


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts, which transformers keeps in one tensor, under the names they have on disk."""
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


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of all tensors of the same names."""
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected if not name.endswith(UNDETERMINED))


def cases() -> list:
    return [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", cases())
def test_a_layout_computes_and_trains_as_the_plain_model_does(folder, plainly, record_property, case):
    num_ranks, model, _, _ = CASES[case]
    run_ranks("tests.workers.megatron_rank", num_ranks, folder, case, log=folder / f"{case}.log", timeout_s=START_AND_RUN_S)
    found, expected = torch.load(folder / f"{case}.pt"), plainly(model)
    number = found["outputs"].pop("number")
    differences = {name: (found["outputs"][name] - expected["outputs"][name][number]).abs().max().item() for name in POLICY}
    differences |= {name: difference(found[name], expected[name]) for name in ("gradients", "weights")}
    for name, value in differences.items():
        record_property(name, value)
        assert value < ATOL, (name, differences)
    assert [step["grad_norm"] for step in found["said"]] == pytest.approx(expected["norms"], rel=1e-4)
    assert all(step["skipped"] == 0 for step in found["said"])
