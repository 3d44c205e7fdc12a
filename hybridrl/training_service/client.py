"""The service's verbs from Python, without HTTP: for notebooks, tests and programs of one process.

    with training_client("a/model") as client:
        model = client.create_model(rank=8, seed=1)
        model.forward_backward([datum(tokens, targets, weights=weights)], "cross_entropy")
        model.optim_step(learning_rate=1e-4)
        samples = model.sampler().sample(prompt, num_samples=4, max_tokens=16)

Calls return when the operation has run. With `wait=False` they return a `PendingResult` at once. The operations of a
model run in the order of the calls.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from hybridrl.errors import HybridRLError
from hybridrl.training_service import wire
from hybridrl.training_service.program import ServiceOptions, open_service
from hybridrl.training_service.service import TrainingService
from hybridrl.training_service.state.ledger import StoredAnswer
from hybridrl.training_service.state.tenants import EVERYBODY, Tenant
from hybridrl.training_service.wire import Datum, Pass, Sampled

TIMEOUT_S = 3600.0  # for an operation and those before it

T = TypeVar("T")


class OperationFailed(HybridRLError):
    """An operation of the training service failed. `category`: "user" or "server"."""

    def __init__(self, text: str, category: str):
        super().__init__(text)
        self.category = category


class PendingResult(Generic[T]):
    """The result of an operation that may still run."""

    def __init__(self, future: "Future[StoredAnswer]", read: Callable[[bytes], T]):
        self._future, self._read = future, read

    def result(self, timeout_s: float = TIMEOUT_S) -> T:
        """Return the result. Raises OperationFailed, and TimeoutError."""
        answer = self._future.result(timeout_s)
        if answer.content_type != wire.PROTOBUF:
            body = json.loads(answer.body)
            if "error" in body:
                raise OperationFailed(body["error"], body["category"])
        return self._read(answer.body)


@dataclass(frozen=True)
class PassResult:
    """Log-probs of each datum's targets before the update, and metrics; "loss:sum" is the loss."""

    log_probs: list[np.ndarray]
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        return self.metrics["loss:sum"]


@dataclass(frozen=True)
class Samples:
    """Sampled sequences, and the log-probs of the prompt's tokens if they were asked for, NaN for the first."""

    sequences: list[Sampled]
    prompt_log_probs: np.ndarray | None


def datum(tokens: Sequence[int], target_tokens: Any, **inputs: Any) -> Datum:
    """Return one sequence to train on.

    Args:
        tokens: N of them, the model's input.
        target_tokens: (N,) or (N,K): what position i is to predict.
        **inputs: What the loss reads, in the same shape: `weights`, `logprobs`, `advantages`.
    """
    named = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return Datum(np.asarray(tokens, np.int64), {"target_tokens": np.asarray(target_tokens, np.int64), **named})


class ServiceClient:
    """A session with a service of this process, see `training_client`."""

    def __init__(self, service: TrainingService, tenant: Tenant = EVERYBODY):
        self.service, self.tenant = service, tenant
        self.session_id = service.create_session(tenant, {})
        self._numbers = itertools.count()
        self._sampler_numbers = itertools.count()

    def create_model(self, *, rank: int = 32, seed: int | None = None, **trains: bool) -> "ModelClient":
        """Return a new model. `trains`: `train_attn`, `train_mlp` and `train_unembed`, true if not given."""
        body = {"base_model": self.service.settings.base_model, "lora_config": {"rank": rank, "seed": seed, **trains}}
        return self._model("create_model", body)

    def load(self, path: str, *, optimizer: bool = True) -> "ModelClient":
        """Return a model that goes on from saved weights."""
        return self._model("load_weights", {"path": path, "optimizer": optimizer})

    def _model(self, kind: str, body: Mapping[str, Any]) -> "ModelClient":
        named = {**body, "session_id": self.session_id, "model_seq_id": next(self._numbers)}
        request_id = self.service.create_model(self.tenant, kind, named)
        self.pending(request_id, json.loads).result()
        return ModelClient(self, request_id.rpartition(":")[0])

    def sampler(self, path: str | None = None) -> "SamplerClient":
        """Return what samples saved weights, or the base model."""
        weights = {"base_model": self.service.settings.base_model} if path is None else {"model_path": path}
        body = {**weights, "session_id": self.session_id, "sampling_session_seq_id": self.next_sampler()}
        return SamplerClient(self, self.service.create_sampling_session(self.tenant, body))

    def next_sampler(self) -> int:
        """Return the number of the next sampling session."""
        return next(self._sampler_numbers)

    def pending(self, request_id: str, read: Callable[[bytes], T]) -> PendingResult[T]:
        """Return the result of a request."""
        return PendingResult(self.service.answer(self.tenant, request_id), read)

    def finish(self) -> None:
        """End the session; its models are dropped, and what was saved stays."""
        self.service.finish(self.tenant, self.session_id, "success")


