"""`TrainingService`: the verbs of Tinker's API, without HTTP.

`routes` and the Python client call it, from any thread; what computes runs in the executor's thread. Every verb takes
the tenant that calls, and finds only what is that tenant's. Bodies are those of the API. Errors:

    DataError   the request is wrong                 NotFound    there is no such thing
    Gone        it has ended, or is forgotten        Conflict    a number has another request
    Busy        the tenant has too much in flight

What goes wrong in an operation is in its answer.
"""

import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import CheckpointError, DataError, HybridRLError
from hybridrl.training_service import wire
from hybridrl.training_service.computation.groups import LOST, Computation, try_often
from hybridrl.training_service.computation.snapshot_sampler import BASE
from hybridrl.training_service.computation.weight_files import read_description
from hybridrl.training_service.executor import JobExecutor
from hybridrl.training_service.operations import ModelLane
from hybridrl.training_service.sampling import MAX_SAMPLES, SampleLane, SampleOperation, digest_of, read_sample
from hybridrl.training_service.state.ledger import REPEATED, Conflict, StoredAnswer, failure
from hybridrl.training_service.state.records import ClientSession, Sampler, TrainedModel, write_model_file
from hybridrl.training_service.state.session_table import Gone, SessionTable
from hybridrl.training_service.state.store import NotFound, Store
from hybridrl.training_service.state.tenants import Tenant, Tenants
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores

logger = logging.getLogger(__name__)
MAX_SESSIONS = 256  # of a tenant that have not ended
MAX_MODELS = 256  # of a tenant in open sessions; `max_models` of them are in memory
MAX_SAMPLERS = 4096  # of a session
MAX_SAMPLE_ANSWERS = 16384  # of a sampling session that can be fetched
MAX_NUMBER = 10**9
MAX_DESCRIPTION_BYTES = 1 << 16  # of a session or a model: it stays in memory
MAX_WAITING_BYTES = 256 << 20  # of a tenant's operations that wait


class Busy(HybridRLError):
    """The tenant has as much in flight as it may have. Try again."""


@dataclass(frozen=True)
class ServiceSettings:
    """What the service offers.

    Attributes:
        base_model: Name of the base model, as clients call it.
        path: Its directory.
        max_rank: Highest rank of adapters; 0: all weights are trained.
        max_length: Tokens of a sequence.
        session_timeout_s: A session whose client is silent for so long has ended.
    """

    base_model: str
    path: str
    max_rank: int
    max_length: int
    session_timeout_s: float = 300.0


