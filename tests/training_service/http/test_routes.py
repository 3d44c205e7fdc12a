"""The routes over real sockets. `test_program.py` uses them as the SDK does."""

import asyncio
import json

import aiohttp
import pytest

from hybridrl.errors import ConfigError
from hybridrl.training_service import wire
from hybridrl.training_service.http.routes import TrainingEndpoint
from hybridrl.training_service.state.store import Entry, write_entry
from hybridrl.training_service.state.tenants import Tenant, Tenants
from hybridrl.training_service.wire import Pass
from tests.training_service.conftest import make_service, sequence

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789"


@pytest.fixture
def call(computation, tmp_path):
    """`call(*requests)`: send (method, path, options) one after the other; return (status, body) of each."""
    tenants = Tenants({ALICE: Tenant("alice"), BOB: Tenant("bob")})
    service = make_service(computation, tmp_path / "store", tenants=tenants)
    service.start()

    async def send_all(requests):
        endpoint = TrainingEndpoint(service, host="127.0.0.1", port=0)
        await endpoint.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{endpoint.port}/api/v1/") as session:
                return [await send(session, *request) for request in requests]
        finally:
            await endpoint.stop()

    async def send(session, method, path, options=None):
        given = {"headers": {"X-API-Key": ALICE}, **(options or {})}
        async with session.request(method, path, **given) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if response.content_type == "application/json" else raw

    yield lambda *requests: asyncio.run(send_all(requests))
    service.stop()


def post(path, body, **options):
    return "POST", path, {"json": body, **options}


def test_only_a_known_key_gets_an_answer(call):
    answers = call(
        ("GET", "healthz", {"headers": {}}),
        ("GET", "get_server_capabilities", {"headers": {}}),
        ("GET", "get_server_capabilities", {"headers": {"X-API-Key": "tml-wrong-0123456789"}}),
        ("GET", "get_server_capabilities", {"headers": {"Authorization": f"Bearer {BOB}"}}),
    )
    assert [status for status, _ in answers] == [200, 401, 401, 200]
    assert answers[3][1]["supported_models"][0]["model_name"] == "tiny"


def test_web_pages_of_other_origins_get_no_answer(call):
    [(status, _)] = call(("GET", "healthz", {"headers": {"X-API-Key": ALICE, "Origin": "http://elsewhere.example"}}))
    assert status == 403


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"data": b"{"}, 400, "no JSON"),
        ({"data": b"[1]"}, 400, "send an object"),
        ({"data": b"[" * 100_000}, 400, "no JSON"),
        ({"data": b'{"user_metadata": ' + b"[" * 900 + b"]" * 900 + b"}"}, 400, "nested more than 32 deep"),
        ({"json": {"user_metadata": {"a": "x" * 70_000}}}, 400, "send less user_metadata"),
        ({"data": b"x" * (17 << 20)}, 413, "more than 16 MB"),
        ({"data": b"x", "headers": {"X-API-Key": ALICE, "Content-Length": str(1 << 30)}}, 413, "more than 16 MB"),
        ({"data": b"x", "headers": {"X-API-Key": ALICE, "Content-Encoding": "zstd"}}, 415, "Content-Encoding"),
        ({"json": {"session_id": "0123456789abcdef", "model_seq_id": 0}}, 404, "no session"),
    ],
)
def test_bodies_that_cannot_be_used_are_refused(call, options, status, words):
    [(found, body)] = call(("POST", "create_model", options))
    assert found == status and words in body["detail"]


def test_numbers_that_no_tensor_holds_are_the_clients_mistake_and_a_million_samples_have_no_million_names(call):
    [(_, session)] = call(post("create_session", {}))
    sampler = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "tiny"}
    prompt = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_session_id": f"{session['session_id']}:sample:0"}
    datum = {"model_input": {"chunks": [{"tokens": [5, 2**32]}]}, "loss_fn_inputs": {}}
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    answers = call(
        post("create_sampling_session", sampler),
        post("asample", {**prompt, "seq_id": 1, "num_samples": 10**12}),
        post("asample", {**prompt, "seq_id": 2, "sampling_params": {"temperature": 10**400}}),
        post("forward_backward", {"model_id": "0:train:0", "seq_id": 1, "forward_backward_input": given}),
    )
    assert [status for status, _ in answers] == [200, 200, 400, 400]
    assert len(answers[1][1]["sample_sequence_ids"]) == 1024


