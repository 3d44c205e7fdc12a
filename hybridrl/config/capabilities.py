"""Capabilities that a rollout and a transport declare.

Settings are checked against them before anything starts.

Classes of `workers/rollout` and `workers/weight_transfer` have one of these records as attribute `capabilities`. The
rules in `checks/rollout.py` read them in the driver. This module has no code that generates or sends.
"""

from dataclasses import dataclass

# Sampling parameters with a setting of their own, by their names in `SamplingParams` and in the settings. Number of
# samples, length limit and greedy decoding are not in this list, because every rollout must honour them.
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
# Without effect on greedy decoding.
SHAPES_SAMPLES = frozenset({"temperature", "top_k", "top_p", "min_p"})


@dataclass(frozen=True)
class RolloutCapabilities:
    """What a rollout can do beyond generating greedily and replacing its weights.

    Nothing is assumed.

    keyed_sampling: a token depends only on the seed of its row, the number of its sample and its position. Repeated and
        resumed steps then draw the same samples.
    log_probs: it returns the log-probs of sampled tokens at the sampling temperature, before truncation and penalties.
    reads_own_weights: `health` has the fingerprint of the tensors that the engine computes with.
    partial: `generate_tokens` continues responses (`num_done`).
    requests: `request_engine` serves single requests.
    adapters: `load_weights` accepts low-rank adapters alone, and merges them.
    tensor_parallel: several worker processes share one engine. With `requests` each of them gets the same ones between
        the same two steps, and must schedule them alike.
    routes: it returns the experts of every token of a mixture of experts (`GeneratedTokens.routes`).
    float32_weights: it holds all tensors of `FLOAT32` (`workers/weight_transfer/fingerprint.py`) in float32.
    images: families (`model_type`) of which `generate_tokens` takes prompts with images.
    quantization: values of the setting `quantization` whose weights it computes with.
    sampling: the names of `SAMPLING` that it honours.
    """

    keyed_sampling: bool = False
    log_probs: bool = False
    reads_own_weights: bool = False
    partial: bool = False
    requests: bool = False
    adapters: bool = False
    tensor_parallel: bool = False
    routes: bool = False
    float32_weights: bool = False
    images: frozenset[str] = frozenset()
    quantization: frozenset[str] = frozenset()
    sampling: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.sampling) - set(SAMPLING))
        if unknown:
            raise ValueError(
                f"sampling={unknown}: these are not sampling parameters; give some of {', '.join(SAMPLING)}"
            )


@dataclass(frozen=True)
class TransportCapabilities:
    """How a transport works.

    streaming: sender and receivers process a push at the same time, over a channel. False: the sender stores the
        weights and continues at once, and receivers fetch them later, also twice.
    needs_directory: it writes to `weight_sync.directory`.
    """

    streaming: bool
    needs_directory: bool = False

    @property
    def stored(self) -> bool:
        """The opposite of streaming."""
        return not self.streaming
