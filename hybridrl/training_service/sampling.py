"""Sampling requests: parsing them, and the lane that generates for all requests of one version of the weights.

The service makes the requests; the executor runs the lane's jobs.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridrl.errors import DataError
from hybridrl.training_service import wire
from hybridrl.training_service.computation.groups import LOST, MAX_LOSSES, Replica
from hybridrl.training_service.computation.losses import check_tokens
from hybridrl.training_service.state.ledger import StoredAnswer, failure
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores

logger = logging.getLogger(__name__)

SLICE_S = 0.2  # of generation before other lanes get their turn
MAX_SAMPLES, MAX_TOP = 1024, 100
MIN_TEMPERATURE = 0.01  # below, logits divided by it are infinite; 0 is greedy
NOT_SUPPORTED = {
    "record_stability_info": "it serves stable_reinforce, whose formula is not public",
    "prompt_alt_tokens_k": "draws at prompt positions are not computed here; use topk_prompt_logprobs",
}


@dataclass
class SampleOperation:
    """A request for samples of one prompt, and what has been generated for it.

    by_trainers: the scores of the prompt, which trainers compute; None if they have other weights by then.
    """

    prompt: list[int]
    requests: list[Request]
    sampling: SamplingParams
    with_prompt: bool
    num_prompt_top: int
    num_sample_top: int
    last_n: int | None
    targets: np.ndarray | None
    answer: "Future[StoredAnswer]" = field(default_factory=Future)
    by_trainers: "Future[TokenScores | None] | None" = None
    outputs: dict[str, TokenOutput] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.outputs) == len(self.requests)

    @property
    def is_ready(self) -> bool:
        """Whether its answer can be made."""
        return self.is_complete and (self.by_trainers is None or self.by_trainers.done())

    @property
    def about_prompt(self) -> ScoreRequest | None:
        """What is asked about the prompt, at temperature 1; None: nothing."""
        if not (self.with_prompt or self.num_prompt_top or self.targets is not None):
            return None
        return ScoreRequest(tuple(self.prompt), num_top=self.num_prompt_top, targets=self.targets)

    @property
    def num_tokens(self) -> int:
        """Most tokens that it computes: the prompt, and every sample to its limit."""
        return len(self.prompt) + len(self.requests) * self.sampling.max_new_tokens


def digest_of(body: Mapping[str, Any]) -> str:
    """Return a digest by which a repeated request is recognized."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_sample(body: Mapping[str, Any], request_id: str, *, vocabulary: int, max_length: int) -> SampleOperation:
    """Return the operation that a body asks for.

    Raises:
        DataError: It asks for what this server does not compute, or a value is out of range.
    """
    for name, reason in NOT_SUPPORTED.items():
        if body.get(name):
            raise DataError(f"{name}={body[name]!r} is not supported: {reason}")
    prompt = wire.prompt_tokens(body["prompt"])
    check_tokens(np.array(prompt, np.int64), "prompt", vocabulary)
    num = _whole(body, "num_samples", 1, 1, MAX_SAMPLES)
    params = sampling_params(body.get("sampling_params") or {}, len(prompt), max_length=max_length)
    seed = _seed(body, request_id)
    last_n = body.get("prompt_logprobs_last_n")
    return SampleOperation(
        prompt=prompt,
        requests=[Request(f"{request_id}/{n}", tuple(prompt), params, seed=seed, sample=n) for n in range(num)],
        sampling=params,
        with_prompt=bool(body.get("prompt_logprobs")),
        num_prompt_top=_whole(body, "topk_prompt_logprobs", 0, 0, MAX_TOP),
        num_sample_top=_whole(body, "topk_sample_logprobs", 0, 0, MAX_TOP),
        last_n=None if last_n is None else _whole(body, "prompt_logprobs_last_n", 1, 1, max(1, len(prompt) - 1)),
        targets=_targets(body.get("target_prompt_logprobs"), len(prompt), vocabulary),
    )


