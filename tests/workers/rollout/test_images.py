"""The `hf` rollout with images, against the trainer's engine and plain transformers."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.weight_transfer.quantize import (
    GRIDS,
    dequantize_blocks,
    is_quantizable,
    quantize_blocks,
    quantized_weights,
)
from tests.support.workers.engine_cases import AVX512, WHOLE, make_engine
from tests.support.workers.image_cases import (
    FAMILIES,
    image_batch,
    plain_log_probs,
    read_processor,
    save_tiny,
    tower_runs,
)

LIMIT = 2e-5 if AVX512 else 1e-5  # seen: 1.8e-5 in one token


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    """End the group that an engine of this file has started."""
    mine = not dist.is_initialized()
    yield
    if mine and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("images")
    return {family: save_tiny(folder, family) for family in FAMILIES}


def start(path: str, **config):
    tokenizer, _ = read_processor(path)
    setup = RolloutSetup(path, RolloutConfig(**config), (tokenizer.eos_token_id,), tokenizer.pad_token_id, 64, 12)
    return make_rollout("hf", replace(setup, override_config=tower_runs(path)))


def prompts_of(path: str) -> DataProto:
    batch = image_batch(path, n=1)
    width = batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1]
    columns = {name: batch.batch[name][:, :width] for name in ("input_ids", "attention_mask", "position_ids")}
    columns["seeds"] = torch.arange(len(batch)) + 5
    return DataProto.from_dict(columns, {IMAGE_INPUTS: batch.non_tensor_batch[IMAGE_INPUTS]})


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_samples_are_those_of_the_trainer_and_of_plain_transformers(models, family):
    path, prompts = models[family], prompts_of(models[family])
    samples = start(path, max_num_seqs=5).generate(prompts, SamplingParams(12, n=3))
    assert IMAGE_INPUTS not in samples.non_tensor_batch  # the driver has them
    samples.non_tensor_batch[IMAGE_INPUTS] = np.repeat(prompts.non_tensor_batch[IMAGE_INPUTS], 3)
    lengths = samples.batch["response_mask"].sum(-1)
    assert lengths.min() < lengths.max()  # sequences were dropped while others went on
    engine = make_engine(path, packed=True, override_config=tower_runs(path))
    trained = engine.forward(samples, WHOLE, outputs=("log_probs",))["log_probs"]
    with torch.no_grad():
        plain = plain_log_probs(AutoModelForImageTextToText.from_pretrained(path).eval(), samples)
    for expected in (trained, plain):
        torch.testing.assert_close(samples.batch["rollout_log_probs"], expected, atol=LIMIT, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_an_int8_rollout_computes_with_the_quantised_text_part_and_the_trained_tower(models, family):
    """So its log-probs differ from the trainer's by what int8 rounds off the text part, with pictures and without."""
    path, prompts, grid = models[family], prompts_of(models[family]), GRIDS["int8"]
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rollout = start(path, quantization="int8")
    rollout.load_weights(1, quantized_weights(iter(weights.items()), grid))
    samples = rollout.generate(prompts, SamplingParams(12, n=3))
    samples.non_tensor_batch[IMAGE_INPUTS] = np.repeat(prompts.non_tensor_batch[IMAGE_INPUTS], 3)
    trained = plain_log_probs(model, samples).detach()
    rounded = {name for name, tensor in weights.items() if is_quantizable(name, tensor)}
    assert rounded and not any(".visual." in name for name in rounded)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in rounded:
                tensor.copy_(dequantize_blocks(*quantize_blocks(tensor, grid), torch.float32))
        expected = plain_log_probs(model, samples)
    found = samples.batch["rollout_log_probs"]
    torch.testing.assert_close(found, expected, atol=LIMIT, rtol=0)
    mask, is_text = (
        samples.batch["response_mask"],
        [images is None for images in samples.non_tensor_batch[IMAGE_INPUTS]],
    )
    with_text, with_images = (
        float(((found - trained).abs() * mask)[rows].sum() / mask[rows].sum())
        for rows in (torch.tensor(is_text), ~torch.tensor(is_text))
    )
    assert 0.5 < with_images / with_text < 2


