"""`ModelLane`: run the operations of one model in the order of their numbers.

The executor runs its jobs in its own thread. An operation fails with an answer of its own, and the next one runs.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError, DataError
from hybridrl.trainer.run.tracking import METRICS_FILE
from hybridrl.training_service import wire
from hybridrl.training_service.computation.adapter_slots import TrainedLayers
from hybridrl.training_service.computation.groups import LOST, MAX_LOSSES, Computation
from hybridrl.training_service.state.ledger import OF_USER, REPEATED, Operation, StoredAnswer, failure, has_failed
from hybridrl.training_service.state.records import ClientSession, Sampler, TrainedModel
from hybridrl.training_service.state.store import SCHEME, Entry, Store, entry_text, expiry, read_entry
from hybridrl.workers.engine.base import StepOptions

logger = logging.getLogger(__name__)
MAX_UNSAVED_BYTES = 2 << 30  # of what a tenant's models keep to run it again, requests and answers
CREATING = ("create_model", "load_weights")
COMPUTING = ("forward", REPEATED, "optim_step")
OPTIONS = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
BELOW_ONE = 1 - 1e-9
RANGES = {  # eps is above 0: unused parts of adapters have neither gradients nor moments, and 0 / 0 is no number
    "learning_rate": (0.0, 1e3),
    "beta1": (0.0, BELOW_ONE),
    "beta2": (0.0, BELOW_ONE),
    "eps": (1e-30, 1.0),
    "weight_decay": (0.0, 1e3),
    "grad_clip_norm": (0.0, 1e9),
}


class ModelLane:
    """The operations of one model.

    A tenant has at most `max_models` models in memory. Another one takes the place of the longest unused, which goes on
    from its last state with its next operation.

    Args:
        model: The model.
        session: Its session, which gets the sampling sessions that the model makes.
        store: Where named weights are.
        computation: Trains.
        lock: The executor's.
        is_full: Whether the server trains all weights.
        peers: The lanes of all models.
        on_loss: Called with the error when trainers were lost; starts them again, without models.

    Attributes:
        is_loaded: Whether the trainers have the model, if it was created.
    """

    def __init__(
        self,
        model: TrainedModel,
        session: ClientSession,
        *,
        store: Store,
        computation: Computation,
        lock: Any,
        is_full: bool,
        peers: Mapping[str, "ModelLane"],
        on_loss: Callable[[Exception], None],
    ):
        self.model, self._session, self._store, self._computation = model, session, store, computation
        self._lock, self._is_full, self._peers, self._on_loss = lock, is_full, peers, on_loss
        self.tenant, self.is_loaded = model.tenant.name, False

    def next_job(self) -> Callable[[], None] | None:
        if self.model.broken or self.model.ledger.next() is None:
            return None
        return self._run if self.is_loaded or self._room() is not None else None

    def _room(self) -> list["ModelLane"] | None:
        """Return the lanes whose models leave the memory for this one; None if it waits.

        Called with the lock held.
        """
        others = [
            one for one in self._peers.values() if one.tenant == self.tenant and one.is_loaded and one.model.adapter
        ]
        num_leaving = max(0, len(others) + 1 - max(1, self.model.tenant.max_models))
        can_leave = sorted((one for one in others if one.can_leave), key=lambda one: one.model.last_request)
        return can_leave[:num_leaving] if len(can_leave) >= num_leaving else None

    @property
    def can_leave(self) -> bool:
        """Whether the model has nothing to run, or nothing that would run twice.

        So all models go on in turns.
        """
        ledger = self.model.ledger
        return self.model.broken is not None or ledger.next() is None or ledger.done == ledger.saved

    def _run(self) -> None:
        """Run the next operation and store its answer. If it cannot be stored, the model runs nothing more.

        A model that is not loaded goes on from its last state, and the operations since then run again. One that has
        lost trainers `MAX_LOSSES` times fails.
        """
        operation = None
        try:
            with self._lock:
                state = None if self.is_loaded else self.model.ledger.rewind()
                operation = self.model.ledger.next()
            if not self.is_loaded:
                self._load_state(state)
            if operation is not None:
                self._finish(operation, self._answer(operation))
        except LOST as error:
            if operation is not None:
                operation.losses += 1
                if operation.losses >= MAX_LOSSES and not operation.answer.done():
                    operation.answer.set_result(failure(error))
            self._on_loss(error)
        except Exception as error:
            self.give_up(error)

    def _load_state(self, state: Path | None) -> None:
        """Let the trainers have the model's last state. None: it was not created."""
        with self._lock:
            leaving = self._room() or []
        for lane in leaving:
            self._computation.drop(lane.model.id)
            lane.is_loaded = False
        self.model.losses = []
        if state is not None:
            self.model.adapter = self._computation.load(self.model.id, state, with_optimizer=True)
        self.is_loaded = True

    def _finish(self, operation: Operation, answer: StoredAnswer) -> None:
        has_state = not has_failed(answer) and operation.kind in (*CREATING, "optim_step")
        if has_state:
            state = self.model.ledger.state(operation.seq_id)
            self._computation.save(self.model.id, state, note=answer.packed(operation.digest).decode())
        with self._lock:
            self.model.ledger.finish(operation, answer, has_state=has_state)

    def _answer(self, operation: Operation) -> StoredAnswer:
        """Run an operation.

        One that was answered runs again for its gradients only: the store has what others made.
        """
        if operation.answer.done():
            earlier = operation.answer.result(timeout=0)
            if operation.kind != REPEATED or has_failed(earlier):
                return earlier
        try:
            if operation.kind == REPEATED and not operation.answer.done():
                self._require_step(operation)
            body = self._result(operation)
            return body if isinstance(body, StoredAnswer) else StoredAnswer(json.dumps(body).encode())
        except LOST:
            raise
        except Exception as error:
            if operation.kind in COMPUTING and not isinstance(error, OF_USER):
                self._go_on_from_state(error)
            return failure(error)

    def _go_on_from_state(self, error: Exception) -> None:
        """Let the next operation begin at the last state.

        A pass that failed half-way has left gradients of some rows, and a step may have changed some weights.
        """
        if self._computation.num_trainers > 1:  # the others may be in a collective that one has left
            self._on_loss(error)
        self.is_loaded = False

    def _require_step(self, operation: Operation) -> None:
        """Raise DataError if the key's models keep too much for a repetition."""
        with self._lock:
            ledgers = [one.model.ledger for one in self._peers.values() if one.tenant == self.tenant]
            num_bytes = sum(ledger.num_unsaved_bytes() for ledger in ledgers) + len(operation.body)
        if num_bytes > MAX_UNSAVED_BYTES:
            raise DataError(
                f"the passes of this key since the last optim_step of their models have {num_bytes >> 20} MB, of "
                f"{MAX_UNSAVED_BYTES >> 20}; call optim_step, or finish sessions"
            )

    def give_up(self, error: Exception) -> None:
        """Run nothing more: the state cannot be stored or read."""
        logger.error("model %s runs nothing more: its state cannot be stored or read", self.model.id, exc_info=error)
        with self._lock:
            self.model.broken = (
                f"the server could not store or read the model's state ({error}); load its last checkpoint"
            )
            self.model.end(self.model.broken)

    def _result(self, operation: Operation) -> StoredAnswer | Mapping[str, Any]:
        if self.model.adapter is None and operation.kind not in CREATING:
            raise DataError(f"{self.model.id} was not created; the answer of its creation has the reason")
        if operation.kind in ("forward", REPEATED):
            return self._pass(operation)
        run = {
            "create_model": self._create,
            "load_weights": self._load,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._export,
        }[operation.kind]
        return run(json.loads(operation.body), operation)

    # -- one function per kind

    def _create(self, body: Mapping[str, Any], _: Operation) -> Mapping[str, Any]:
        if self.model.refused:
            raise ConfigError(self.model.refused)
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise ConfigError(f"optimizer_config.type={kind!r} is not supported; use adamw")
        adapter = read_adapter_config(body.get("lora_config"), is_full=self._is_full)
        self._computation.create(self.model.id, adapter)
        self.model.adapter = adapter
        return {"model_id": self.model.id, "type": "create_model"}

    def _load(self, body: Mapping[str, Any], operation: Operation) -> Mapping[str, Any]:
        if operation.seq_id > 1:
            raise DataError(f"LoadWeights is not permitted with seq_id {operation.seq_id}: it is a model's first")
        if self.model.refused:
            raise ConfigError(self.model.refused)
        place, _ = self._store.find(body["path"], owner=self.tenant)
        with_optimizer = bool(body.get("optimizer"))
        self.model.adapter = self._computation.load(self.model.id, place, with_optimizer=with_optimizer)
        return {"path": body["path"], "model_id": self.model.id, "type": "load_weights"}

    def _pass(self, operation: Operation) -> StoredAnswer:
        request = wire.read_pass(operation.body)
        log_probs, metrics = self._computation.run_pass(self.model.id, request)
        if not request.forward_only:
            self.model.losses.append(metrics["loss:sum"])
        return StoredAnswer(wire.pass_output(log_probs, metrics), wire.PROTOBUF)

    def _step(self, body: Mapping[str, Any], _: Operation) -> Mapping[str, Any]:
        options = read_step_options(body.get("adam_params") or body.get("optimizer_params") or {})
        self.model.published = None
        metrics = self._computation.optimizer_step(self.model.id, options)
        self._log_step(metrics, options.lr)
        return {"metrics": metrics, "type": "optim_step"}

    def _log_step(self, metrics: Mapping[str, float], lr: float) -> None:
        """Append a step to the curves of `hybridrl view`; a repeated step is there twice."""
        model, now = self.model, time.time()
        with self._lock:
            num_waiting = sum(1 for _ in model.ledger.waiting())
        row = {
            "step": int(metrics["num_updates:max"]),
            "train/loss_sum": sum(model.losses),
            "train/passes": len(model.losses),
            "train/grad_norm": metrics["grad_norm:mean"],
            "train/lr": lr,
            "service/waiting_operations": num_waiting,
            "service/step_s": now - model.last_step_at,
        }
        model.losses, model.last_step_at = [], now
        directory = self._store.curves(model.id)
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _save(self, body: Mapping[str, Any], operation: Operation) -> Mapping[str, Any]:
        place, note = self._named(body, operation, "weights")
        self._computation.save(self.model.id, place, note=note)
        return {"path": self._path(place), "type": "save_weights"}

    def _save_for_sampler(self, body: Mapping[str, Any], operation: Operation) -> Mapping[str, Any]:
        kind = "save_weights_for_sampler"
        if body.get("path") is not None:
            place, note = self._named(body, operation, "sampler_weights")
            self._publish(place, note)
            return {"path": self._path(place), "type": kind}
        number = body.get("sampling_session_seq_id")
        if type(number) is not int or number < 0:
            raise DataError(f"sampling_session_seq_id={number!r}: {kind} needs it, or a name as path")
        version = self._session.directory / "samplers" / str(number)
        self._publish(version, None)
        with self._lock:
            sampler = self._new_sampler(number, str(version), is_inflight=body.get("kind") == "inflight")
        return {"sampling_session_id": sampler.id, "type": kind}

    def _publish(self, version: Path, note: str | None) -> None:
        self._computation.publish(self.model.id, version, note=note)
        self.model.published = str(version)

    def _new_sampler(self, number: int, version: str, *, is_inflight: bool) -> Sampler:
        model, session = self.model, self._session
        sampler = Sampler(f"{session.id}:sample:{number}", session.id, model.tenant, model.base_model, version)
        if is_inflight:
            model.inflight, sampler.inflight_of = version, model.id
        session.samplers[number] = sampler
        session.write()
        return sampler

    def _export(self, body: Mapping[str, Any], operation: Operation) -> Mapping[str, Any]:
        place, note = self._named(body, operation, "external_weights")
        self._computation.export(self.model.id, place, note=note)
        size = sum(file.stat().st_size for file in place.iterdir())
        return {"path": self._path(place), "size_bytes": size, "type": "save_weights_external"}

    def _named(self, body: Mapping[str, Any], operation: Operation, kind: str) -> tuple[Path, str]:
        """Return the directory of new named weights, and their entry.

        Raises:
            DataError: The name is taken, or the tenant's storage is full.
        """
        model, adapter = self.model, self.model.adapter
        assert adapter is not None, "operations run after the model was created"
        place = self._store.place(model.id, kind, body.get("path"))
        request = f"{model.id}:{operation.seq_id}"
        existing = read_entry(place)
        if existing is not None and existing.request != request and not body.get("overwrite"):
            raise DataError(f"{self._path(place)} exists; use another name, or overwrite=true")
        used = self._store.used_bytes(owner=self.tenant) >> 20
        if used >= model.tenant.max_storage_mb:
            raise DataError(f"{used} MB are stored, of {model.tenant.max_storage_mb} for this key; delete checkpoints")
        parts = {name: value for name, value in asdict(adapter).items() if name.startswith("train_")}
        entry = Entry(
            owner=self.tenant,
            request=request,
            time=time.time(),
            base_model=model.base_model,
            rank=adapter.rank,
            expires_at=expiry(body.get("ttl_seconds")),
            metadata=body.get("user_metadata"),
            train=parts,
        )
        return place, entry_text(entry)

    def _path(self, place: Path) -> str:
        return f"{SCHEME}{self.model.id}/{place.parent.name}/{place.name}"


