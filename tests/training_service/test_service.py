import itertools
import json
import threading
import time

import numpy as np
import pytest
import torch

from hybridrl.training_service import wire
from hybridrl.training_service.client import OperationFailed, ServiceClient, datum
from hybridrl.training_service.computation import worker
from hybridrl.training_service.service import Busy
from hybridrl.training_service.state.ledger import Conflict, has_failed
from hybridrl.training_service.state.session_table import Gone
from hybridrl.training_service.state.store import NotFound
from hybridrl.training_service.state.tenants import EVERYBODY, Tenant, Tenants
from hybridrl.view.runs import open_runs
from hybridrl.workers.engine.base import MicroBatching
from tests.training_service.conftest import MAX_LENGTH, make_service, sequence

LR = 3e-3


def losses_of(model, seed, *, steps=4):
    """The losses of a loop with two accumulated passes per step."""
    found = []
    for step in range(steps):
        for part in range(2):
            data = [sequence(1000 * seed + 10 * step + part + row, 6 + row) for row in range(3)]
            found.append(model.forward_backward(data, "cross_entropy").loss)
        found.append(model.optim_step(learning_rate=LR, grad_clip_norm=1.0)["metrics"]["grad_norm:mean"])
    return found


def test_a_model_learns_and_its_samples_follow_the_weights(service):
    client = ServiceClient(service)
    model = client.create_model(rank=4, seed=1)
    tokens = [*range(20, 40)]
    row = datum(tokens[:-1], tokens[1:], weights=np.ones(19))
    before = model.sampler()
    first = model.forward([row]).loss
    for _ in range(30):
        model.forward_backward([row], "cross_entropy")
        model.optim_step(learning_rate=5e-3, grad_clip_norm=1.0)
    assert model.forward([row]).loss < first / 10
    after, base = model.sampler(), client.sampler()
    assert after.sample(tokens[:3], max_tokens=5, temperature=0).sequences[0].tokens == tokens[3:8]
    # An older snapshot can be sampled still, and it is the base model.
    np.testing.assert_allclose(before.log_probs(tokens), base.log_probs(tokens), atol=1e-5)
    trained = np.r_[np.nan, model.forward([row]).log_probs[0]]
    np.testing.assert_allclose(after.log_probs(tokens), trained, atol=1e-5)


