"""`Generator`: what the policy generates responses with, and `BatchedGenerator`, which calls the rollout directly.

`PolicyGroups` uses a generator in the driver, the trainer reads its metrics. With rollout.mode=async it is an
`AgentLoopManager`. All work of a generator takes effect in submission order: a response gets the weights of the last
push that was submitted before it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hybridrl.data_plane.chunking import even_bounds
from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.trainer import ppo

Resync = Callable[[Sequence[int]], None]  # sends the current weights to restarted processes of these ranks


class PendingResponses(Protocol):
    """Responses that are being generated. Continued by their own generator only."""

    def get(self) -> DataProto:
        """Wait, and return the batch that `ActorRolloutRefWorker.generate_sequences` describes."""
        ...


class Pending(Protocol):
    """Work that was submitted."""

    def wait(self) -> None:
        """Return when it is done. Raises its error."""
        ...


class Generator(Protocol):
    """Generates the policy's responses on the processes of a rollout.

    `version` is everywhere the weight version that the processes must hold; None: any that was pushed in full.
    """

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last batch, by their names in the log."""
        ...

    @property
    def reads_other_columns(self) -> bool:
        """Whether prompts must have all columns of their rows, and not only the model's input."""
        ...

    def open(self, group: Any, *, resync: Resync | None, concurrent: bool) -> None:
        """Generate on these processes until `close`. Called again after some were replaced.

        Only with `trainer.hybrid_rollout` it also gets `hybrid`, a `HybridRollout`: the rollout in the processes that
        train, which may generate while the driver waits for responses.

        Args:
            group: Worker group of the rollout.
            resync: Sends the current weights to restarted processes; None if they cannot be restarted without the
                others.
            concurrent: Whether the processes generate while the driver trains, and do nothing else.
        """
        ...

    def close(self, *, wait: bool = False) -> None:
        """Stop generating. Safe to call twice, and before `open`.

        Args:
            wait: Return only when no process has a call in flight that `close` ended early.
        """
        ...

    def generate(self, prompts: DataProto, *, version: int | None) -> DataProto:
        """Return whole responses."""
        ...

    def submit(self, prompts: DataProto, *, version: int | None) -> PendingResponses:
        """Start generating whole responses."""
        ...

    def submit_short_round(
        self, prompts: DataProto, num_prompts: int, max_new_tokens: int, *, version: int | None
    ) -> PendingResponses:
        """Start generating until `num_prompts` groups are complete, see `workers/rollout/short_round.py`."""
        ...

    def submit_partial(self, prompts: DataProto, max_new_tokens: int, *, version: int | None) -> PendingResponses:
        """Start generating the first tokens of responses."""
        ...

    def continue_partial(self, partial: Any, max_new_tokens: int, *, version: int | None) -> PendingResponses:
        """Start generating more tokens for open responses.

        Args:
            partial: What this generator returned, or a future of the same batch from a checkpoint.
            max_new_tokens: More tokens per response.
            version: Version of the weights.
        """
        ...

    def push(self, version: int, receive: Callable[[], Pending]) -> Pending:
        """Let the processes receive weights, after everything submitted before.

        Args:
            version: Version of the weights.
            receive: Starts the rollout's half of the push. Called once, at once or when the processes are free.
        """
        ...

    def generate_on(
        self, group: Any, prompts: DataProto, *, version: int | None, resync: Resync | None = None
    ) -> DataProto:
        """Return whole responses from another group's processes, in any thread."""
        ...


class BatchedGenerator:
    """One call to the rollout per batch. The processes keep the order, as they execute calls in submission order."""

    metrics: Mapping[str, float] = {}
    reads_other_columns = False

    def __init__(self) -> None:
        self._group: Any = None

    def open(self, group: Any, *, resync: Resync | None, concurrent: bool) -> None:
        self._group = group

    def close(self, *, wait: bool = False) -> None:
        """Do nothing: calls end with their processes."""

    def generate(self, prompts: DataProto, *, version: int | None) -> DataProto:
        return self._group.generate_sequences(prompts, weights_version=version)

    def submit(self, prompts: DataProto, *, version: int | None) -> PendingResponses:
        return self._group.generate_sequences.submit(prompts, weights_version=version)

    def submit_short_round(
        self, prompts: DataProto, num_prompts: int, max_new_tokens: int, *, version: int | None
    ) -> PendingResponses:
        return ppo.ShortRound(self._group, prompts, num_prompts, max_new_tokens, version=version)

    def submit_partial(self, prompts: DataProto, max_new_tokens: int, *, version: int | None) -> PendingResponses:
        return self._group.begin_sequences.submit(prompts, max_new_tokens, weights_version=version)

    def continue_partial(self, partial: Any, max_new_tokens: int, *, version: int | None) -> PendingResponses:
        return self._group.continue_sequences.submit(partial, max_new_tokens, weights_version=version)

    def push(self, version: int, receive: Callable[[], Pending]) -> Pending:
        return receive()

    def generate_on(
        self, group: Any, prompts: DataProto, *, version: int | None, resync: Resync | None = None
    ) -> DataProto:
        return group.generate_sequences(prompts, weights_version=version)


def shards_of_groups(responses: DataProto, *, num_groups: int, num_shards: int) -> DataProtoFuture:
    """Return a future as from the rollout's processes, with whole sample groups in each shard."""
    n = len(responses) // max(1, num_groups)
    return DataProtoFuture(
        collect_fn=DataProto.concat,
        futures=[responses.slice(start * n, stop * n) for start, stop in even_bounds(num_groups, num_shards)],
    )
