"""Rows that share prefixes, computed as trees, against the same rows computed apart."""

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from hybridrl.algos.partition.prefix_tree import prefix_tree, real_tokens
from hybridrl.errors import ConfigError
from hybridrl.workers.engine.attention import tree_attention as tree_attention_module
from hybridrl.workers.engine.attention.spans import sees
from hybridrl.workers.engine.attention.tree_attention import attend_tree, tree_attention, use_tree_attention
from hybridrl.workers.engine.base import COMPUTED_TOKENS, ROW_TOKENS, LoRA, MicroBatching
from hybridrl.workers.engine.batching.layout import token_grid
from hybridrl.workers.engine.batching.tree_layout import (
    _log_nothing_shared,
    attention_tree,
    make_tree_layout,
    tree_micro_batches,
)
from tests.support.workers.engine_cases import (
    VOCAB,
    WHOLE,
    gradients,
    make_batch,
    make_engine,
    num_response_tokens,
    policy_loss,
    save_scorer,
    save_tiny_qwen2,
)
from tests.support.workers.prefix_cases import GROUPS, conversation_batch, grouped_batch

pytestmark = pytest.mark.usefixtures("process_group")

POLICY = ("log_probs", "entropy")
BATCHES = {name: grouped_batch(groups) for name, groups in GROUPS.items()} | {"turns": conversation_batch()}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    save_tiny_qwen2(folder / "qwen2")
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).save_pretrained(folder / "llama")
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)).save_pretrained(
        folder / "gpt2"
    )
    window = dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    save_tiny_qwen2(folder / "sliding", **window, layer_types=["full_attention", "sliding_attention"])
    return {name: str(folder / name) for name in ("qwen2", "llama", "gpt2", "sliding")}


def tree_of(batch):
    grid = token_grid(batch)
    rows = real_tokens(grid.input_ids, grid.is_real)
    [order] = tree_micro_batches(grid, WHOLE)
    return prefix_tree([rows[number] for number in order])


@pytest.mark.parametrize("name", ["turns", "ragged", "rows without a partner"])
def test_a_token_sees_the_tokens_of_its_row_up_to_itself(name):
    tree = tree_of(BATCHES[name])
    expected = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.bool)
    for place in map(torch.from_numpy, tree.places):
        expected[place[:, None], place] |= torch.ones(len(place), len(place), dtype=torch.bool).tril()
    index = torch.arange(tree.num_tokens)
    assert torch.equal(sees(attention_tree(tree).ends)(0, 0, index[:, None], index), expected)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["turns", "ragged"])
