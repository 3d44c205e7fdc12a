"""The messages of Tinker's API, as SDK 0.38 sends and reads them.

Routes, service and the Python client call it. Bodies of SDKs before 0.25, which are JSON, are read as well. The schema
is in `messages`.

Shapes: N tokens of a datum, K targets of a position.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridrl.errors import DataError
from hybridrl.training_service.messages import BFLOAT16, FLOAT32, INT32, INT64, LENGTH, PACKAGE, STOPPED, messages

PROTOBUF = "application/x-protobuf"
NO_TOKEN, NO_LOG_PROB = 0, -99999.0  # an empty cell of a top-k table
MAX_VALUES = 1 << 26  # of all tensors of a pass: a sparse one, and rows that are filled up, take more than was sent

NUMPY_TYPES: dict[int, Any] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32, BFLOAT16: np.uint16}
JSON_TYPES: dict[str, Any] = {"float32": np.float32, "int64": np.int64}


@dataclass(frozen=True)
class Datum:
    """One sequence to train on.

    Attributes:
        tokens: (N,) int64, the model's input.
        inputs: What the loss reads, by name; every array starts with a dimension of N.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Pass:
    """A `forward` or `forward_backward` of a model."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


# -- requests


def read_message(name: str, body: bytes) -> Any:
    """Return the message in a body. Raises DataError if it is none."""
    message = messages()[name]()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's own class depends on its implementation
        raise DataError(f"the body is no {PACKAGE}.{name} ({error}); send what SDK 0.38 sends") from error
    return message


@dataclass(frozen=True)
class Header:
    """Which model and operation a pass is, and how many tokens it has."""

    model_id: str
    seq_id: int
    num_tokens: int
    forward_only: bool


def read_header(body: bytes) -> Header:
    """Return the header of a `ForwardBackwardRequest`. Raises DataError if the body is none."""
    message = read_message("ForwardBackwardRequest", body)
    num_bytes = sum(len(chunk.encoded_text.tokens) for datum in message.data for chunk in datum.model_input)
    return Header(message.model_id, message.seq_id, num_bytes // 4, message.forward_only)


def canonical(body: bytes) -> bytes:
    """Return a `ForwardBackwardRequest` with its maps in order: equal requests have equal bytes."""
    return read_message("ForwardBackwardRequest", body).SerializeToString(deterministic=True)


def read_pass(body: bytes) -> Pass:
    """Return the `ForwardBackwardRequest` in a body.

    Raises:
        DataError: It is malformed, or has a part that the server does not compute.
    """
    message = read_message("ForwardBackwardRequest", body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    _check_sizes(tensor.shape for one in message.data for tensor in one.loss_fn_inputs.values())
    data = [_datum(one, number) for number, one in enumerate(message.data)]
    return Pass(message.model_id, message.seq_id, data, message.loss_fn, config, message.forward_only)


def _check_sizes(shapes: Iterable[Sequence[int]]) -> None:
    """Raise DataError if tensors of these shapes have more than `MAX_VALUES` values."""
    if (size := sum(abs(math.prod(shape)) for shape in shapes)) > MAX_VALUES:
        raise DataError(f"the tensors of the pass have {size} values, of {MAX_VALUES}; send the data in several passes")


def _datum(message: Any, number: int) -> Datum:
    chunks = []
    for chunk in message.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise DataError(f"data[{number}].model_input has a chunk of kind {kind}; this server reads tokens only")
        chunks.append(_array(chunk.encoded_text.tokens, np.int32, f"data[{number}].model_input"))
    tokens = np.concatenate(chunks).astype(np.int64) if chunks else np.zeros(0, np.int64)
    inputs = {
        name: _tensor(value, f"data[{number}].loss_fn_inputs[{name!r}]")
        for name, value in message.loss_fn_inputs.items()
    }
    return Datum(tokens, inputs)


def _array(data: bytes, dtype: Any, what: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise DataError(f"{what} has {len(data)} bytes, which are no whole number of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype)


def _tensor(message: Any, what: str) -> np.ndarray:
    """Return a dense array of int64 or float32."""
    dtype = NUMPY_TYPES.get(message.dtype)
    if dtype is None:
        raise DataError(f"{what} has the dtype {message.dtype}; use float32 or int64")
    if message.WhichOneof("encoding") == "sparse_csr":
        sparse = message.sparse_csr
        parts = (sparse.crow_indices, np.int64), (sparse.col_indices, np.int64), (sparse.values, dtype)
        values = from_csr(*(_array(data, kind, what) for data, kind in parts), shape=list(message.shape), what=what)
    else:
        values = _shaped(_array(message.dense, dtype, what), list(message.shape), what)
    if message.dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)


def _shaped(values: np.ndarray, shape: list[int], what: str) -> np.ndarray:
    if shape and int(np.prod(shape)) != values.size:
        raise DataError(f"{what} has {values.size} values, and its shape {shape} needs {int(np.prod(shape))}")
    return values.reshape(shape) if shape else values


def from_csr(crow: np.ndarray, col: np.ndarray, values: np.ndarray, *, shape: list[int], what: str) -> np.ndarray:
    """Return a matrix in compressed rows as a dense one. Raises DataError if its parts do not fit."""
    counts = np.diff(crow)
    fits = len(shape) == 2 and 0 < len(crow) == shape[0] + 1 and crow[0] == 0 and crow[-1] == len(col) == len(values)
    if not fits or (counts < 0).any() or (len(col) and not 0 <= col.min() <= col.max() < shape[1]):
        raise DataError(f"{what} is no matrix of shape {shape} in compressed rows")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), col] = values
    return dense


def pass_message(request: Pass) -> bytes:
    """Return the body of a pass."""
    message = messages()["ForwardBackwardRequest"](
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=request.loss_fn, forward_only=request.forward_only
    )
    for name, value in request.config.items():
        chosen = {"text": value} if isinstance(value, str) else {"number": value}
        message.loss_fn_config_v2[name].CopyFrom(messages()["LossConfigValue"](**chosen))
    for datum in request.data:
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = datum.tokens.astype(np.int32).tobytes()
        for name, array in datum.inputs.items():
            is_float = array.dtype.kind == "f"
            tensor = added.loss_fn_inputs[name]
            tensor.dtype = FLOAT32 if is_float else INT64
            tensor.dense = array.astype(np.float32 if is_float else np.int64).tobytes()
            tensor.shape.extend(array.shape)
    return message.SerializeToString(deterministic=True)


def pass_of_json(body: Mapping[str, Any], *, forward_only: bool) -> bytes:
    """Return the body of a pass sent as JSON, in the newer form.

    SDKs before 0.25 send it so.
    """
    given = body["forward_input" if forward_only else "forward_backward_input"]
    _check_sizes(one.get("shape") or () for datum in given["data"] for one in datum["loss_fn_inputs"].values())
    data = []
    for number, datum in enumerate(given["data"]):
        tokens = prompt_tokens(datum["model_input"])
        named = datum["loss_fn_inputs"].items()
        inputs = {name: _json_tensor(value, f"data[{number}].loss_fn_inputs[{name!r}]") for name, value in named}
        data.append(Datum(np.array(tokens, np.int32), inputs))
    config = given.get("loss_fn_config") or {}
    return pass_message(Pass(body["model_id"], body["seq_id"], data, given["loss_fn"], config, forward_only))


def _json_tensor(value: Mapping[str, Any], what: str) -> np.ndarray:
    dtype = JSON_TYPES.get(value.get("dtype", ""))
    if dtype is None:
        raise DataError(f"{what} has the dtype {value.get('dtype')!r}; use float32 or int64")
    values = np.array(value["data"], dtype)
    shape = list(value.get("shape") or [])
    if value.get("sparse_crow_indices") is not None:
        crow, col = (np.array(value[f"sparse_{part}_indices"], np.int64) for part in ("crow", "col"))
        return from_csr(crow, col, values, shape=shape, what=what)
    return _shaped(values, shape, what)


def json_tensor(value: Mapping[str, Any], what: str) -> np.ndarray:
    """Return the array of a tensor in JSON. Raises DataError if it is none."""
    try:
        return _json_tensor(value, what)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{what} is no tensor: {error}") from error


def prompt_tokens(model_input: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a model's input in JSON. Raises DataError for other kinds of chunks."""
    tokens: list[int] = []
    for chunk in model_input["chunks"]:
        if "tokens" not in chunk:
            raise DataError(f"a chunk is of kind {chunk.get('type')}; this server reads tokens only")
        tokens += [int(token) for token in chunk["tokens"]]
    return tokens