class TrainingService:
    """See above.

    Args:
        settings: What it offers.
        store: Where sessions and weights are.
        computation: Trains and samples; its model is loaded.
        tenants: Who may call. None: everybody.
    """

    def __init__(
        self, settings: ServiceSettings, store: Store, *, computation: Computation, tenants: Tenants | None = None
    ):
        self.settings, self.store, self.tenants = settings, store, tenants or Tenants()
        self.table = SessionTable(store, base_model=settings.base_model)
        self._computation = computation
        self._executor = JobExecutor()
        self._lock = self._executor.lock
        self._samplers = [
            self._executor if computation.is_shared else JobExecutor(self._lock) for _ in computation.replicas
        ]
        self._lanes: dict[str, ModelLane] = {}  # of models whose sessions are open
        self._sample_lanes: dict[tuple[str, str, int], SampleLane] = {}  # by tenant, version and replica
        self._last_replica = -1

    def start(self) -> None:
        """Go on with what an earlier server has left, and begin to compute."""
        for session, model in self.table.read(self.tenants):
            self._add_lane(session, model)
            try:
                if (state := model.ledger.recover()) is not None:
                    model.adapter = read_description(state).adapter
            except (OSError, ValueError, KeyError, CheckpointError) as error:
                self._lanes[model.id].give_up(error)
            waiting = sum(1 for _ in model.ledger.waiting())
            logger.info("model %s goes on after operation %d; %d run again", model.id, model.ledger.done, waiting)
        for session in self.table.ended():
            _delete_files(session)
        for executor in self._executors():
            executor.start()

    def _executors(self) -> list[JobExecutor]:
        return list(dict.fromkeys([self._executor, *self._samplers]))

    def stop(self) -> None:
        """Stop computing. What has not run will, when a server is started with the same store."""
        for executor in self._executors():
            executor.stop()

    def _restart_trainers(self, error: Exception) -> None:
        """Start the trainers again. Models go on from their last states with their next operations."""
        logger.warning("%s; the trainers start again, and models go on from their last states", error)
        with self._lock:
            for lane in self._lanes.values():
                lane.is_loaded = False
        try_often(self._computation.restart_trainers)

    # -- sessions

    def create_session(self, tenant: Tenant, body: Mapping[str, Any]) -> str:
        """Return the id of a new session."""
        _description(body)
        with self._lock:
            if sum(not one.ended for one in self.table.of(tenant)) >= MAX_SESSIONS:
                raise Busy(f"{MAX_SESSIONS} sessions of this key are open; finish some")
            session_id = secrets.token_hex(8)
            session = ClientSession(session_id, tenant, self.store.session(session_id), body.get("user_metadata"))
            session.name = body.get("display_name")
            self.table.add(session)
            return session_id

    def heartbeat(self, tenant: Tenant, session_id: str) -> None:
        """Keep a session open. Raises Gone once it has ended."""
        with self._lock:
            self.table.find_open(tenant, session_id)

    def finish(self, tenant: Tenant, session_id: str, reason: str) -> None:
        """End a session. The first reason stays."""
        with self._lock:
            self._end(self.table.find(tenant, session_id), reason)

    def end_silent(self) -> None:
        """End sessions whose clients have been silent for too long, and delete expired weights."""
        with self._lock:
            self.store.remove_expired()
            limit = time.monotonic() - self.settings.session_timeout_s
            for session in [one for one in self.table.open() if one.last_seen < limit]:
                self._end(session, f"its client was silent for {self.settings.session_timeout_s:g} s")

    def _end(self, session: ClientSession, reason: str) -> None:
        if session.ended:
            return
        logger.info("session %s has ended: %s. Its models and snapshots are dropped", session.id, reason)
        session.ended = reason
        self._executor.add(f"end of {session.id}", _Once(session.tenant.name, lambda: self._clear(session)))
        session.write()

    def _clear(self, session: ClientSession) -> None:
        """Free what a session that has ended holds. Runs in the executor's thread, between operations."""
        with self._lock:
            self._executor.remove(f"end of {session.id}")
            for model in session.models.values():
                self._executor.remove(model.id)
                self._lanes.pop(model.id, None)
                model.end(f"session {session.id} has ended: {session.ended}")
        _delete_files(session)  # first: a lane that samples them reads them again and fails
        for model in session.models.values():
            self._computation.drop(model.id)
        for sampler in session.samplers.values():
            if sampler.version.startswith(str(session.directory)):
                self._computation.retire(sampler.version)

    # -- models

    def create_model(self, tenant: Tenant, kind: str, body: Mapping[str, Any]) -> str:
        """Make a model (`create_model`, or `load_weights` of a path), and return the id of the request."""
        described = _description({**body, "session_id": None})
        with self._lock:
            session = self.table.find_open(tenant, body.get("session_id"))
            number = _number(body, "model_seq_id")
            model = session.models.get(number) or self._new_model(session, number, body)
            model.ledger.accept(0, kind, described)
            self._executor.notify()
            return f"{model.id}:0"

    def _new_model(self, session: ClientSession, number: int, body: Mapping[str, Any]) -> TrainedModel:
        stored = {"metadata": body.get("user_metadata"), "refused": self._refusal(session.tenant, body)}
        write_model_file(session.model_directory(number), stored)
        model = self.table.add_model(session, number, stored)
        self._add_lane(session, model)
        return model

    def _refusal(self, tenant: Tenant, body: Mapping[str, Any]) -> str | None:
        """Return why a model is not made, or None."""
        if body.get("base_model") not in (None, self.settings.base_model):
            return f"base_model={body['base_model']!r}: this server has {self.settings.base_model!r}"
        num_models = sum(len(one.models) for one in self.table.of(tenant) if not one.ended)
        if num_models >= (limit := MAX_MODELS if tenant.max_models else 0):
            return f"{num_models} models are open, of {limit} for this key; finish their sessions"
        return None

    def _add_lane(self, session: ClientSession, model: TrainedModel) -> None:
        lane = ModelLane(
            model,
            session,
            store=self.store,
            computation=self._computation,
            lock=self._lock,
            is_full=self.settings.max_rank == 0,
            peers=self._lanes,
            on_loss=self._restart_trainers,
        )
        self._lanes[model.id] = lane
        self._executor.add(model.id, lane)

    def submit(self, tenant: Tenant, kind: str, model_id: Any, *, seq_id: Any, body: bytes, num_tokens: int = 0) -> str:
        """Take an operation of a model, and return the id of the request.

        A repeated one gets the same id.

        Raises:
            Conflict: The number has another request.
            Busy: The tenant has too much in flight.
        """
        with self._lock:
            model = self.table.model(tenant, model_id)
            self.table.find_open(tenant, model.session_id)
            if type(seq_id) is not int or seq_id < 1:
                raise DataError(f"seq_id={seq_id!r}: the operations of a model are numbered from 1")
            is_next = seq_id == model.ledger.done + 1  # others wait for it
            if model.ledger.find(seq_id) is None and not is_next:
                self._require_room(tenant, num_tokens, num_bytes=len(body))
            model.last_request = time.time()
            model.ledger.accept(seq_id, kind, body, num_tokens=num_tokens)
            if model.broken:
                model.end(model.broken)
            self._executor.notify()
            return f"{model.id}:{seq_id}"

    def _require_room(self, tenant: Tenant, num_tokens: int, *, num_bytes: int = 0) -> None:
        lanes = [lane for (owner, *_), lane in self._sample_lanes.items() if owner == tenant.name]
        models = [model for one in self.table.of(tenant) if not one.ended for model in one.models.values()]
        waiting = [operation for model in models for operation in model.ledger.waiting()]
        if num_bytes and sum(len(operation.body) for operation in waiting) + num_bytes > MAX_WAITING_BYTES:
            raise Busy(f"the requests that wait have {MAX_WAITING_BYTES >> 20} MB; try again")
        in_flight = sum(operation.num_tokens for operation in waiting)
        in_flight += sum(operation.num_tokens for lane in lanes for operation in lane.waiting)
        if num_tokens and in_flight and in_flight + num_tokens > tenant.max_tokens_in_flight:
            raise Busy(f"{in_flight} tokens are in flight, of {tenant.max_tokens_in_flight} for this key; try again")

    def submit_json(self, tenant: Tenant, kind: str, body: Mapping[str, Any]) -> str:
        """Take an operation with a JSON body."""
        known = {name: value for name, value in body.items() if name not in ("model_id", "seq_id")}
        return self.submit(tenant, kind, body.get("model_id"), seq_id=body.get("seq_id"), body=_canonical(known))

    def submit_pass(self, tenant: Tenant, body: bytes) -> str:
        """Take a forward or forward_backward with a protobuf body."""
        header, body = wire.read_header(body), wire.canonical(body)
        kind = "forward" if header.forward_only else REPEATED
        return self.submit(tenant, kind, header.model_id, seq_id=header.seq_id, body=body, num_tokens=header.num_tokens)

    # -- sampling

    def create_sampling_session(self, tenant: Tenant, body: Mapping[str, Any]) -> str:
        """Return the id of a sampling session for the base model, or for weights at a path."""
        with self._lock:
            session = self.table.find_open(tenant, body.get("session_id"))
            version, path = BASE, body.get("model_path")
            if path is not None:
                version = str(self.store.find(path, owner=tenant.name)[0])
            elif body.get("base_model") != self.settings.base_model:
                raise NotFound(f"base_model={body.get('base_model')!r}: this server has {self.settings.base_model!r}")
            return self._sampler(session, _number(body, "sampling_session_seq_id"), version, path).id

    def _sampler(self, session: ClientSession, number: int, version: str, path: str | None) -> Sampler:
        if (known := session.samplers.get(number)) is not None:
            if (known.version, known.model_path) != (version, path):
                raise Conflict(f"sampling_session_seq_id={number} has other weights already; use a new number")
            return known
        if len(session.samplers) >= MAX_SAMPLERS:
            raise Busy(f"the session has {MAX_SAMPLERS} sampling sessions; begin a new session")
        sampler = self.table.add_sampler(session, number, {"version": version, "model_path": path})
        session.write()
        return sampler

    def sample(self, tenant: Tenant, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Take a request for samples; return its id and those of the sequences."""
        digest, seq_id = digest_of(body), _number(body, "seq_id", limit=2**62)
        with self._lock:
            sampler = self.table.sampler(tenant, body.get("sampling_session_id"))
            self.table.find_open(tenant, sampler.session_id)
            request_id = f"{sampler.id}:{seq_id}"
            known = sampler.answers.get(seq_id)
            if known is not None and known[0] != digest:
                raise Conflict(f"seq_id={seq_id} of {sampler.id} has another request already")
            if known is None:
                sampler.answers[seq_id] = (digest, self._start_sampling(sampler, body, request_id))
                if len(sampler.answers) > MAX_SAMPLE_ANSWERS:
                    del sampler.answers[next(iter(sampler.answers))]
            num = body.get("num_samples", 1)
            num = min(num, MAX_SAMPLES) if type(num) is int else 0
            return request_id, [f"{request_id}:{number}" for number in range(num)]

    def _start_sampling(self, sampler: Sampler, body: Mapping[str, Any], request_id: str) -> "Future[StoredAnswer]":
        limits = {"vocabulary": self._computation.vocabulary, "max_length": self.settings.max_length}
        try:
            operation = read_sample(body, request_id, **limits)
        except (HybridRLError, KeyError, TypeError, ValueError) as error:
            future: Future[StoredAnswer] = Future()
            future.set_result(failure(error if isinstance(error, HybridRLError) else DataError(f"asample: {error!r}")))
            return future
        self._require_room(sampler.tenant, operation.num_tokens)
        self._add_to_lane(sampler, operation)
        return operation.answer

    def _add_to_lane(self, sampler: Sampler, operation: SampleOperation) -> None:
        version = sampler.version
        if sampler.inflight_of is not None:
            version = self.table.model(sampler.tenant, sampler.inflight_of).inflight or version
        tenant, number = sampler.tenant.name, self._least_busy()
        key, executor = (tenant, version, number), self._samplers[number]
        if key not in self._sample_lanes:
            name = f"samples of {key}"

            def remove() -> None:
                executor.remove(name)
                del self._sample_lanes[key]

            replica = self._computation.replicas[number]
            self._sample_lanes[key] = SampleLane(tenant, version, replica=replica, lock=self._lock, on_idle=remove)
            executor.add(name, self._sample_lanes[key])
        self._ask_trainers(operation, version, tenant, executor)
        self._sample_lanes[key].add(operation)
        executor.notify()

    def _ask_trainers(self, operation: SampleOperation, version: str, tenant: str, executor: JobExecutor) -> None:
        """Let trainers that have the version's weights now compute log-probs of a prompt."""
        wanted = operation.about_prompt
        if wanted is None or len(wanted.tokens) < 2 or self._trained_as(version) is None:
            return
        future: Future[TokenScores | None] = Future()
        operation.by_trainers = future
        future.add_done_callback(lambda _: executor.notify())
        name = f"scores of {operation.requests[0].request_id}"

        def score() -> None:
            self._executor.remove(name)
            future.set_result(self._trainers_scores(version, wanted))

        self._executor.add(name, _Once(tenant, score))

    def _trained_as(self, version: str) -> str | None:
        """Return the trainers' model that has a version's weights. Called with the lock held."""
        lanes = (lane for lane in self._lanes.values() if lane.is_loaded and lane.model.published == version)
        return next((lane.model.id for lane in lanes), None)

    def _trainers_scores(self, version: str, wanted: ScoreRequest) -> TokenScores | None:
        with self._lock:
            model = self._trained_as(version)
        try:
            return None if model is None else self._computation.scores(model, wanted)
        except LOST as error:
            self._restart_trainers(error)
        except Exception:
            logger.exception("the trainers could not compute the log-probs of a prompt; a replica does")
        return None

    def _least_busy(self) -> int:
        """Return the replica with the fewest open operations; of several, the next in turn."""
        busy = [0] * len(self._samplers)
        for (_, _, number), lane in self._sample_lanes.items():
            busy[number] += len(lane.waiting)
        num, last = len(busy), self._last_replica
        self._last_replica = min(range(num), key=lambda number: (busy[number], (number - last - 1) % num))
        return self._last_replica

    # -- answers

    def answer(self, tenant: Tenant, request_id: Any) -> "Future[StoredAnswer]":
        """Return the answer of a request, which may come later.

        Raises:
            NotFound: There was no such request, or it is another tenant's.
            Gone: It is forgotten: the server was started again, or many others have run since.
        """
        owner, _, number = str(request_id).rpartition(":")
        if not number.isdecimal():
            raise NotFound(f"there is no request {request_id!r}")
        with self._lock:
            if ":sample:" in owner:
                found = self.table.sampler(tenant, owner).answers.get(int(number))
                if found is None:
                    raise Gone(f"the samples of {request_id} are not kept; send the request again")
                return found[1]
            model = self.table.model(tenant, owner)
            if (operation := model.ledger.find(int(number))) is None:
                if int(number) <= model.ledger.done:
                    raise Gone(f"the answer of {request_id} is not kept any more")
                raise NotFound(f"there is no request {request_id!r}")
            return operation.answer


@dataclass
class _Once:
    """A lane with one job, which removes the lane."""

    tenant: str
    job: Callable[[], None]

    def next_job(self) -> Callable[[], None] | None:
        return self.job


def _delete_files(session: ClientSession) -> None:
    """Delete what a session that has ended leaves in the store."""
    for model in session.models.values():
        for name in ("operations", "state"):
            shutil.rmtree(model.ledger.directory / name, ignore_errors=True)
    shutil.rmtree(session.directory / "samplers", ignore_errors=True)


def _number(body: Mapping[str, Any], name: str, *, limit: int = MAX_NUMBER) -> int:
    number = body.get(name)
    if type(number) is not int or not 0 <= number < limit:
        raise DataError(f"{name}={number!r}: must be a whole number from 0")
    return number


def _description(body: Mapping[str, Any]) -> bytes:
    """Return what a client says of a session or a model.

    Raises DataError if it is too large to be kept.
    """
    if len(described := _canonical(body)) > MAX_DESCRIPTION_BYTES:
        raise DataError(f"the body has {len(described)} bytes, of {MAX_DESCRIPTION_BYTES}; send less user_metadata")
    return described


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
