"""Every error that this library raises on purpose.

    HybridRLError
    ├── ConfigError              a setting is unknown, mistyped, out of range or contradictory (also a ValueError)
    ├── DataError                a dataset or a batch has the wrong content (also a ValueError)
    ├── CheckpointError          a checkpoint is missing, incomplete or damaged
    │   └── StorageError         storage refuses a checkpoint: it is full, not writable, or too slow
    ├── NonFiniteError           a loss, a gradient or a model is not finite
    ├── JournalError             the journal of a job is damaged
    ├── PlacementError           the cluster cannot hold the requested resources
    ├── StaleWeightsError        a rollout does not have the weights that were pushed
    ├── ParityError              a rollout computes other log-probs than the trainer, with the same weights
    ├── WorkerLost               a worker process was lost: role, rank, method
    │   └── ConnectionLost       it lives, but lost a connection of a collective call
    ├── RequestFailed            a rollout process could not serve one request; others go on
    ├── AgentFailed              the program of an agent failed, did not end, or asked nothing
    ├── ObjectLost               an object was lost with the memory of its node
    ├── CallTimeout              a call did not return before its timeout (also a TimeoutError)
    └── CallCycle                calls wait for each other, so that none of them can return

A user's own exception in a worker keeps its type and gets an address (`role`, `rank`, `method`) as a note.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

MAX_MODEL_REASON = 400  # characters of an error of transformers
STREAM_ERRORS = ("PytorchStreamWriter", "inline_container.cc")  # in what torch.save raises if it cannot write
GGUF_FOLDER = "hybridrl/gguf"  # below HF_HOME: conversions of GGUF files, see config/gguf_models.py


class HybridRLError(Exception):
    """Root of the tree above."""


class ConfigError(HybridRLError, ValueError):
    """A setting cannot be used. The message has the key, the value and the fix."""


class DataError(HybridRLError, ValueError):
    """A dataset or batch cannot be used.

    The message has the file or column and the fix.
    """


class CheckpointError(HybridRLError):
    """A checkpoint cannot be written or read. The message has the path and the part."""


class StorageError(CheckpointError):
    """Storage refused a checkpoint. Earlier checkpoints are unchanged."""


class NonFiniteError(HybridRLError):
    """A loss, a gradient or a model has a NaN or an infinity.

    The message has the role, the step and what to inspect.
    """


class JournalError(HybridRLError):
    """The journal of a job cannot be read. The message has the file and the line."""


class PlacementError(HybridRLError):
    """The cluster cannot hold the job. The message has the missing resources per node."""


class StaleWeightsError(HybridRLError):
    """A rollout lacks the weights that were pushed to it, and refuses to generate."""


class ParityError(HybridRLError):
    """Rollout and trainer give the same tokens different log-probs. The message has the model and what to change."""


class WorkerLost(HybridRLError):
    """A worker process was lost.

    Attributes:
        role, rank, method: The worker and the pending call.
        cause: Why it was lost.
    """

    def __init__(self, role: str, rank: int, method: str, cause: str):
        super().__init__(role, rank, method, cause)
        self.role, self.rank, self.method, self.cause = role, rank, method, cause

    def __str__(self) -> str:
        return f"worker {self.role}-{self.rank} was lost while running {self.method}(): {self.cause}"


class ConnectionLost(WorkerLost):
    """A worker lives, but its connection to another process of a collective call has ended.

    What is connected to it has to be restarted, like the process of a lost worker.
    """

    def __str__(self) -> str:
        return f"worker {self.role}-{self.rank} was cut off while running {self.method}(): {self.cause}"


class RequestFailed(HybridRLError):
    """A rollout process raised an error because of one request. The message has the request and that error."""


class AgentFailed(HybridRLError):
    """The program of an agent failed, did not end, or asked the policy nothing.

    Attributes:
        cause: What happened, in few words: failures are counted by it.
    """

    def __init__(self, text: str, *, cause: str):
        super().__init__(text)
        self.cause = cause


class ObjectLost(HybridRLError):
    """An argument or a result of a call was lost with its node's memory.

    The message has the call.
    """


class CallTimeout(HybridRLError, TimeoutError):
    """A call on a worker group exceeded its timeout.

    The message names the workers that did not answer.

    Attributes:
        role, ranks, method: The workers that did not answer. "" and () if the call was not on workers.
        others: Role -> ranks of other workers that did not answer either, as the senders of a push.
    """

    def __init__(
        self,
        text: str,
        *,
        role: str = "",
        ranks: Sequence[int] = (),
        method: str = "",
        others: Mapping[str, Sequence[int]] | None = None,
    ):
        super().__init__(text)
        self.role, self.ranks, self.method = role, tuple(ranks), method
        self.others: Mapping[str, Sequence[int]] = dict(others or {})


class CallCycle(HybridRLError):
    """Calls wait for each other, so that none of them can return.

    Attributes:
        calls: As `worker.method`. Each waits for the next one, or for the call whose thread that one has.
        awaited: For each of `calls`, the call that it waits for.
    """

    def __init__(self, calls: Sequence[str], awaited: Sequence[str]):
        super().__init__(tuple(calls), tuple(awaited))
        self.calls, self.awaited = tuple(calls), tuple(awaited)

    def __str__(self) -> str:
        waits = (f"{call} waits for {awaited}" for call, awaited in zip(self.calls, self.awaited, strict=True))
        return (
            f"{', and '.join(waits)}: a process has one thread for its calls, and none of these can return. Mark an "
            "awaited method with concurrency=2, define it with `async def`, or let a call return before it waits"
        )


def reason_of(error: BaseException) -> str:
    """Return the text of an error on one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def is_storage_error(error: BaseException) -> bool:
    """Return whether an error says that a file cannot be written.

    `torch.save` raises a RuntimeError with words of its own for that.
    """
    return isinstance(error, OSError) or any(words in str(error) for words in STREAM_ERRORS)


@contextmanager
def model_errors(path: str, what: str) -> Iterator[None]:
    """Raise a ConfigError of one line for whatever transformers raises about the files of a model.

    Its code believes what config.json says, so that a wrong entry may raise an exception of any type.
    """
    try:
        yield
    except HybridRLError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {reason_of(error)}"
        hint = "check its config.json and model.override_config, or copy or download the model again"
        if GGUF_FOLDER in path and not os.path.isdir(path):
            reason = "this machine has no such directory, which another one has made of a GGUF file"
            hint = "let HF_HOME name a directory that all machines share, or run a command with the file here, too"
        raise ConfigError(f"model.path={path!r}: transformers {what}: {reason:.{MAX_MODEL_REASON}}; {hint}") from error
