"""An engine whose head computes statistics of tokens, against one that computes whole logits."""

import logging

import pytest
import torch

from hybridrl.workers.engine.base import LoRA, MicroBatching
from tests.support.workers.engine_cases import (
    VOCAB,
    WHOLE,
    gradients,
    make_batch,
    make_engine,
    policy_loss,
    save_tiny_qwen2,
)

pytestmark = pytest.mark.usefixtures("process_group")

POLICY = ("log_probs", "entropy")
MICRO = MicroBatching(max_rows=7)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPT2Config, GraniteConfig

    folder = tmp_path_factory.mktemp("heads")
    configs = {
        "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4),
        "gemma2, soft cap": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0),
        "granite, scale": GraniteConfig(**SIZES, logits_scaling=0.5, tie_word_embeddings=False),
        "cohere, scale": CohereConfig(**SIZES, logit_scale=0.25),
    }
    torch.manual_seed(0)
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    save_tiny_qwen2(folder / "qwen2, tied")
    save_tiny_qwen2(folder / "qwen2, untied", tied=False)
    return {path.name: str(path) for path in folder.iterdir()}


def assert_close(found, expected):
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max().clamp(min=1), name


def largest_output(engine) -> list[int]:
    seen: list[int] = []
    engine.model.get_output_embeddings().register_forward_hook(
        lambda head, args, out: seen.append(out.numel() // VOCAB)
    )
    return seen


CASES = [
    ("qwen2, tied", {}),
    ("qwen2, untied", {"packed": True, "gradient_checkpointing": True, "logits_chunk": 1}),
    ("qwen2, tied", {"lora": LoRA(2, 4.0)}),
    ("gpt2", {"reshard_after_forward": False}),
    ("gemma2, soft cap", {}),
    ("granite, scale", {"logits_chunk": 3}),
    ("cohere, scale", {"temperature": 0.7}),
]


@pytest.mark.parametrize(("model", "settings"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_whole_logits_to_1e6(models, model, settings, caplog):
    batch, names = make_batch(), (*POLICY, "sum_pi_squared")
    whole = make_engine(models[model], whole_logits=True, **settings)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(models[model], **settings)
        seen = largest_output(engine)
        found = engine.forward(batch, MICRO, outputs=names)
    assert "whole logits" not in caplog.text
    assert max(seen) == 2, "the head returned logits"
    assert_close(found, whole.forward(batch, MICRO, outputs=names))
    for each in (whole, engine):
        each.forward_backward(batch, MICRO, policy_loss(80.0), outputs=POLICY)
    assert_close(gradients(engine), gradients(whole))
    assert max(seen) == 2


@pytest.mark.parametrize("kind", ["scale without a name", "head without a call", "head of another class"])
def test_a_model_whose_head_cannot_be_separated_computes_whole_logits_and_says_so_once(
    models, kind, caplog, monkeypatch
):
    from transformers import Qwen2ForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    batch, path = make_batch(), models["qwen2, untied"]
    forward, init = Qwen2ForCausalLM.forward, Qwen2ForCausalLM.__init__

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    def by_weight(self, **kwargs):
        return CausalLMOutputWithPast(logits=self.model(**kwargs).last_hidden_state @ self.lm_head.weight.t())

    class OtherLinear(torch.nn.Linear):
        pass

    def with_other_head(self, config):
        init(self, config)
        self.lm_head.__class__ = OtherLinear

    if kind == "scale without a name":
        monkeypatch.setattr(Qwen2ForCausalLM, "forward", scaled)
    elif kind == "head without a call":
        monkeypatch.setattr(Qwen2ForCausalLM, "forward", by_weight)
    else:
        monkeypatch.setattr(Qwen2ForCausalLM, "__init__", with_other_head)
    with caplog.at_level(logging.WARNING):
        engine, whole = make_engine(path), make_engine(path, whole_logits=True)
        for each in (engine, whole):
            each.forward_backward(batch, MICRO, policy_loss(80.0), outputs=POLICY)
        found = engine.forward(batch, WHOLE, outputs=POLICY)
    expected = whole.forward(batch, WHOLE, outputs=POLICY)
    assert all(torch.equal(found[name], expected[name]) for name in POLICY)
    assert all(torch.equal(gradients(engine)[name], gradient) for name, gradient in gradients(whole).items())
    assert caplog.text.count("whole logits") == 1