# -- responses


def pass_output(log_probs: Iterable[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the `ForwardBackwardOutput` of a pass.

    Args:
        log_probs: (N,) or (N,K) float32 of each datum. Neighbours with the same K share a record.
        metrics: Each name has its reduction over chunks behind a colon, which the SDK requires.
    """
    message = messages()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    groups: list[tuple[tuple[int, ...], list[np.ndarray]]] = []
    for array in log_probs:
        if not groups or groups[-1][0] != array.shape[1:]:
            groups.append((array.shape[1:], []))
        groups[-1][1].append(array.astype(np.float32))
    for trailing, arrays in groups:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(array.tobytes() for array in arrays)
        tensor.offsets = np.cumsum([0] + [array.nbytes for array in arrays], dtype=np.int64).tobytes()
        tensor.dtype = FLOAT32
        tensor.trailing_shape.extend(trailing)
    for name, value in metrics.items():
        message.metrics[name] = value
    return message.SerializeToString(deterministic=True)


def read_pass_output(body: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """Return the log-probs of each datum, and the metrics, of a `ForwardBackwardOutput`."""
    message, found = read_message("ForwardBackwardOutput", body), []
    for record in message.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        offsets, values = np.frombuffer(tensor.offsets, np.int64) // 4, np.frombuffer(tensor.data, np.float32)
        trailing = list(tensor.trailing_shape)
        found += [
            values[start:end].reshape([-1, *trailing]) for start, end in zip(offsets[:-1], offsets[1:], strict=True)
        ]
    return found, dict(message.metrics)


def json_pass_output(body: bytes) -> bytes:
    """Return a `ForwardBackwardOutput` as SDKs before 0.25 read it."""
    arrays, metrics = read_pass_output(body)
    outputs = [
        {"logprobs": {"data": array.ravel().tolist(), "dtype": "float32", "shape": [*array.shape]}} for array in arrays
    ]
    answer = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}
    return json.dumps(answer).encode()


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence. `top`: (token ids, log-probs), each (tokens, k)."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    stopped: bool
    top: tuple[np.ndarray, np.ndarray] | None = None


def sample_output(
    sequences: Iterable[Sampled],
    *,
    prompt_log_probs: np.ndarray | None = None,
    prompt_top: tuple[np.ndarray, np.ndarray] | None = None,
    prompt_targets: np.ndarray | None = None,
) -> bytes:
    """Return the `SampleResponse`. `prompt_log_probs`: (N,), NaN where there is none."""
    message = messages()["SampleResponse"]()
    for sequence in sequences:
        added = message.sequences.add(
            stop_reason=STOPPED if sequence.stopped else LENGTH,
            tokens=np.array(sequence.tokens, np.int32).tobytes(),
            logprobs=np.array(sequence.log_probs, np.float32).tobytes(),
        )
        if sequence.top is not None:
            _set_top(added.topk_sampled_logprobs, sequence.top)
    if prompt_log_probs is not None:
        message.prompt_logprobs = prompt_log_probs.astype(np.float32).tobytes()
    if prompt_top is not None:
        _set_top(message.topk_prompt_logprobs, prompt_top)
    if prompt_targets is not None:
        tensor = message.target_prompt_logprobs
        tensor.dtype, tensor.dense = FLOAT32, prompt_targets.astype(np.float32).tobytes()
        tensor.shape.extend(prompt_targets.shape)
    return message.SerializeToString(deterministic=True)


def _set_top(table: Any, top: tuple[np.ndarray, np.ndarray]) -> None:
    ids, log_probs = top
    table.token_ids, table.logprobs = ids.astype(np.int32).tobytes(), log_probs.astype(np.float32).tobytes()
    table.length, table.k = ids.shape


def read_sample_output(body: bytes) -> tuple[list[Sampled], np.ndarray | None]:
    """Return the sequences, and the log-probs of the prompt if there are any, of a `SampleResponse`."""
    message = read_message("SampleResponse", body)
    sequences = [
        Sampled(
            np.frombuffer(one.tokens, np.int32).tolist(),
            np.frombuffer(one.logprobs, np.float32).tolist(),
            one.stop_reason == STOPPED,
        )
        for one in message.sequences
    ]
    log_probs = message.prompt_logprobs
    return sequences, np.frombuffer(log_probs, np.float32).copy() if log_probs else None


def json_sample_output(body: bytes) -> bytes:
    """Return a `SampleResponse` as SDKs before 0.25 read it, without top-k tables."""
    sequences, log_probs = read_sample_output(body)
    answer: dict[str, Any] = {"type": "sample", "prompt_logprobs": None}
    answer["sequences"] = [
        {"stop_reason": "stop" if one.stopped else "length", "tokens": one.tokens, "logprobs": one.log_probs}
        for one in sequences
    ]
    if log_probs is not None:
        answer["prompt_logprobs"] = [None if np.isnan(value) else float(value) for value in log_probs]
    return json.dumps(answer).encode()
