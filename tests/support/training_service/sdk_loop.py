"""A client program that uses the SDK as its documents say, for `test_sdk.py`: `python sdk_loop.py URL BASE_MODEL`."""

import os
import sys

import numpy as np

os.environ.update(TINKER_API_KEY="tml-local", TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

import tinker
from tinker import types


def text(tokens):
    return types.ModelInput.from_ints(tokens)


def row(tokens):
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(
        model_input=text(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


def own_loss(data, log_probs):
    loss = -sum(values.sum() for values in log_probs)
    return loss, {"own": float(loss.detach())}


def main(url, base_model):
    service = tinker.ServiceClient(base_url=url)
    model = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
    tokens, adam = [*range(20, 40)], types.AdamParams(learning_rate=5e-3, grad_clip_norm=1.0)
    losses = []
    for step in range(20):
        passed, stepped = model.forward_backward([row(tokens)], "cross_entropy"), model.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["num_updates:max"] == step + 1  # an update that ran twice would count twice
    assert losses[-1] < losses[0] / 2, losses

    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=0.7, seed=1)
    samples = sampler.sample(prompt=text(tokens[:4]), num_samples=4, sampling_params=params).result()
    assert len(samples.sequences) == 4 and all(len(one.tokens) <= 6 for one in samples.sequences)
    prompt = sampler.compute_logprobs(text(tokens)).result()
    trained = model.forward([row(tokens)], "cross_entropy").result()
    np.testing.assert_allclose(prompt[1:], trained.loss_fn_outputs[0]["logprobs"].to_numpy(), atol=1e-5)

    custom = model.forward_backward_custom([row(tokens)], own_loss).result()
    np.testing.assert_allclose(custom.metrics["own"], trained.metrics["loss:sum"], rtol=1e-5)
    model.optim_step(adam).result()
    path = model.save_state("one").result().path
    other = service.create_training_client_from_state_with_optimizer(path).result()
    same = [client.forward([row(tokens)], "cross_entropy").result().metrics for client in (model, other)]
    assert same[0] == same[1] != trained.metrics
    try:
        model.forward_backward([row(tokens)], "stable_reinforce").result()
    except tinker.RequestFailedError as error:
        assert "not public" in str(error), error
    else:
        raise AssertionError("stable_reinforce was not refused")
    assert model.get_info().lora_rank == 8 and model.get_tokenizer().vocab_size > 0
    print("done:", *losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
