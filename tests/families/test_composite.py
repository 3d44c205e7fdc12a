"""Checkpoints with a vision tower and MTP heads, trained as models of text."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.config.schema.workers import ModelConfig
from hybridrl.workers.engine.export import export_hf
from tests.families.configurations import DELTA, EOS, SHARED_EXPERT, SIZES, save_tokenizer
from tests.families.measure import FAST, LIMIT, family_batch, measure_export, measure_rollout, train
from tests.support.workers.engine_cases import AVX512, make_engine, whole_weights
from tests.support.workers.megatron_parity import split_experts

pytestmark = pytest.mark.usefixtures("process_group")
ROLLOUT_LIMIT = 2 * LIMIT if AVX512 else LIMIT  # seen: 1.001e-5
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
MTP = {"mtp.fc.weight": torch.full((32, 64), 0.25), "mtp.norm.weight": torch.ones(32)}


def save_composite(name: str, folder: Path) -> str:
    """Write a Qwen3.5 with all that its published checkpoints have."""
    import transformers

    experts = SHARED_EXPERT if "Moe" in name else {}
    text = SIZES | DELTA | experts
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=VISION, eos_token_id=list(EOS))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | MTP, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
def test_training_as_text_changes_the_text_model_and_an_export_keeps_the_rest(name, tmp_path):
    path = save_composite(name, tmp_path / "model")
    engine = make_engine(path, optim=FAST, packed=True)
    train(engine, family_batch())
    assert measure_rollout(path, engine).log_probs < ROLLOUT_LIMIT
    assert measure_export(path, engine, family_batch(), tmp_path / "export").log_probs < LIMIT
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "export" / "model.safetensors")
    others = {name for name in before if not name.startswith(("model.language_model.", "lm_head."))}
    assert {name for name in after if name.startswith(("model.visual.", "mtp."))} == others
    assert all(torch.equal(after[name], before[name]) for name in others)
    trained = whole_weights(engine)
    for text_name, tensor in split_experts(trained).items():
        assert torch.equal(after[text_name.replace("model.", "model.language_model.", 1)], tensor), text_name
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_an_export_keeps_layers_that_predict_several_tokens_of_a_text_model(tmp_path):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | DELTA | SHARED_EXPERT)).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | MTP, file, metadata={"format": "pt"})
    save_tokenizer(tmp_path / "model")
    path = str(tmp_path / "model")
    export_hf(make_engine(path).weights(), str(tmp_path / "export"), model=ModelConfig(path=path))
    after = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in MTP.items())
    assert {name for name in after if name.startswith("mtp.")} == MTP.keys()


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_vllms_own_tables_find_what_is_pushed_and_what_is_exported(tmp_path):
    path = save_composite("Qwen3_5", tmp_path / "model")
    engine = make_engine(path)
    export_hf(engine.weights(), str(tmp_path / "export"), model=ModelConfig(path=path))
    exported = load_file(tmp_path / "export" / "model.safetensors")
    pushed = [name for name, _ in engine.weights()]
    text = vllms_mapper(("qwen3_5", "Qwen3_5ForCausalLMBase"))
    composite = vllms_mapper(
        ("qwen3_vl", "Qwen3VLForConditionalGeneration"), ("qwen3_5", "Qwen3_5ForConditionalGeneration")
    )
    assert text.apply_list(pushed) == pushed
    assert sorted(text.apply_list([name for name in exported if "visual" not in name])) == sorted(pushed)
    found = composite.apply_list(list(exported))
    assert sorted(name for name in found if not name.startswith("visual.")) == sorted(
        f"language_model.{name}" for name in pushed
    )


def vllms_mapper(*classes: tuple[str, str]) -> Any:
    """Return vLLM's mapper of names with the prefixes that its source has for these classes.

    Importing the classes needs torchvision, which has no build for this torch on the CPU.
    """
    from vllm.model_executor.models.utils import WeightsMapper

    prefixes = {}
    for module, name in classes:
        source = Path(find_spec("vllm").origin).with_name("model_executor") / "models" / f"{module}.py"
        [found] = [each for each in ast.parse(source.read_text()).body if getattr(each, "name", "") == name]
        [mapper] = [each for each in found.body if ast.unparse(each).startswith("hf_to_vllm_mapper =")]
        for keyword in (each for each in ast.walk(mapper) if isinstance(each, ast.keyword)):
            assert keyword.arg == "orig_to_new_prefix"
            prefixes |= ast.literal_eval(keyword.value)
    return WeightsMapper(orig_to_new_prefix=prefixes)