def test_attention_and_its_gradients_are_those_of_a_full_mask(name, heads):
    tree = attention_tree(tree_of(BATCHES[name]))
    index = torch.arange(len(tree.ends))
    mask = sees(tree.ends)(0, 0, index[:, None], index)
    torch.manual_seed(0)
    states = [torch.randn(1, len(index), count, 8, dtype=torch.float64).transpose(1, 2) for count in (4, heads, heads)]
    for tensor in states:
        tensor.requires_grad_()
    found = attend_tree(*states, tree, scale=0.3)
    expected = F.scaled_dot_product_attention(*states, attn_mask=mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(found)
    gradients_of = [torch.autograd.grad((out * weights).sum(), states) for out in (found, expected)]
    for one, other in zip(*gradients_of, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_gradients_of_bfloat16_states_are_computed_in_float32_and_near_float32s(monkeypatch):
    dtypes, kernel = set(), tree_attention_module._backward

    def recorded(*args, **kwargs):
        dtypes.update(tensor.dtype for tensor in args[:6])
        return kernel(*args, **kwargs)

    monkeypatch.setattr(tree_attention_module, "_backward", recorded)
    tree = attention_tree(tree_of(BATCHES["turns"]))
    torch.manual_seed(0)
    states = [torch.randn(1, heads, len(tree.ends), 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    exact = [tensor.detach().float().requires_grad_() for tensor in states]
    found, expected = (torch.autograd.grad(attend_tree(*own, tree, scale=0.3).sum(), own) for own in (states, exact))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, atol=0.01, rtol=0.01)
    assert dtypes == {torch.float32}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_the_block_mask_gives_the_same(models):
    tree = attention_tree(tree_of(BATCHES["turns"]))
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(tree.ends), 16) for heads in (4, 2, 2))
    found = flex_attention(query, key, value, block_mask=tree.block_mask, enable_gqa=True)
    torch.testing.assert_close(found, attend_tree(query, key, value, tree, scale=None), atol=1e-6, rtol=0)


def use_float64_norms(model: torch.nn.Module) -> None:
    """Let RMSNorm compute in float64; transformers' own rounds to float32 in every dtype."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm = partial(F.rms_norm, normalized_shape=module.weight.shape, eps=module.variance_epsilon)
            module.forward = partial(norm, weight=module.weight)


@pytest.mark.parametrize("model", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("name", ["turns", "ragged"])
def test_in_float64_log_probs_and_gradients_agree_to_1e_9(models, model, name):
    from transformers import AutoModelForCausalLM

    batch = BATCHES[name]
    grid = token_grid(batch)
    weights = batch.batch["advantages"].double().flatten()
    apart, shared = (AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float64).eval() for _ in range(2))
    for each in (apart, shared):
        use_float64_norms(each)
    expected = torch.zeros(batch.batch["response_mask"].numel(), dtype=torch.float64)
    for number, row in enumerate(real_tokens(grid.input_ids, grid.is_real)):
        layout = make_tree_layout(grid, [number])
        logits = apart(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0]
        cells = layout.cell + number * layout.shape[1]
        expected[cells] = logits.log_softmax(-1)[layout.state, layout.labels]
    assert use_tree_attention(shared)
    [order] = tree_micro_batches(grid, WHOLE)
    layout = make_tree_layout(grid, order)
    inputs = {"input_ids": layout.input_ids, "position_ids": layout.position_ids, "tree": layout.tree}
    log_probs = shared(**inputs, use_cache=False).logits[0].log_softmax(-1)[layout.state, layout.labels]
    R = layout.shape[1]
    cells = torch.tensor(order)[layout.cell // R] * R + layout.cell % R
    found = torch.zeros_like(expected).index_copy(0, cells, log_probs)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    for value in (found, expected):
        (value * weights).sum().backward()
    for (parameter_name, one), other in zip(apart.named_parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-9, rtol=0, msg=lambda text, n=parameter_name: n + text)


@pytest.fixture(scope="module")
def engines(models):
    """Engines without and with shared prefixes, by model; their gradients are those of the last call."""
    return {name: (make_engine(models[name]), make_engine(models[name], share_prefixes=True)) for name in models}


def both(pair, batch, micro, *, loss_fn, outputs):
    """Return outputs, loss and gradients of each engine."""
    found = []
    for engine in pair:
        engine.model.zero_grad()
        stats = engine.forward_backward(batch, micro, loss_fn, outputs=outputs)
        loss = sum(float(one["loss"]) for one in stats)
        found.append((engine.forward(batch, micro, outputs=outputs), loss, gradients(engine), stats))
    return found


def assert_same(found) -> None:
    (outputs, loss, own, _), (shared_outputs, shared_loss, shared, _) = found
    for name, expected in outputs.items():
        torch.testing.assert_close(shared_outputs[name], expected, atol=1e-5, rtol=0)
    assert shared_loss == pytest.approx(loss, abs=1e-5)
    for name, expected in own.items():
        torch.testing.assert_close(shared[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("model", ["qwen2", "llama"])
def test_outputs_loss_and_gradients_are_those_of_separate_rows(engines, model, name):
    batch = BATCHES[name]
    loss_fn = policy_loss(num_response_tokens(batch))
    assert_same(both(engines[model], batch, WHOLE, loss_fn=loss_fn, outputs=POLICY))


@pytest.mark.parametrize("micro", [MicroBatching(max_tokens=64), MicroBatching(max_rows=3)], ids=str)
@pytest.mark.parametrize("name", ["turns", "ragged", "16 samples, 1:1"])
def test_any_split_gives_the_same(engines, name, micro):
    batch = BATCHES[name]
    loss_fn = policy_loss(num_response_tokens(batch))
    assert_same(both(engines["qwen2"], batch, micro, loss_fn=loss_fn, outputs=POLICY))


def test_the_tokens_of_shared_prefixes_are_counted_once(engines):
    batch = grouped_batch([(16, [4] * 4), (10, [6])])
    [_, (*_, stats)] = both(engines["qwen2"], batch, WHOLE, loss_fn=policy_loss(1.0), outputs=POLICY)
    # rows: 4 * 20 + 16 tokens; computed: 16 + 4 * 4 + 16
    assert [(one[ROW_TOKENS], one[COMPUTED_TOKENS]) for one in stats] == [(96, 48)]


@pytest.mark.parametrize(
    "settings",
    [{"gradient_checkpointing": True}, {"lora": LoRA(4, 8)}, {"packed": True}, {"temperature": 0.5}],
    ids=str,
)
def test_other_settings_of_the_engine_keep_working(models, settings):
    batch = BATCHES["turns"]
    pair = [make_engine(models["qwen2"], share_prefixes=shared, **settings) for shared in (False, True)]
    loss_fn = policy_loss(num_response_tokens(batch))
    assert_same(both(pair, batch, MicroBatching(max_tokens=80), loss_fn=loss_fn, outputs=POLICY))


@pytest.mark.parametrize("kind", ["value", "score"])
def test_values_and_scores_are_those_of_separate_rows(models, tmp_path, kind):
    path = models["qwen2"] if kind == "value" else save_scorer(models["qwen2"], tmp_path / "scorer")
    pair = [make_engine(path, kind=kind, share_prefixes=shared) for shared in (False, True)]
    name = f"{kind}s"

    def loss_fn(outputs, rows):
        loss = outputs[name].square().sum() / 100
        return loss, {"loss": loss.detach()}

    assert_same(both(pair, BATCHES["turns"], WHOLE, loss_fn=loss_fn, outputs=(name,)))


def test_a_model_with_attention_of_its_own_computes_rows_apart_and_says_so(tmp_path, caplog):
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(str(tmp_path), share_prefixes=True)
    assert "use_prefix_grouper=True has no effect: " in caplog.text
    assert "BloomForCausalLM has attention that does not go through transformers' interface" in caplog.text
    batch = make_batch()
    expected = make_engine(str(tmp_path)).forward(batch, WHOLE, outputs=POLICY)
    found = engine.forward(batch, WHOLE, outputs=POLICY)
    for name in POLICY:
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("asked", [{"dropout": 0.1}, {"position_bias": torch.ones(4)}, {"tree": None}])
def test_what_the_attention_cannot_do_is_refused(asked):
    tree = attention_tree(tree_of(BATCHES["turns"]))
    states = [torch.zeros(1, 4, len(tree.ends), 8)] * 3
    with pytest.raises(ConfigError, match="use_prefix_grouper=True: Module"):
        tree_attention(torch.nn.Module(), *states, None, **{"tree": tree} | asked)


def test_a_row_without_tokens_keeps_its_place(engines):
    batch = grouped_batch([(12, [4, 6, 3])])
    for column in ("attention_mask", "response_mask"):
        batch.batch[column][1] = 0
    found = engines["qwen2"][1].forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    expected = engines["qwen2"][0].forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found[1] == 0).all()


def test_rows_that_share_nothing_are_computed_alone_and_one_line_says_so(engines, caplog):
    _log_nothing_shared.cache_clear()
    batch = make_batch()
    with caplog.at_level(logging.WARNING):
        found = [engine.forward(batch, WHOLE, outputs=POLICY) for engine in engines["qwen2"]]
        assert caplog.text == "", "the rows of a probe of weights share nothing either"
        for engine in (*engines["qwen2"], engines["qwen2"][1]):
            engine.forward_backward(batch, WHOLE, policy_loss(1.0), outputs=POLICY)
            engine.optimizer_step(skip=True)
    assert caplog.text.count("no two rows of an update begin with the same 8 tokens") == 1
    for name in POLICY:
        torch.testing.assert_close(found[1][name], found[0][name], atol=1e-5, rtol=0)