def read_adapter_config(given: Any, *, is_full: bool) -> TrainedLayers:
    """Return what a model is to train. Raises ConfigError."""
    if not isinstance(given, Mapping) or type(given.get("rank")) is not int:
        raise ConfigError(f"lora_config={given!r}: must have a rank; {'0 trains all weights' if is_full else 'use 32'}")
    parts = {f"train_{part}": bool(given.get(f"train_{part}", True)) for part in ("attn", "mlp", "unembed")}
    seed = given.get("seed")
    if seed is not None and type(seed) is not int:
        raise ConfigError(f"lora_config.seed={seed!r}: must be a whole number")
    return TrainedLayers(given["rank"], seed=(seed or 0) % 2**62, **parts)


def read_step_options(given: Mapping[str, Any]) -> StepOptions:
    """Return the options of an optimizer step. Raises DataError out of range."""
    if unknown := given.keys() - OPTIONS.keys() - {"type"}:
        raise DataError(f"adam_params has {', '.join(sorted(unknown))}; AdamW has {', '.join(OPTIONS)}")
    values = OPTIONS | {name: value for name, value in given.items() if name in OPTIONS}
    for name, value in values.items():
        low, high = RANGES[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise DataError(f"adam_params.{name}={value!r}: must be a number from {low:g} to {high:g}")
    return StepOptions(
        lr=float(values["learning_rate"]),
        betas=(float(values["beta1"]), float(values["beta2"])),
        eps=float(values["eps"]),
        weight_decay=float(values["weight_decay"]),
        grad_clip=float(values["grad_clip_norm"]),
    )