@pytest.mark.parametrize("model_id", ["%2e%2e%2foutside", "%2Fetc", "**"])
def test_an_id_of_a_model_is_no_pattern_of_files(call, tmp_path, model_id):
    place = tmp_path / "store" / "outside" / "weights" / "one"
    place.mkdir(parents=True)
    write_entry(place, Entry("alice", "", 0.0, "tiny", 4))
    [(status, body)] = call(("GET", f"training_runs/{model_id}/checkpoints", {}))
    assert (status, body["checkpoints"]) == (200, [])


def test_why_a_session_ended_is_one_short_line(call):
    [(_, session)] = call(post("create_session", {}))
    path = f"sessions/{session['session_id']}/finish"
    answers = call(post(path, {"reason": {"type": "a\nb" * 100}}), post("session_heartbeat", session))
    assert answers[1][0] == 410 and "ended: a ba b" in answers[1][1]["detail"] and len(answers[1][1]["detail"]) < 300


def test_another_keys_session_does_not_exist(call):
    [(_, created)] = call(post("create_session", {}))
    body = {"session_id": created["session_id"]}
    answers = call(
        post("session_heartbeat", body),
        post("session_heartbeat", body, headers={"X-API-Key": BOB}),
        ("GET", f"sessions/{created['session_id']}", {"headers": {"X-API-Key": BOB}}),
        post(f"sessions/{created['session_id']}/finish", {"reason": {"type": "success"}}, headers={"X-API-Key": BOB}),
        post(f"sessions/{created['session_id']}/finish", {"reason": {"type": "success"}}),
        post("session_heartbeat", body),
    )
    assert [status for status, _ in answers] == [200, 404, 404, 404, 204, 410]


def test_a_pass_can_be_sent_and_fetched_as_protobuf_and_as_an_old_sdk_does(call):
    [(_, session)] = call(post("create_session", {}))
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    datum = sequence(1)
    old = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": datum.tokens.tolist()}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": datum.inputs["target_tokens"].tolist(), "dtype": "int64"},
            "weights": {"data": datum.inputs["weights"].tolist(), "dtype": "float32"},
        },
    }
    model_id = f"{session['session_id']}:train:0"
    new = wire.pass_message(Pass(model_id, 1, [datum], "cross_entropy", forward_only=True))
    protobuf = {"X-API-Key": ALICE, "Content-Type": wire.PROTOBUF, "Accept": wire.PROTOBUF}
    answers = call(
        post("create_model", body),
        post("get_info", {"model_id": model_id}),
        ("POST", "forward_backward", {"data": new, "headers": protobuf}),
        post(
            "forward", {"model_id": model_id, "seq_id": 2, "forward_input": {"data": [old], "loss_fn": "cross_entropy"}}
        ),
        post("retrieve_future", {"request_id": f"{model_id}:1"}, headers={"X-API-Key": ALICE, "Accept": wire.PROTOBUF}),
        post("retrieve_future", {"request_id": f"{model_id}:2"}),
        post("retrieve_future", {"request_id": f"{model_id}:9"}),
    )
    assert [status for status, _ in answers] == [200, 200, 200, 200, 200, 200, 404]
    arrays, metrics = wire.read_pass_output(answers[4][1])
    assert answers[5][1]["metrics"] == metrics and all(name.count(":") == 1 for name in metrics)
    assert answers[5][1]["loss_fn_outputs"][0]["logprobs"]["data"] == arrays[0].tolist()


def test_an_answer_that_is_not_there_yet_is_status_408(call, monkeypatch):
    monkeypatch.setattr("hybridrl.training_service.http.routes.LONG_POLL_S", 0.05)
    [(_, session)] = call(post("create_session", {}))
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    model_id = f"{session['session_id']}:train:0"
    answers = call(
        post("create_model", body),
        post("optim_step", {"model_id": model_id, "seq_id": 2}),
        post("retrieve_future", {"request_id": f"{model_id}:2"}),
        post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 1}}),
    )
    assert answers[2] == (408, {"queue_state": "active"})
    assert answers[3][0] == 409


def test_without_keys_only_this_machine_is_served(computation, tmp_path):
    service = make_service(computation, tmp_path / "store")
    with pytest.raises(ConfigError, match="name a file by --keys"):
        TrainingEndpoint(service, host="0.0.0.0", port=0)
