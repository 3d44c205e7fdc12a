"""The operations of one model: their order, and that each runs once.

What was stored survives a killed server.

    operations/N.request    kind and body, written before the client gets an answer
    operations/N.result     the answer, written after the operation has run
    state/N/                weights and Adam's state after operation N, an `optim_step` or the model's creation

After a kill the newest state is loaded, and the operations behind it run again: `forward_backward` adds the same
gradients and gives the same answer. A state appears by a rename that has the answer of its operation, so no update is
lost or made twice. The service calls it with its lock held. Nothing here computes.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.errors import CheckpointError, ConfigError, DataError, HybridRLError, NonFiniteError, StorageError

logger = logging.getLogger(__name__)
RESULTS_KEPT = 1024  # operations of a model whose answers can still be fetched
REQUEST, RESULT, NOTE = ".request", ".result", "note"
REPEATED = "forward_backward"  # the kind of operation that runs again, for its gradients
OF_USER = (DataError, ConfigError, NonFiniteError, CheckpointError)
OPERATION_BYTES = 4096  # of one without a body
MAX_AHEAD = 10_000  # operations that may wait for an earlier one


class Conflict(HybridRLError):
    """An operation cannot be taken as sent: its number is taken by another one, or out of reach."""


@dataclass(frozen=True)
class StoredAnswer:
    """What a client gets for an operation: a body and its type, and the digest of the request."""

    body: bytes
    content_type: str = "application/json"

    def packed(self, digest: str) -> bytes:
        """Return the answer as it is stored."""
        head = json.dumps({"type": self.content_type, "digest": digest}).encode()
        return head + b"\n" + self.body


def failure(error: Exception) -> StoredAnswer:
    """Return the answer of an operation that raised an error.

    One that is not the client's mistake is logged.

    Its status is 200: the SDK would repeat a request for an answer with status 5xx for ever.
    """
    is_users = isinstance(error, OF_USER) and not isinstance(error, StorageError)
    text = str(error) if is_users else f"{type(error).__name__}: {error}"
    if not is_users:
        logger.error("an operation failed; its client gets the error", exc_info=error)
    return StoredAnswer(json.dumps({"error": text, "category": "user" if is_users else "server"}).encode())


def unpacked(stored: bytes) -> tuple[StoredAnswer, str]:
    """Return a stored answer and the digest of its request."""
    head, _, body = stored.partition(b"\n")
    described = json.loads(head)
    return StoredAnswer(body, described["type"]), described["digest"]


def has_failed(answer: StoredAnswer) -> bool:
    """Return whether an answer is of an operation that failed."""
    return answer.body.startswith(b'{"error"')


@dataclass
class Operation:
    """A request with its number, and the answer that its client waits for."""

    seq_id: int
    kind: str
    body: bytes
    digest: str
    answer: "Future[StoredAnswer]" = field(default_factory=Future)
    num_tokens: int = 0
    losses: int = 0  # of processes that ran it


def _put(path: Path, content: bytes) -> None:
    """Write a file that appears complete, also if this process is killed.

    It is not forced to the disk, which takes 10 ms: after a loss of power the model goes on from its last state.
    """
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(content)
    os.replace(partial, path)


class Ledger:
    """The operations of one model.

    Args:
        directory: Of the model; it exists.

    Attributes:
        done: Number of the last operation that has run; all before it have run, too.
        saved: Number of the last operation whose state is stored; -1: none.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._operations, self._states = directory / "operations", directory / "state"
        self._known: dict[int, Operation] = {}
        self.done = self.saved = -1
        for folder in (self._operations, self._states):
            folder.mkdir(exist_ok=True)

    def accept(self, seq_id: int, kind: str, body: bytes, *, num_tokens: int = 0) -> Operation:
        """Store an operation and return it; one that is known is returned as it is.

        Raises:
            Conflict: The number has another operation, was answered too long ago, or is far ahead.
        """
        digest = hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        if (known := self._known.get(seq_id)) is not None:
            if known.digest != digest:
                raise Conflict(f"seq_id={seq_id} has another request already; a new request needs a new number")
            return known
        if not self.done < seq_id <= self.done + MAX_AHEAD:
            raise Conflict(
                f"seq_id={seq_id}: operation {self.done} has run; send a number above it, at most {MAX_AHEAD} ahead"
            )
        operation = Operation(seq_id, kind, body, digest, num_tokens=num_tokens)
        _put(self._path(seq_id, REQUEST), json.dumps({"kind": kind, "digest": digest}).encode() + b"\n" + body)
        self._known[seq_id] = operation
        return operation

    def next(self) -> Operation | None:
        """Return the operation that runs next, or None if it has not arrived."""
        return self._known.get(self.done + 1)

    def waiting(self) -> Iterator[Operation]:
        """Yield the operations that have not run, by number."""
        return (self._known[seq_id] for seq_id in sorted(self._known) if seq_id > self.done)

    def num_unsaved_bytes(self) -> int:
        """Return the bytes of what has run since the stored state.

        It is kept, because it runs again after a loss.
        """
        unsaved = [one for seq_id, one in self._known.items() if self.saved < seq_id <= self.done]
        return sum(len(one.body) + len(one.answer.result(timeout=0).body) + OPERATION_BYTES for one in unsaved)

    def drop_bodies(self) -> None:
        """Free the requests of a model that runs nothing more."""
        for operation in self._known.values():
            operation.body = b""

    def find(self, seq_id: int) -> Operation | None:
        """Return an operation whose answer is awaited or can still be fetched."""
        return self._known.get(seq_id)

    def state(self, seq_id: int) -> Path:
        """Return the directory of the state after an operation."""
        return self._states / f"{seq_id:08d}"

    def finish(self, operation: Operation, answer: StoredAnswer, *, has_state: bool) -> None:
        """Store the answer of the next operation and give it to the client.

        Args:
            operation: The one that has run.
            answer: Of it.
            has_state: Its state is on the disk, with the answer as `note`. Requests before it are not needed again.
        """
        if not has_state:
            _put(self._path(operation.seq_id, RESULT), answer.packed(operation.digest))
        self.done = operation.seq_id
        if has_state:
            self.saved = operation.seq_id
            self._forget_before(operation.seq_id)
        if has_state or has_failed(answer) or operation.kind != REPEATED:
            operation.body = b""
            self._path(operation.seq_id, REQUEST).unlink(missing_ok=True)
        if not operation.answer.done():
            operation.answer.set_result(answer)

    def _forget_before(self, seq_id: int) -> None:
        """Delete states and requests that the state of an operation makes unnecessary, and old answers."""
        for state in self._states.iterdir():
            if state != self.state(seq_id):
                self._keep_answer(state)
                shutil.rmtree(state, ignore_errors=True)
        for path in self._operations.glob("[0-9]*"):
            number = int(path.stem)
            if number <= seq_id and (path.suffix == REQUEST or number <= seq_id - RESULTS_KEPT):
                path.unlink(missing_ok=True)
        for number in [number for number in self._known if number <= seq_id - RESULTS_KEPT]:
            del self._known[number]
        for number, known in self._known.items():
            known.body = known.body if number > seq_id else b""

    def _keep_answer(self, state: Path) -> None:
        """Move the answer of an `optim_step` from its state to the other answers."""
        if not state.name.startswith(".") and (note := state / NOTE).exists():
            _put(self._path(int(state.name), RESULT), note.read_bytes())

    def recover(self) -> Path | None:
        """Read what is on the disk; return the newest state, or None if the model was never created.

        Operations behind the state are to run again. Answers that were stored stay as they are.
        """
        newest = self._newest()
        self.done = self.saved = -1 if newest is None else int(newest.name)
        for path in sorted(self._operations.glob(f"[0-9]*{RESULT}")):
            try:
                self._recover_answer(int(path.stem), path.read_bytes())
            except ValueError as error:  # cut by a loss of power: the operation runs again, or was before the state
                if int(path.stem) > self.done and not self._path(int(path.stem), REQUEST).exists():
                    raise CheckpointError(f"{path}: the answer was cut by a loss of power") from error
        if newest is not None:
            self._recover_answer(self.done, (newest / NOTE).read_bytes())
        for path in sorted(self._operations.glob(f"[0-9]*{REQUEST}")):
            if (number := int(path.stem)) > self.done:
                answered = self._known.get(number)
                try:
                    self._known[number] = self._recovered(number, path.read_bytes())
                except ValueError as error:
                    raise CheckpointError(f"{path}: the request was cut by a loss of power") from error
                if answered is not None:
                    self._known[number].answer = answered.answer
        return newest

    def rewind(self) -> Path | None:
        """Return the newest state, or None if there is none. The operations behind it run again."""
        newest = self._newest()
        self.done = self.saved = -1 if newest is None else int(newest.name)
        last = self._known.get(self.done)
        if newest is not None and last is not None and not last.answer.done():  # the state was stored, and no more
            last.answer.set_result(unpacked((newest / NOTE).read_bytes())[0])
            self._forget_before(self.done)
        return newest

    def _newest(self) -> Path | None:
        states = sorted(path for path in self._states.iterdir() if not path.name.startswith("."))
        return states[-1] if states else None

    def _recover_answer(self, seq_id: int, stored: bytes) -> None:
        answer, digest = unpacked(stored)
        operation = Operation(seq_id, "", b"", digest)
        operation.answer.set_result(answer)
        self._known[seq_id] = operation

    def _recovered(self, seq_id: int, stored: bytes) -> Operation:
        """Return an operation that runs again; its client gets the first of two equal answers."""
        head, _, body = stored.partition(b"\n")
        described = json.loads(head)
        return Operation(seq_id, described["kind"], body, described["digest"])

    def _path(self, seq_id: int, suffix: str) -> Path:
        return self._operations / f"{seq_id:08d}{suffix}"
