import json

import numpy as np
import pytest

from hybridrl.errors import DataError
from hybridrl.training_service import wire
from hybridrl.training_service.messages import FLOAT32, messages
from hybridrl.training_service.wire import Datum, Pass, Sampled


def a_pass(**changes) -> Pass:
    inputs = {"target_tokens": np.array([5, 6, 7]), "weights": np.array([1.0, -2.0, 0.5], np.float32)}
    data = [Datum(np.array([4, 5, 6]), inputs)]
    return Pass("s:train:0", 3, data, "cross_entropy", **changes)


def test_a_pass_arrives_as_it_was_sent():
    sent = a_pass(config={"clip_low_threshold": 0.7, "name": "text"}, forward_only=True)
    read = wire.read_pass(wire.pass_message(sent))
    assert (read.model_id, read.seq_id, read.loss_fn, read.config, read.forward_only) == (
        *("s:train:0", 3, "cross_entropy"),
        *({"clip_low_threshold": 0.7, "name": "text"}, True),
    )
    np.testing.assert_array_equal(read.data[0].tokens, [4, 5, 6])
    np.testing.assert_array_equal(read.data[0].inputs["weights"], np.array([1, -2, 0.5], np.float32))


def test_the_header_is_read_without_the_data():
    assert wire.read_header(wire.pass_message(a_pass())) == wire.Header("s:train:0", 3, 3, forward_only=False)


def test_requests_with_maps_in_another_order_have_the_same_canonical_bytes():
    first, second = a_pass(), a_pass()
    inputs = second.data[0].inputs
    turned = Pass(second.model_id, 3, [Datum(second.data[0].tokens, dict(reversed(inputs.items())))], second.loss_fn)
    assert wire.canonical(wire.pass_message(first)) == wire.canonical(wire.pass_message(turned))


def test_the_json_of_an_old_sdk_is_the_same_pass():
    body = {
        "model_id": "s:train:0",
        "seq_id": 3,
        "forward_backward_input": {
            "data": [
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [4, 5, 6]}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [5, 6, 7], "dtype": "int64", "shape": [3]},
                        "weights": {"data": [1.0, -2.0, 0.5], "dtype": "float32", "shape": [3]},
                    },
                }
            ],
            "loss_fn": "cross_entropy",
        },
    }
    assert wire.pass_of_json(body, forward_only=False) == wire.pass_message(a_pass())


def test_a_matrix_in_compressed_rows_becomes_a_dense_one():
    # Rows: [0 0 5], [], [7 0 0].
    crow, col, values = np.array([0, 1, 1, 2]), np.array([2, 0]), np.array([5.0, 7.0], np.float32)
    dense = wire.from_csr(crow, col, values, shape=[3, 3], what="weights")
    np.testing.assert_array_equal(dense, [[0, 0, 5], [0, 0, 0], [7, 0, 0]])


@pytest.mark.parametrize("crow", [[0, 2, 1, 2], [0, 1, 1], [1, 1, 1, 2], [0, 1, 1, 3]])
def test_a_matrix_whose_parts_do_not_fit_is_refused(crow):
    with pytest.raises(DataError, match="no matrix of shape"):
        wire.from_csr(np.array(crow), np.array([2, 0]), np.array([5.0, 7.0]), shape=[3, 3], what="weights")


@pytest.mark.parametrize("shape", [[1, 2**29], [-1, 2**29]])
def test_a_sparse_tensor_that_is_large_when_dense_is_refused_before_it_is_made(shape):
    message = wire.read_message("ForwardBackwardRequest", wire.pass_message(a_pass()))
    sparse = message.data[0].loss_fn_inputs["weights"]
    sparse.dtype, sparse.shape[:] = FLOAT32, shape
    sparse.sparse_csr.crow_indices = np.array([0, 0]).tobytes()
    with pytest.raises(DataError, match="tensors of the pass have 5368709"):
        wire.read_pass(message.SerializeToString())
    tensor = {"data": [], "dtype": "float32", "shape": shape, "sparse_crow_indices": [0, 0], "sparse_col_indices": []}
    datum = {"model_input": {"chunks": []}, "loss_fn_inputs": {"weights": tensor}}
    body = {"model_id": "m", "seq_id": 1, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    with pytest.raises(DataError, match="tensors of the pass have 536870912"):
        wire.pass_of_json(body, forward_only=True)


def test_a_body_that_is_no_message_is_refused():
    with pytest.raises(DataError, match="ForwardBackwardRequest"):
        wire.read_pass(b"\xff\xff\xff")


def test_an_image_is_refused_by_name():
    message = messages()["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().image.format = "png"
    with pytest.raises(DataError, match="kind image"):
        wire.read_pass(message.SerializeToString())


def test_log_probs_of_data_with_other_lengths_and_targets_return_in_their_order():
    arrays = [np.arange(3.0), np.arange(2.0), np.arange(6.0).reshape(3, 2), np.arange(1.0)]
    found, metrics = wire.read_pass_output(wire.pass_output(arrays, {"loss:sum": 2.5}))
    assert metrics == {"loss:sum": 2.5}
    assert [array.tolist() for array in found] == [array.tolist() for array in arrays]
    as_json = json.loads(wire.json_pass_output(wire.pass_output(arrays, {})))
    assert as_json["loss_fn_outputs"][2]["logprobs"]["shape"] == [3, 2]


def test_samples_return_with_the_log_probs_of_the_prompt():
    body = wire.sample_output(
        [Sampled([1, 2], [-0.5, -0.25], True), Sampled([3], [-1.0], False)], prompt_log_probs=np.array([np.nan, -2.0])
    )
    sequences, prompt = wire.read_sample_output(body)
    assert sequences == [Sampled([1, 2], [-0.5, -0.25], True), Sampled([3], [-1.0], False)]
    assert np.isnan(prompt[0]) and prompt[1] == -2.0
    assert json.loads(wire.json_sample_output(body))["prompt_logprobs"] == [None, -2.0]