def sampling_params(given: Mapping[str, Any], num_prompt: int, *, max_length: int) -> SamplingParams:
    """Return how to sample.

    `stop`: null is the end of sequence; strings end a response as well; token ids alone do, without the end of
    sequence; an empty list is no end but `max_tokens`.

    Raises:
        DataError: A value is out of range, or the prompt leaves no room.
    """
    left = max_length - num_prompt
    if not 0 < num_prompt < max_length:
        raise DataError(f"the prompt has {num_prompt} tokens; send 1 to {max_length - 1}: --max-length is {max_length}")
    max_tokens = left if given.get("max_tokens") is None else _whole(given, "max_tokens", 1, 1, left)
    temperature = given.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or (temperature != 0 and temperature < MIN_TEMPERATURE):
        raise DataError(f"temperature={temperature!r}: must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    try:
        return SamplingParams(
            max_new_tokens=max_tokens,
            temperature=float(temperature) or 1.0,
            do_sample=temperature != 0,
            top_k=int(given.get("top_k", -1)) or -1,
            top_p=float(given.get("top_p", 1.0)),
            **_stops(given.get("stop")),
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"sampling_params: {error}") from error


def _stops(stop: Any) -> dict[str, Any]:
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return {}
    if not isinstance(stops, list) or not (
        all(isinstance(one, str) and one for one in stops) or all(type(one) is int and one >= 0 for one in stops)
    ):
        raise DataError(f"stop={stop!r}: must be null, a text, or a list of texts or of token ids")
    if stops and isinstance(stops[0], str):
        return {"stop": tuple(stops)}
    return {"stop_token_ids": tuple(stops), "ignore_eos": True}


def _whole(given: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise DataError(f"{name}={value!r}: must be a whole number from {low} to {high}")
    return value


def _seed(body: Mapping[str, Any], request_id: str) -> int:
    """Return the request's seed; without one, a number that belongs to its id."""
    seed = (body.get("sampling_params") or {}).get("seed")
    if seed is None:
        return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:7])
    if type(seed) is not int:
        raise DataError(f"seed={seed!r}: must be a whole number")
    return seed % 2**63


def _targets(given: Any, num_prompt: int, vocabulary: int) -> np.ndarray | None:
    if given is None:
        return None
    if isinstance(given, dict) and given.get("sparse_crow_indices") is not None:
        raise DataError("target_prompt_logprobs is sparse; send a dense one")
    targets = wire.json_tensor(given, "target_prompt_logprobs")
    if targets.ndim != 2 or len(targets) != num_prompt - 1:
        raise DataError(
            f"target_prompt_logprobs has the shape {list(targets.shape)}; send a dense one of [{num_prompt - 1}, K]"
        )
    check_tokens(np.maximum(targets, 0), "target_prompt_logprobs", vocabulary)
    return targets