class ModelClient:
    """A model that is trained."""

    def __init__(self, client: ServiceClient, model_id: str):
        self._client, self.id = client, model_id
        self._numbers = itertools.count(1)

    def forward(
        self, data: Sequence[Datum], loss_fn: str = "cross_entropy", *, wait: bool = True, **config: float
    ) -> Any:
        """Return the `PassResult` of data without adding gradients."""
        return self._pass(data, loss_fn, config, forward_only=True, wait=wait)

    def forward_backward(self, data: Sequence[Datum], loss_fn: str, *, wait: bool = True, **config: float) -> Any:
        """Add the gradients of a loss, and return the `PassResult`."""
        return self._pass(data, loss_fn, config, forward_only=False, wait=wait)

    def _pass(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float], *, forward_only: bool, wait: bool
    ) -> Any:
        body = wire.pass_message(Pass(self.id, next(self._numbers), data, loss_fn, config, forward_only))
        request_id = self._client.service.submit_pass(self._client.tenant, body)
        pending = self._client.pending(request_id, lambda answer: PassResult(*wire.read_pass_output(answer)))
        return pending.result() if wait else pending

    def optim_step(self, *, wait: bool = True, **adam_params: float) -> Any:
        """Update the model and clear the gradients; return metrics. `adam_params` as in Tinker's API."""
        return self._submit("optim_step", {"adam_params": adam_params}, wait=wait)

    def save(self, name: str, **options: Any) -> str:
        """Save weights and optimizer under a name, and return their path. `options`: `ttl_seconds`, `overwrite`."""
        return self._submit("save_weights", {"path": name, **options})["path"]

    def save_for_sampler(self, name: str, **options: Any) -> str:
        """Save weights under a name, and return their path."""
        return self._submit("save_weights_for_sampler", {"path": name, **options})["path"]

    def export(self, name: str, **options: Any) -> str:
        """Save the adapters in peft's format under a name, and return their path."""
        return self._submit("save_weights_external", {"path": name, **options})["path"]

    def sampler(self, kind: str = "snapshot") -> "SamplerClient":
        """Return what samples the weights of now; with "inflight", the weights of the last such call."""
        body = {"sampling_session_seq_id": self._client.next_sampler(), "kind": kind}
        return SamplerClient(self._client, self._submit("save_weights_for_sampler", body)["sampling_session_id"])

    def _submit(self, kind: str, body: Mapping[str, Any], *, wait: bool = True) -> Any:
        named = {**body, "model_id": self.id, "seq_id": next(self._numbers)}
        request_id = self._client.service.submit_json(self._client.tenant, kind, named)
        pending = self._client.pending(request_id, json.loads)
        return pending.result() if wait else pending


class SamplerClient:
    """Weights that are sampled."""

    def __init__(self, client: ServiceClient, sampler_id: str):
        self._client, self.id = client, sampler_id
        self._numbers = itertools.count()

    def sample(
        self,
        prompt: Sequence[int],
        *,
        num_samples: int = 1,
        prompt_logprobs: bool = False,
        wait: bool = True,
        **sampling_params: Any,
    ) -> Any:
        """Return `Samples` of a prompt. `sampling_params` as in Tinker's API: `max_tokens`, `temperature` ..."""
        body = {
            "sampling_session_id": self.id,
            "seq_id": next(self._numbers),
            "num_samples": num_samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [int(token) for token in prompt]}]},
            "prompt_logprobs": prompt_logprobs,
            "sampling_params": sampling_params,
        }
        request_id, _ = self._client.service.sample(self._client.tenant, body)
        pending = self._client.pending(request_id, lambda answer: Samples(*wire.read_sample_output(answer)))
        return pending.result() if wait else pending

    def log_probs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probs of tokens, NaN for the first."""
        return self.sample(tokens, prompt_logprobs=True, max_tokens=1).prompt_log_probs


@contextlib.contextmanager
def training_client(model: str, **options: Any) -> Iterator[ServiceClient]:
    """Run a training service in this process during a block, and return a session with it.

    Args:
        model: Directory of the base model.
        **options: Others of `ServiceOptions`: `store`, `max_rank`, `max_length`, `device` ...
    """
    with open_service(ServiceOptions(model, **options)) as service:
        client = ServiceClient(service)
        try:
            yield client
        finally:
            client.finish()
