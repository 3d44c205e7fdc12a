"""`Generator`: what a `RolloutPipeline` generates responses with.

With rollout.mode=async it is an `AgentLoopManager`, else a `BatchedGenerator` (`rollout_pipeline.py`). All work of a
generator takes effect in submission order: a response gets the weights of the last push that was submitted before it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hybridrl.protocol import DataProto

Resync = Callable[[Sequence[int]], None]  # sends the current weights to restarted processes of these ranks


class PendingResponses(Protocol):
    """Responses that are being generated. Continued by their own generator only."""

    def get(self) -> DataProto:
        """Wait, and return the batch that `ActorRolloutRefWorker.generate_sequences` describes.

        After a short round its `meta_info[CHOSEN_GROUPS]` has the places of the prompts that it answers.
        """


class Pending(Protocol):
    """Work that was submitted."""

    def wait(self) -> None:
        """Return when it is done. Raises its error."""


class Generator(Protocol):
    """Generates the policy's responses on the processes of a rollout, in submission order.

    With rollout.mode=async it is an `AgentLoopManager`. `version` is everywhere the weight version that the processes
    must hold; None: any that was pushed in full.
    """

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last batch, by their names in the log."""

    @property
    def reads_other_columns(self) -> bool:
        """Whether prompts must have all columns of their rows, and not only the model's input."""

    def open(self, group: Any, *, resync: Resync | None, concurrent: bool) -> None:
        """Generate on these processes until `close`. Called again after some were replaced.

        Args:
            group: Worker group of the rollout.
            resync: Sends the current weights to restarted processes; None if they cannot be restarted without the
                others.
            concurrent: Whether the processes generate while the driver trains, and do nothing else.
        """

    def close(self, *, wait: bool = False) -> None:
        """Stop generating. Safe to call twice, and before `open`.

        Args:
            wait: Return only when no process has a call in flight that `close` ended early.
        """

    def submit(
        self,
        prompts: DataProto | PendingResponses,
        *,
        version: int | None,
        max_new_tokens: int | None = None,
        num_prompts: int | None = None,
    ) -> PendingResponses:
        """Start generating responses, or more tokens of open ones.

        Args:
            prompts: Prompts; or what `submit` returned, or a future of the batch that it returned, from a checkpoint.
            version: Version of the weights.
            max_new_tokens: Most new tokens of each response; a later call may add more. None: whole responses.
            num_prompts: Generate until the groups of so many prompts are complete, and end the others. None: all.
        """

    def push(self, version: int, receive: Callable[[], Pending]) -> Pending:
        """Let the processes receive weights, after everything submitted before.

        Args:
            version: Version of the weights.
            receive: Starts the rollout's half of the push. Called once, at once or when the processes are free.
        """

    def generate_on(
        self, group: Any, prompts: DataProto, *, version: int | None, resync: Resync | None = None
    ) -> DataProto:
        """Return whole responses from another group's processes, in any thread."""