class SampleLane:
    """The open requests of one version at one replica.

    Args:
        tenant: Whose they are.
        version: Directory of the weights, or "base".
        replica: Generates, and computes log-probs of given tokens where the trainers do not.
        lock: The executor's.
        on_idle: Called with the lock held when nothing is open any more.
    """

    def __init__(self, tenant: str, version: str, *, replica: Replica, lock: Any, on_idle: Callable[[], None]):
        self.tenant, self.version, self._replica, self._lock = tenant, version, replica, lock
        self._on_idle = on_idle
        self._new: list[SampleOperation] = []
        self._open: dict[int, SampleOperation] = {}  # by id
        self._sent_to, self._num_losses = replica.starts, 0

    def add(self, operation: SampleOperation) -> None:
        """Take an operation. Called with the lock held."""
        self._new.append(operation)

    def next_job(self) -> Callable[[], None] | None:
        can_go_on = any(not one.is_complete or one.is_ready for one in self._open.values())
        return self._serve if self._new or can_go_on else None

    @property
    def waiting(self) -> list[SampleOperation]:
        """The operations that wait or run."""
        return [*self._new, *self._open.values()]

    def _serve(self) -> None:
        with self._lock:
            operations, self._new = self._new, []
        self._open |= {id(operation): operation for operation in operations}
        try:
            self._generate(operations)
        except LOST as error:
            self._num_losses += 1
            if self._num_losses >= MAX_LOSSES:
                self._fail_all(error)
            logger.warning("a replica was lost (%s); it starts again, and its samples are drawn again", error)
            self._replica.restart()
        except Exception as error:
            self._fail_all(error)
        with self._lock:
            if not self._new and not self._open:
                self._on_idle()

    def _generate(self, operations: list[SampleOperation]) -> None:
        """Generate for one time slice, and answer what is complete."""
        if self._sent_to != self._replica.starts:
            operations, self._sent_to = list(self._open.values()), self._replica.starts
            for operation in operations:
                operation.outputs.clear()  # so that what is generated together is the same, to the last bit
        requests = [request for one in operations for request in one.requests if request.request_id not in one.outputs]
        of_request = {request.request_id: one for one in self._open.values() for request in one.requests}
        for output in self._replica.sample(self.version, requests, SLICE_S):
            of_request[output.request_id].outputs[output.request_id] = output
            self._num_losses = 0
        for operation in [one for one in self._open.values() if one.is_ready]:
            self._complete(operation)
            del self._open[id(operation)]

    def _fail_all(self, error: Exception) -> None:
        failed, self._open = self._open, {}
        for operation in failed.values():
            operation.answer.set_result(failure(error))

    def _complete(self, operation: SampleOperation) -> None:
        try:
            operation.answer.set_result(StoredAnswer(self._response(operation), wire.PROTOBUF))
        except LOST:
            raise
        except Exception as error:
            operation.answer.set_result(failure(error))

    def _response(self, operation: SampleOperation) -> bytes:
        outputs = [operation.outputs[request.request_id] for request in operation.requests]
        if failed := [output.error for output in outputs if output.finish_reason == "error"]:
            raise DataError(failed[0])
        num_top, sampling, num_prompt = operation.num_sample_top, operation.sampling, len(operation.prompt)
        temperature = sampling.temperature if sampling.do_sample else 1.0
        sequences = []
        for output in outputs:
            top = None
            if num_top:
                tokens = (*operation.prompt, *output.token_ids)
                scores = self._replica.scores(self.version, ScoreRequest(tokens, temperature, num_top))
                assert scores.top is not None, "top tokens were asked for"
                top = scores.top[0][num_prompt - 1 :], scores.top[1][num_prompt - 1 :]
            sequences.append(wire.Sampled(output.token_ids, output.log_probs, output.finish_reason == "stop", top))
        return wire.sample_output(sequences, **self._of_prompt(operation))

    def _of_prompt(self, operation: SampleOperation) -> dict[str, Any]:
        """Return what was asked for about the prompt. Its first token has no log-prob."""
        if (wanted := operation.about_prompt) is None:
            return {}
        scores = None if operation.by_trainers is None else operation.by_trainers.result(timeout=0)
        scores = self._replica.scores(self.version, wanted) if scores is None else scores
        log_probs = np.concatenate([[np.nan], scores.log_probs]).astype(np.float32)
        first = 0 if operation.last_n is None else len(log_probs) - operation.last_n
        log_probs[:first] = np.nan
        found: dict[str, Any] = {"prompt_targets": scores.targets}
        if operation.with_prompt:
            found["prompt_log_probs"] = log_probs
        if scores.top is not None:
            found["prompt_top"] = _with_empty_rows(scores.top, max(1, first))
        return found


def _with_empty_rows(top: tuple[np.ndarray, np.ndarray], num_empty: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a top-k table of the whole prompt whose first rows are empty."""
    ids, log_probs = (np.concatenate([np.zeros((1, part.shape[1]), part.dtype), part]) for part in top)
    ids[:num_empty], log_probs[:num_empty] = wire.NO_TOKEN, wire.NO_LOG_PROB
    return ids, log_probs