@pytest.mark.parametrize("do_sample", [True, False])
def test_placeholders_are_never_sampled_however_likely_they_are(models, do_sample):
    path = models["qwen3_vl"]
    rollout, config = start(path), AutoModelForImageTextToText.from_pretrained(path).config
    never = [config.image_token_id, config.video_token_id]
    weight = rollout._model.get_output_embeddings().weight
    head = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.zero_()[never] = 30.0
    rollout._model.lm_head = head
    found = rollout.generate(prompts_of(path), SamplingParams(8, n=4, do_sample=do_sample)).batch
    drawn = found["responses"][found["response_mask"].bool()]
    assert not torch.isin(drawn, torch.tensor(never)).any()
    assert (found["rollout_log_probs"][found["response_mask"].bool()] < -10).all()  # the model's, not of what was left


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM needs torchvision for images")
@pytest.mark.parametrize("family", FAMILIES[:2])  # vLLM's CPU build computes the others in bfloat16 only
def test_vllm_samples_the_tokens_of_hf_with_its_log_probs_and_forgets_images_after_a_push(tmp_path, family):
    path = save_tiny(tmp_path, family, head=32)
    prompts, sampling = prompts_of(path), SamplingParams(12, n=2)
    tokenizer, _ = read_processor(path)
    config = RolloutConfig(name="vllm", max_num_seqs=8, kv_cache_memory_mb=64)
    own = ((tokenizer.eos_token_id,), tokenizer.pad_token_id, 64, 12)
    setup = RolloutSetup(path, config, *own, load_format="dummy", override_config=tower_runs(path))
    vllm = make_rollout("vllm", setup)  # as in a run
    for version, factor in enumerate((1, -0.5)):
        hf, model = start(path), AutoModelForImageTextToText.from_pretrained(path)
        with torch.no_grad():
            model.model.visual.patch_embed.proj.weight.mul_(factor)
        for rollout in (vllm, hf):
            rollout.load_weights(version, ((name, tensor.clone()) for name, tensor in model.state_dict().items()))
        found, expected = (rollout.generate(prompts, sampling).batch for rollout in (vllm, hf))
        assert torch.equal(found["responses"], expected["responses"])
        torch.testing.assert_close(found["rollout_log_probs"], expected["rollout_log_probs"], atol=1e-5, rtol=0)
    images = prompts.non_tensor_batch[IMAGE_INPUTS]
    rows = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"].bool(), prompts.batch["seeds"], strict=True)
    one = SamplingParams(12)
    requests = [
        Request(str(i), tuple(ids[mask].tolist()), one, int(seed), images=images[i])
        for i, (ids, mask, seed) in enumerate(rows)
    ]
    done = {int(output.request_id): output for output in vllm.request_engine().serve(requests, [], slice_s=300)}
    for row in range(len(prompts)):
        mask = expected["response_mask"][2 * row].bool()
        assert done[row].token_ids == expected["responses"][2 * row][mask].tolist(), done[row].error
    images[0]["image_grid_thw"] = images[0]["image_grid_thw"][:, [0, 2, 1]]
    images[0]["image_tokens"] = images[0]["image_tokens"] - 1
    with pytest.raises(DataError, match="its image processor is not that of"):
        vllm.generate(prompts, sampling)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM needs torchvision for images")
def test_vllm_reads_images_with_qwen3_5_as_far_as_bfloat16_allows(tmp_path):
    path = save_tiny(tmp_path, "qwen3_5", head=32)
    tokenizer, _ = read_processor(path)
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.ndim > 1 else 1)
    config = RolloutConfig(name="vllm", dtype="bfloat16", max_num_seqs=8, kv_cache_memory_mb=64)
    own = ((tokenizer.eos_token_id,), tokenizer.pad_token_id, 64, 12)
    setup = RolloutSetup(path, config, *own, load_format="dummy", override_config=tower_runs(path))
    rollout, prompts = make_rollout("vllm", setup), prompts_of(path)
    rollout.load_weights(0, ((name, tensor.clone()) for name, tensor in model.state_dict().items()))
    samples = rollout.generate(prompts, SamplingParams(12, n=4))
    images, mask = prompts.non_tensor_batch[IMAGE_INPUTS], samples.batch["response_mask"]
    differences = []
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):  # the first and the last prompt have the same tokens
        samples.non_tensor_batch[IMAGE_INPUTS] = np.repeat(images[order], 4)
        found = plain_log_probs(model, samples).detach() - samples.batch["rollout_log_probs"]
        differences.append(float((found.abs() * mask).sum() / mask.sum()))
    assert differences[0] < 0.02 and differences[1] > 2 * differences[0]


def test_a_rollout_that_cannot_read_images_refuses_prompts_with_images(models):
    from tests.support.third_party.toy_rollout import ToyRollout

    rollout = ToyRollout.__new__(ToyRollout)
    with pytest.raises(Exception, match="does not declare the capability images; use hf"):
        rollout.given_images([None, object()])
    assert rollout.given_images([None]) == rollout.given_images(None) == {}


def test_requests_sample_the_tokens_of_a_batch_also_in_chunks_and_beside_requests_of_text(models, monkeypatch):
    monkeypatch.setattr("hybridrl.workers.rollout.batched_request_engine.CHUNK_TOKENS", 5)
    path, prompts = models["qwen3_vl"], prompts_of(models["qwen3_vl"])
    rollout, sampling = start(path), SamplingParams(12)
    batch = rollout.generate(prompts, sampling).batch
    rows = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"].bool(), prompts.batch["seeds"], strict=True)
    images = prompts.non_tensor_batch[IMAGE_INPUTS]
    requests = [
        Request(str(i), tuple(ids[mask].tolist()), sampling, int(seed), images=images[i])
        for i, (ids, mask, seed) in enumerate(rows)
    ]
    engine, done = rollout.request_engine(), []
    assert {request.images is None for request in requests} == {True, False}
    done += engine.serve(requests, [], slice_s=60)
    for output in done:
        row = int(output.request_id)
        mask = batch["response_mask"][row].bool()
        assert output.token_ids == batch["responses"][row][mask].tolist()
        torch.testing.assert_close(
            torch.tensor(output.log_probs), batch["rollout_log_probs"][row][mask], atol=1e-5, rtol=0
        )
    assert len(done) == len(requests)