def test_prompt_log_probs_are_the_trainers_while_it_has_the_weights_and_then_the_rollouts(service):
    client = ServiceClient(service)
    model, tokens = client.create_model(rank=4), [*range(20, 40)]
    losses_of(model, 1, steps=1)
    sampler = model.sampler()
    body = {
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": {"max_tokens": 1},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "target_prompt_logprobs": {"data": [[7, -1]] * 19, "dtype": "int64", "shape": [19, 2]},
    }

    def asked(seq_id):
        named = body | {"sampling_session_id": sampler.id, "seq_id": seq_id}
        answer = service.answer(EVERYBODY, service.sample(EVERYBODY, named)[0]).result(60)
        found = wire.read_message("SampleResponse", answer.body)
        table = found.topk_prompt_logprobs
        parts = found.prompt_logprobs, table.logprobs, found.target_prompt_logprobs.dense
        return [np.frombuffer(part, np.float32) for part in parts], np.frombuffer(table.token_ids, np.int32)

    trained = model.forward([datum(tokens[:-1], tokens[1:])]).log_probs[0]
    (of_trainer, ids), own = asked(1), service._lanes[model.id].model
    assert own.published is not None
    np.testing.assert_array_equal(of_trainer[0][1:], trained)
    losses_of(model, 2, steps=1)
    assert own.published is None
    of_rollout, same_ids = asked(2)
    for found, expected in zip(of_rollout, of_trainer, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(same_ids, ids)


def test_the_steps_of_a_model_are_a_run_that_view_shows(service):
    model = ServiceClient(service).create_model(rank=4)
    found = losses_of(model, 1, steps=2)
    [run] = open_runs([str(service.store.root)]).values()
    assert run.summary()["step"] == 2
    assert run.metrics.series("train/loss_sum") == ([1, 2], [found[0] + found[1], found[3] + found[4]])
    assert run.metrics.series("train/grad_norm") == ([1, 2], [found[2], found[5]])


def test_an_inflight_sampler_follows_later_saves(service):
    model = ServiceClient(service).create_model(rank=4)
    old = model.sampler("inflight")
    before = old.log_probs([20, 21, 22])
    losses_of(model, 1, steps=1)
    new = model.sampler("inflight")
    np.testing.assert_array_equal(old.log_probs([20, 21, 22]), new.log_probs([20, 21, 22]))
    assert not np.allclose(before[1:], new.log_probs([20, 21, 22])[1:])


def test_models_above_a_keys_limit_take_turns_in_memory_with_the_numbers_of_each_alone(shared):
    """Alice has one place; a model leaves it with gradients, too."""
    bob = ServiceClient(shared, BOB)
    expected = [losses_of(bob.create_model(rank=2, seed=seed), seed, steps=3) for seed in range(3)]
    clients = [ServiceClient(shared, ALICE) for _ in range(3)]
    models = [client.create_model(rank=2, seed=seed) for seed, client in enumerate(clients)]
    found: list = [[] for _ in models]
    for step in range(3):
        for part in range(2):
            for seed, model in enumerate(models):
                data = [sequence(1000 * seed + 10 * step + part + row, 6 + row) for row in range(3)]
                found[seed].append(model.forward_backward(data, "cross_entropy").loss)
                assert [
                    lane.model.id for lane in shared._lanes.values() if lane.is_loaded and lane.tenant == "alice"
                ] == [model.id]
        stepped = [model.optim_step(learning_rate=LR, grad_clip_norm=1.0, wait=False) for model in models]
        for seed, pending in enumerate(stepped):
            found[seed].append(pending.result()["metrics"]["grad_norm:mean"])
    assert found == expected


def test_weights_that_were_deleted_stay_so_when_their_model_comes_back_into_memory(shared):
    first, other = (ServiceClient(shared, CAROL).create_model(rank=2) for _ in range(2))
    first.forward_backward([sequence(1)], "cross_entropy")
    path, sampler = first.save("one"), first.sampler()
    expected = sampler.log_probs([20, 21, 22])
    shared.store.delete(path, owner="carol")
    other.forward([sequence(1)])
    assert not shared._lanes[first.id].is_loaded
    assert first.optim_step(learning_rate=LR)["metrics"]["grad_norm:mean"] > 0
    with pytest.raises(NotFound):
        shared.store.find(path, owner="carol")
    np.testing.assert_allclose(sampler.log_probs([20, 21, 22])[1:], expected[1:], atol=1e-5)


def test_a_key_without_models_trains_none(computation, tmp_path):
    nobody = Tenant("nobody", max_models=0)
    service = make_service(computation, tmp_path / "store", tenants=Tenants({"tml-nobody-0123456789": nobody}))
    service.start()
    with pytest.raises(OperationFailed, match="0 models are open, of 0 for this key"):
        ServiceClient(service, nobody).create_model(rank=2)
    service.stop()


@pytest.mark.parametrize("num_tenants", [2, 8])
def test_tenants_that_take_turns_get_bit_for_bit_what_each_gets_alone(service, num_tenants):
    configs = [{"rank": 1 + number, "seed": number, "train_mlp": number % 2 == 0} for number in range(num_tenants)]
    alone = []
    for number, config in enumerate(configs):
        client = ServiceClient(service)
        alone.append(losses_of(client.create_model(**config), number, steps=2))
        client.finish()
    models = [ServiceClient(service).create_model(**config) for config in configs]
    together: list = [None] * num_tenants

    def run(number):
        together[number] = losses_of(models[number], number, steps=2)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_tenants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


def test_a_model_goes_on_from_saved_weights_as_if_it_had_not_stopped(service):
    client = ServiceClient(service)
    model = client.create_model(rank=4, seed=5, train_attn=False)
    losses_of(model, 1, steps=2)
    path = model.save("two")
    other = client.load(path)
    assert losses_of(model, 2, steps=2) == losses_of(other, 2, steps=2)


def test_without_the_optimizer_only_the_weights_are_loaded(service):
    client = ServiceClient(service)
    model = client.create_model(rank=4)
    losses_of(model, 1, steps=2)
    other = client.load(model.save_for_sampler("two"), optimizer=False)
    data = [sequence(3)]
    assert other.forward(data).loss == model.forward(data).loss
    assert other.optim_step(learning_rate=0.0)["metrics"]["num_updates:max"] == 1.0
    with pytest.raises(OperationFailed, match="saved without an optimizer"):
        client.load(model.save_for_sampler("three"))


def test_a_step_without_gradients_changes_nothing(service):
    model = ServiceClient(service).create_model(rank=4)
    losses_of(model, 1, steps=1)
    before = model.forward([sequence(1)]).log_probs[0]
    assert model.optim_step(learning_rate=1.0)["metrics"]["grad_norm:mean"] == 0.0
    np.testing.assert_array_equal(model.forward([sequence(1)]).log_probs[0], before)


def test_all_weights_can_be_trained_and_sampled(full_computation, tmp_path):
    service = make_service(full_computation, tmp_path / "store", max_rank=0)
    service.start()
    client = ServiceClient(service)
    first, second = client.create_model(rank=0), client.create_model(rank=0)
    alone = losses_of(first, 1, steps=2)
    assert losses_of(second, 1, steps=2) == alone and alone[0] != alone[3]
    tokens = [20, 21, 22, 23]
    expected = first.forward([datum(tokens[:-1], tokens[1:])]).log_probs[0]
    np.testing.assert_allclose(first.sampler().log_probs(tokens)[1:], expected, atol=1e-5)
    assert not np.allclose(client.sampler().log_probs(tokens)[1:], expected, atol=1e-3)
    with pytest.raises(OperationFailed, match="rank=4: this server trains all weights"):
        client.create_model(rank=4)
    service.stop()


def test_k_targets_of_a_position_are_weighted_apart(service):
    model = ServiceClient(service).create_model(rank=4)
    targets = np.array([[21, 31], [22, 32], [23, 33]])
    both = model.forward([datum([20, 21, 22], targets, weights=np.ones((3, 2)))])
    first = model.forward([datum([20, 21, 22], targets[:, 0])])
    np.testing.assert_array_equal(both.log_probs[0][:, 0], first.log_probs[0])
    assert both.loss == pytest.approx(-both.log_probs[0].sum(), rel=1e-6)


# -- a server that is killed


def test_after_a_kill_the_loop_goes_on_with_the_losses_of_an_undisturbed_run(computation, tmp_path):
    """Here a server ends between two operations. `test_program.py` kills one in the midst of them."""
    undisturbed = make_service(computation, tmp_path / "other")
    undisturbed.start()
    expected = losses_of(ServiceClient(undisturbed).create_model(rank=4, seed=2), 7)
    undisturbed.stop()

    service = make_service(computation, tmp_path / "store")
    service.start()
    client, found = ServiceClient(service), []
    model, rng = client.create_model(rank=4, seed=2), np.random.default_rng(0)
    for step in range(4):
        for part in range(2):
            data = [sequence(7000 + 10 * step + part + row, 6 + row) for row in range(3)]
            model.forward_backward(data, "cross_entropy", wait=False)
        model.optim_step(learning_rate=LR, grad_clip_norm=1.0, wait=False)
        time.sleep(rng.uniform(0, 0.05))
        service.stop()
        client.service = service = make_service(computation, tmp_path / "store")
        service.start()
        numbers = [1 + 3 * step, 2 + 3 * step]
        passes = [client.pending(f"{model.id}:{seq_id}", wire.read_pass_output).result() for seq_id in numbers]
        step_result = client.pending(f"{model.id}:{3 + 3 * step}", json.loads).result()
        found += [*(metrics["loss:sum"] for _, metrics in passes), step_result["metrics"]["grad_norm:mean"]]
    service.stop()
    assert found == expected


def test_a_pass_that_fails_half_way_leaves_no_gradient(service, monkeypatch):
    client = ServiceClient(service)
    rows = [sequence(number, 6) for number in range(3)]
    found = []
    for fails in (False, True):
        model = client.create_model(rank=4, seed=3)
        model.forward_backward(rows[:1], "cross_entropy")
        if fails:
            with monkeypatch.context() as patched:
                fail_in_second_micro_batch(patched)
                with pytest.raises(OperationFailed, match="RuntimeError: out of memory") as caught:
                    model.forward_backward(rows, "cross_entropy")
            assert caught.value.category == "server"
        model.forward_backward(rows[1:], "cross_entropy")
        found.append((model.optim_step()["metrics"]["grad_norm:mean"], model.forward(rows).loss))
    assert found[0] == found[1]


def test_a_step_that_fails_half_way_is_made_from_the_last_state(service, with_adapters, monkeypatch):
    client, engine, found = ServiceClient(service), with_adapters[1].worker._engine, []

    def failing():
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.add_(float(parameter.requires_grad))
        raise RuntimeError("out of memory")

    for fails in (False, True):
        model = client.create_model(rank=4, seed=3)
        model.forward_backward([sequence(0)], "cross_entropy")
        if fails:
            with monkeypatch.context() as patched, pytest.raises(OperationFailed, match="out of memory"):
                patched.setattr(engine, "optimizer_step", failing)
                model.optim_step()
        model.optim_step()
        found.append(model.forward([sequence(0)]).loss)
    assert found[0] == found[1]


def fail_in_second_micro_batch(patched):
    def one_row_at_a_time(max_tokens):
        return MicroBatching(max_rows=1)

    def failing(*args):
        loss_fn, calls = loss_of(*args), itertools.count()

        def loss(outputs, rows):
            if next(calls):
                raise RuntimeError("out of memory")
            return loss_fn(outputs, rows)

        return loss

    loss_of = worker._loss_of
    patched.setattr(worker, "MicroBatching", one_row_at_a_time)
    patched.setattr(worker, "_loss_of", failing)


def test_after_a_start_only_gradients_are_computed_again(computation, tmp_path, monkeypatch):
    service = make_service(computation, tmp_path / "store")
    service.start()
    client = ServiceClient(service)
    model = client.create_model(rank=4)
    loss = model.forward([sequence(0)]).loss
    model.forward_backward([sequence(1)], "cross_entropy")
    service.stop()
    client.service = service = make_service(computation, tmp_path / "store")
    run_pass, forward_only = computation.run_pass, []
    monkeypatch.setattr(
        computation, "run_pass", lambda model, asked: forward_only.append(asked.forward_only) or run_pass(model, asked)
    )
    service.start()
    assert model.optim_step()["metrics"]["grad_norm:mean"] > 0
    assert forward_only == [False]
    earlier, metrics = client.pending(f"{model.id}:1", wire.read_pass_output).result()
    assert metrics["loss:sum"] == loss
    service.stop()


def test_a_file_that_a_loss_of_power_has_cut_stops_its_own_model_only(computation, tmp_path):
    service = make_service(computation, tmp_path / "store")
    service.start()
    client = ServiceClient(service)
    cut, other_cut, whole = (client.create_model(rank=4) for _ in range(3))
    for model in (cut, whole):
        model.forward_backward([sequence(0)], "cross_entropy")
    other_cut.forward([sequence(0)])
    service.stop()
    operations = {lane.model.id: lane.model.ledger.directory / "operations" for lane in service._lanes.values()}
    (operations[cut.id] / "00000001.request").write_bytes(b"")
    (operations[other_cut.id] / "00000001.result").write_bytes(b"")
    (operations[whole.id] / "00000001.result").write_bytes(b"")  # it runs again
    (operations[whole.id].parents[1] / "7").mkdir()  # a model whose client got no id
    client.service = service = make_service(computation, tmp_path / "store")
    service.start()
    assert whole.optim_step()["metrics"]["grad_norm:mean"] > 0
    for model, file in ((cut, "request"), (other_cut, "result")):
        with pytest.raises(OperationFailed, match=f"00000001.{file}.*loss of power.*load its last checkpoint"):
            model.optim_step()
    service.stop()


def test_what_an_ended_session_leaves_is_deleted_at_the_next_start(computation, tmp_path):
    service = make_service(computation, tmp_path / "store")
    service.start()
    client = ServiceClient(service)
    model = client.create_model(rank=4)
    model.sampler()
    directory = service.table.find(EVERYBODY, client.session_id).directory
    service.stop()
    client.finish()
    left = {path.name for path in directory.rglob("*") if path.is_dir()}
    assert left >= {"state", "operations", "samplers"}
    make_service(computation, tmp_path / "store").start()
    assert {path.name for path in directory.rglob("*") if path.is_dir()} == {"models", "0"}


# -- refusals


def test_a_repeated_request_runs_once_and_another_one_under_its_number_is_a_conflict(service):
    client = ServiceClient(service)
    model = client.create_model(rank=4)
    body = {"model_id": model.id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    assert service.submit_json(EVERYBODY, "optim_step", body) == service.submit_json(EVERYBODY, "optim_step", body)
    with pytest.raises(Conflict, match="seq_id=1 has another request"):
        service.submit_json(EVERYBODY, "optim_step", body | {"adam_params": {"learning_rate": 0.2}})


def test_a_gap_ends_with_its_session(service):
    client = ServiceClient(service)
    model = client.create_model(rank=4)
    request = service.submit_json(EVERYBODY, "optim_step", {"model_id": model.id, "seq_id": 2})
    pending = client.pending(request, json.loads)
    client.finish()
    with pytest.raises(OperationFailed, match="has ended: success"):
        pending.result(10)
    with pytest.raises(Gone, match="has ended"):
        service.heartbeat(EVERYBODY, client.session_id)


def test_the_session_of_a_silent_client_ends(computation, tmp_path):
    service = make_service(computation, tmp_path / "store", timeout_s=0.05)
    service.start()
    client = ServiceClient(service)
    time.sleep(0.1)
    service.end_silent()
    with pytest.raises(Gone, match="silent for 0.05 s"):
        service.heartbeat(EVERYBODY, client.session_id)
    service.stop()


def test_an_operation_that_fails_says_whose_mistake_it_is_and_the_next_one_runs(service):
    model = ServiceClient(service).create_model(rank=4)
    bad = [
        (datum([20, 9999], [21, 22]), "token 9999"),
        (datum([20, 21], [21, 9999]), "token 9999"),
        (datum([20, 21], [21, 22], weights=[1.0, np.nan]), "not finite"),
        (datum([20] * (MAX_LENGTH + 1), [20] * (MAX_LENGTH + 1)), "has 65 tokens"),
    ]
    for row, words in bad:
        with pytest.raises(OperationFailed, match=words) as caught:
            model.forward_backward([row], "cross_entropy")
        assert caught.value.category == "user"
    with pytest.raises(OperationFailed, match="stable_reinforce.*not public"):
        model.forward_backward([sequence(0)], "stable_reinforce")
    with pytest.raises(OperationFailed, match="eps=0"):
        model.optim_step(eps=0)
    with pytest.raises(OperationFailed, match="momentum"):
        model.optim_step(momentum=0.9)
    assert model.optim_step()["metrics"]["grad_norm:mean"] == 0.0  # none of them left a gradient


def test_waiting_requests_have_a_limit_of_memory_which_the_end_of_their_session_frees(service, monkeypatch):
    monkeypatch.setattr("hybridrl.training_service.service.MAX_WAITING_BYTES", 1000)
    client = ServiceClient(service)
    model = client.create_model(rank=4)
    ledger, options = service._lanes[model.id].model.ledger, {"adam_params": {}, "more": "x" * 600}

    def send(seq_id):
        service.submit_json(EVERYBODY, "optim_step", {"model_id": model.id, "seq_id": seq_id, **options})

    send(3)
    with pytest.raises(Busy, match="requests that wait"):
        send(4)
    waiting = ledger.find(3)
    service.finish(EVERYBODY, client.session_id, "finished")
    assert has_failed(waiting.answer.result(60)) and waiting.body == b""
    send_next = ServiceClient(service).create_model(rank=4)  # what has ended is not counted
    assert send_next.optim_step()["metrics"]["grad_norm:mean"] == 0.0


def test_what_would_run_again_has_a_limit_until_the_next_step(service, monkeypatch):
    monkeypatch.setattr("hybridrl.training_service.operations.MAX_UNSAVED_BYTES", 10_000)
    client = ServiceClient(service)
    model, other = client.create_model(rank=4), client.create_model(rank=4)
    model.forward_backward([sequence(0)], "cross_entropy")
    for full in (model, other, model):
        with pytest.raises(OperationFailed, match="call optim_step"):
            for _ in range(3):
                full.forward_backward([sequence(0)], "cross_entropy")
    requests = list((service._lanes[model.id].model.ledger.directory / "operations").glob("*.request"))
    assert len(requests) <= 3, "what was refused is not kept"
    for full in (model, other):
        full.optim_step()
    model.forward_backward([sequence(0)], "cross_entropy")


def test_models_that_cannot_be_made_are_refused_in_their_answer(service):
    client = ServiceClient(service)
    with pytest.raises(OperationFailed, match="rank=9: this server trains adapters of rank 1 to 8"):
        client.create_model(rank=9)
    with pytest.raises(OperationFailed, match="nothing would be trained"):
        client.create_model(rank=2, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(OperationFailed, match="there are no weights tinker://"):
        client.load("tinker://0123456789abcdef:train:0/weights/one")
    for body in ({"base_model": "other"}, {"base_model": "tiny", "optimizer_config": {"type": "dimuon"}}):
        with pytest.raises(OperationFailed, match="this server has 'tiny'|use adamw"):
            client._model("create_model", body | {"lora_config": {"rank": 2}})


@pytest.mark.parametrize(
    "path",
    ["tinker://../../etc/passwd", "tinker://x/weights/..", "/etc/passwd", "tinker://0123456789abcdef:train:0/state/a"],
)
def test_no_path_leaves_the_store(service, path):
    client = ServiceClient(service)
    with pytest.raises(OperationFailed, match="no path of weights|there is no|a name has"):
        client.load(path)
    with pytest.raises(OperationFailed, match="a name has letters"):
        client.create_model(rank=2).save("../../outside")


def test_a_name_is_taken_once_unless_it_is_overwritten(service):
    model = ServiceClient(service).create_model(rank=2)
    path = model.save("one")
    with pytest.raises(OperationFailed, match="exists; use another name"):
        model.save("one")
    assert model.save("one", overwrite=True) == path
    with pytest.raises(OperationFailed, match="ttl_seconds=-5"):
        model.save("two", ttl_seconds=-5)


def test_weights_expire_and_can_be_deleted(service):
    client = ServiceClient(service)
    model = client.create_model(rank=2)
    path = model.save("one")
    service.store.set_ttl(path, 1, owner="local")
    place, entry = service.store.find(path, owner="local")
    assert entry.expires_at == pytest.approx(time.time() + 1, abs=1)
    service.store.delete(path, owner="local")
    assert not place.exists()
    with pytest.raises(NotFound):
        service.store.find(path, owner="local")


# -- tenants

ALICE, BOB = Tenant("alice", max_models=1, max_tokens_in_flight=30, max_storage_mb=0), Tenant("bob")
CAROL = Tenant("carol", max_models=1)


@pytest.fixture
def shared(computation, tmp_path):
    tenants = Tenants({"tml-alice-0123456789": ALICE, "tml-bob-0123456789": BOB, "tml-carol-0123456789": CAROL})
    found = make_service(computation, tmp_path / "store", tenants=tenants)
    found.start()
    yield found
    found.stop()


def test_a_tenant_sees_nothing_of_another(shared):
    bob, alice = ServiceClient(shared, BOB), ServiceClient(shared, ALICE)
    model = bob.create_model(rank=2)
    path, sampler = model.save("secret"), model.sampler()
    for call in (
        lambda: shared.heartbeat(ALICE, bob.session_id),
        lambda: shared.submit_json(ALICE, "optim_step", {"model_id": model.id, "seq_id": 3}),
        lambda: shared.answer(ALICE, f"{model.id}:1"),
        lambda: shared.sample(ALICE, {"sampling_session_id": sampler.id, "seq_id": 0}),
        lambda: alice.sampler(path),
        lambda: shared.store.delete(path, owner="alice"),
    ):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(OperationFailed, match="there are no weights"):
        alice.load(path)
    assert list(shared.store.listed(owner="alice")) == []


def test_the_limits_of_a_key_hold(shared):
    alice = ServiceClient(shared, ALICE)
    model = alice.create_model(rank=2)
    with pytest.raises(OperationFailed, match="0 MB are stored, of 0"):
        model.save("one")
    shared._executor.stop()  # so that operations stay in flight
    model.forward_backward([sequence(0, 20)], "cross_entropy", wait=False)
    with pytest.raises(Busy, match="20 tokens are in flight, of 30"):
        model.forward_backward([sequence(0, 20)], "cross_entropy", wait=False)
    sampler = ServiceClient(shared, ALICE).sampler()
    with pytest.raises(Busy, match="20 tokens are in flight, of 30"):
        sampler.sample([20, 21], num_samples=2, max_tokens=6, wait=False)
    sampler.sample([20, 21], num_samples=2, max_tokens=4, wait=False)  # 2 + 2 * 4
    with pytest.raises(Busy, match="30 tokens are in flight, of 30"):
        sampler.sample([20], max_tokens=1, wait=False)


def test_the_operation_that_others_wait_for_is_taken_whatever_is_in_flight(shared):
    model = ServiceClient(shared, ALICE).create_model(rank=2)
    shared._executor.stop()
    for seq_id in (2, 1):  # clients may send passes in parallel
        body = wire.pass_message(wire.Pass(model.id, seq_id, [sequence(0, 20)], "cross_entropy", {}, False))
        assert shared.submit_pass(ALICE, body) == f"{model.id}:{seq_id}"


# -- sampling


def test_samples_do_not_depend_on_what_is_sampled_with_them(service):
    sampler = ServiceClient(service).sampler()
    options = {"max_tokens": 12, "seed": 3, "num_samples": 2}
    alone = sampler.sample([20, 21, 22], **options).sequences
    others = [sampler.sample([30 + number], max_tokens=20, wait=False) for number in range(5)]
    assert [one.tokens for one in sampler.sample([20, 21, 22], **options).sequences] == [one.tokens for one in alone]
    assert all(len(one.result().sequences[0].tokens) <= 20 for one in others)


def test_an_empty_stop_list_ends_a_sample_only_at_its_limit_and_token_ids_end_it(service):
    sampler = ServiceClient(service).sampler()
    [endless] = sampler.sample([20, 21], max_tokens=40, stop=[], seed=1).sequences
    assert len(endless.tokens) == 40 and not endless.stopped
    stop = endless.tokens[10]
    [stopped] = sampler.sample([20, 21], max_tokens=40, stop=[stop], seed=1).sequences
    assert stopped.stopped and stopped.tokens == endless.tokens[: endless.tokens.index(stop) + 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 62}, "max_tokens=62: must be a whole number from 1 to 61"),
        ({"max_tokens": 4, "temperature": -1}, "temperature=-1"),
        ({"max_tokens": 4, "top_p": 7.0}, "top_p=7.0"),
        ({"max_tokens": 4, "stop": [1, "a"]}, "stop="),
        ({"max_tokens": 4, "num_samples": 0}, "num_samples=0"),
    ],
)
def test_sampling_options_out_of_range_are_refused(service, change, words):
    with pytest.raises(OperationFailed, match=words) as caught:
        ServiceClient(service).sampler().sample([20, 21, 22], **change)
    assert caught.value.category == "user"


def test_a_policy_learns_from_rewards_of_its_own_samples(service):
    """The reward is the share of tokens below 100, of 336."""
    model, prompt, rewards = ServiceClient(service).create_model(rank=8, seed=1), [20, 21, 22], []
    for step in range(16):
        samples = model.sampler().sample(prompt, num_samples=16, max_tokens=4, stop=[], seed=step).sequences
        reward = np.array([np.mean(np.array(one.tokens) < 100) for one in samples])
        rewards.append(reward.mean())
        data = []
        for one, advantage in zip(samples, reward - reward.mean(), strict=True):
            tokens = [*prompt, *one.tokens]
            columns = {"logprobs": [0, 0, *one.log_probs], "advantages": [0, 0, *[advantage] * 4]}
            data.append(datum(tokens[:-1], tokens[1:], **columns))
        model.forward_backward(data, "importance_sampling")
        model.optim_step(learning_rate=3e-3)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards
