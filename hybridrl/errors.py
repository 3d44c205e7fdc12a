"""Every error this library raises on purpose.

    HybridRLError
    ├── ConfigError              a setting is unknown, of the wrong type, out of range, or contradicts another (also a
    ValueError)
    ├── DataError                a dataset or a batch is not what its reader needs (also a ValueError)
    ├── CheckpointError          a checkpoint is missing, incomplete or damaged
    │   └── StorageError         storage does not take a checkpoint: it is full, not writable, or too slow
    ├── NonFiniteError           a loss, a gradient or a model is not finite
    ├── JournalError             the journal of a job is damaged
    ├── PlacementError           the cluster cannot hold what was asked for
    ├── StaleWeightsError        a rollout's weights are not the ones that were pushed
    ├── WorkerLost               a worker process is gone: role, rank, method
    ├── ObjectLost               what a node held in its memory is gone with it
    └── CallTimeout              a call did not answer before its deadline (also a TimeoutError)

A user's own exception in a worker keeps its type; it gains an address (`role`, `rank`, `method`) as a note.
"""

from collections.abc import Sequence


class HybridRLError(Exception):
    """Root of the tree above."""


class ConfigError(HybridRLError, ValueError):
    """A setting cannot be used; the message names the key, the value and the way out."""


class DataError(HybridRLError, ValueError):
    """A dataset or batch cannot be used; the message names the file or column and the way out."""


class CheckpointError(HybridRLError):
    """A checkpoint cannot be written or read; the message names the path and the part."""


class StorageError(CheckpointError):
    """A checkpoint cannot be written to where it belongs, now; what was committed before is as it was."""


class NonFiniteError(HybridRLError):
    """A loss, a gradient or a model has a NaN or an infinity; the message says whose, in which step, and what to look
    at.
    """


class JournalError(HybridRLError):
    """The journal of a job cannot be read; the message names the file and the line."""


class PlacementError(HybridRLError):
    """The cluster cannot hold the job; the message says what is missing where."""


class StaleWeightsError(HybridRLError):
    """A rollout does not hold the weights that were pushed to it, and refuses to generate."""


class WorkerLost(HybridRLError):
    """A worker process died. `role`, `rank`, `method` say where, `cause` says why."""

    def __init__(self, role: str, rank: int, method: str, cause: str):
        super().__init__(role, rank, method, cause)
        self.role, self.rank, self.method, self.cause = role, rank, method, cause

    def __str__(self) -> str:
        return f"worker {self.role}-{self.rank} was lost while running {self.method}(): {self.cause}"


class ObjectLost(HybridRLError):
    """An argument or an answer of a call lay in the memory of a node that is gone; the message names the call."""


class CallTimeout(HybridRLError, TimeoutError):
    """A call on a worker group ran past its deadline; the message names who was waited for.

    role, ranks, method: of workers that did not answer; "" and () where it was no call of a worker.
    """

    def __init__(self, text: str, *, role: str = "", ranks: Sequence[int] = (), method: str = ""):
        super().__init__(text)
        self.role, self.ranks, self.method = role, tuple(ranks), method
