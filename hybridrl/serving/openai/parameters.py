"""The parameters of requests in OpenAI's format: which there are, their types and their ranges.

Called by `requests`. A value that a replica could not use is rejected here, with the parameter's name, before anything
is tokenized. Not here: prompts, and how many tokens they leave (`requests`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.workers.images import ImageProcessor
from hybridrl.workers.rollout.sampling.logits import unwritable_strings
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

MAX_PARAMETERS = 64  # in one request
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_STOP_TOKENS = 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 1000.0  # below, logits divided by it are infinite; 0 is greedy
# Parameter -> default, smallest and largest value.
RANGES: dict[str, tuple[float, float, float]] = {
    "temperature": (1.0, 0, MAX_TEMPERATURE),
    "presence_penalty": (0.0, -2, 2),
    "frequency_penalty": (0.0, -2, 2),
    "repetition_penalty": (1.0, 0.01, 2),  # logits are divided by it
    "top_p": (1.0, 0, 1),
    "min_p": (0.0, 0, 1),
    "top_k": (-1, -1, 2**31 - 1),
}

# Parameters that are not supported, with the values that have no effect and are accepted.
UNSUPPORTED: dict[str, tuple] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "top_logprobs": (None, 0),
    "prediction": (None,),
    "web_search_options": (None,),
}
# Parameters that change no answer.
IGNORED_PARAMETERS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
OWN_SAMPLING = (  # of this endpoint, in every API
    *("seed", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos", "stop_token_ids"),
)
COMMON_PARAMETERS = {
    *("model", "stream", "stream_options", "n", "temperature", "top_p", "stop", "logprobs", "return_token_ids"),
    *OWN_SAMPLING,
}


@dataclass(frozen=True)
class ParameterNames:
    """The parameters of an API.

    Attributes:
        supported: Those with an effect.
        unsupported: Others, with the values that have no effect and are accepted.
        ignored: Those that change no answer.
        demands: Those that may demand a form of the answer, with a function that takes the demand out of a value.
    """

    supported: Collection[str]
    unsupported: Mapping[str, tuple]
    ignored: Collection[str]
    demands: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


def automatic_choice(choice: Any) -> Any:
    """Return the `tool_choice` of a chat request without a demand for a call."""
    return "auto" if choice == "required" or isinstance(choice, dict) else choice


def no_format(_: Any) -> None:
    """Return the value of a parameter that demands no format."""


COMPLETIONS = ParameterNames(COMMON_PARAMETERS | {"prompt", "max_tokens"}, UNSUPPORTED, IGNORED_PARAMETERS)
CHAT_PARAMETERS = ("messages", "max_tokens", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls")
CHAT_DEMANDS = {"tool_choice": automatic_choice, "response_format": no_format}
CHAT = ParameterNames(COMMON_PARAMETERS | {*CHAT_PARAMETERS}, UNSUPPORTED, IGNORED_PARAMETERS, CHAT_DEMANDS)


class RequestError(Exception):
    """A request that is not served; becomes an error body in OpenAI's format.

    Attributes:
        param: The offending parameter.
        status: HTTP status.
        retry_after_s: Seconds for the `Retry-After` header.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True)
class ServedModel:
    """The model as clients see it.

    Attributes:
        name: As clients call it.
        tokenizer: Its own.
        max_length: Tokens of prompt and response together.
        max_response_length: Tokens of a response.
        vocab_size: Of the model's output.
        template_options: For the chat template (`data.apply_chat_template_kwargs`).
        processor: Of a model that reads images.
    """

    name: str
    tokenizer: Any
    max_length: int
    max_response_length: int
    vocab_size: int
    template_options: Mapping[str, Any] = field(default_factory=dict)
    processor: ImageProcessor | None = None


def without_demands(body: dict, names: ParameterNames) -> dict:
    """Return the request of an agent in training without demands for calls or formats: its policy samples freely."""
    return body | {key: allow(body[key]) for key, allow in names.demands.items() if key in body}


def check_names(body: dict, names: ParameterNames) -> None:
    """Raise RequestError for a parameter that there is not, or that this endpoint does not support."""
    if len(body) > MAX_PARAMETERS:
        raise RequestError(f"the request has {len(body)} parameters; at most {MAX_PARAMETERS}")
    for key, value in body.items():
        if key in names.unsupported and value not in names.unsupported[key]:
            raise RequestError(f"{key}={shorten(value)}: is not supported by this endpoint; leave it out", param=key)
        known = key in names.unsupported or key in names.supported or key in names.ignored
        if not known and value is not None:
            raise RequestError(f"there is no parameter {shorten(key)}", param=key[:80], code="unknown_parameter")


def get_typed(body: dict, key: str, kind: type | tuple, default: Any) -> Any:
    """Return a parameter's value, or the default where it is missing or null. Raises RequestError for other types."""
    value = body.get(key)
    if value is None:
        if key == "model":
            raise RequestError("model is missing; GET /v1/models lists it", param="model")
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise RequestError(f"{key}={shorten(value)}: must be of type {names}", param=key)
    return value


def shorten(value: Any) -> str:
    """Return a value for a message, of at most 80 characters that every client can read."""
    return repr(value[:80] if isinstance(value, str | list) else value)[:80].encode("utf-8", "replace").decode()


def require_text(text: str, param: str) -> str:
    """Return the text. Raises RequestError if it has half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param}: character {error.start} is half of a surrogate pair, which no text has", param=param
        ) from error
    return text


def require_token_ids(ids: list, policy: ServedModel, *, param: str) -> list[int]:
    """Return the ids. Raises RequestError if one is no token of the model."""
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < policy.vocab_size]
    if wrong:
        raise RequestError(
            f"{param}: {shorten(wrong[0])} is not a token id; ids are integers from 0 to {policy.vocab_size - 1}",
            param=param,
        )
    return ids


def sampling_of(body: dict, policy: ServedModel) -> SamplingParams:
    """Return how to sample, with max_new_tokens=1. Raises RequestError for a value out of its range."""
    temperature = _ranged(body, "temperature")
    if 0 < temperature < MIN_TEMPERATURE:
        raise RequestError(
            f"temperature={temperature}: must be 0 (greedy) or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}",
            param="temperature",
        )
    top_k = int(_ranged(body, "top_k", kind=int))
    stop_token_ids = get_typed(body, "stop_token_ids", list, [])
    if len(stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(
            f"stop_token_ids: {len(stop_token_ids)} ids; at most {MAX_STOP_TOKENS}", param="stop_token_ids"
        )
    try:
        return SamplingParams(
            max_new_tokens=1,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_p=_ranged(body, "top_p"),
            top_k=top_k if top_k != 0 else -1,
            min_p=_ranged(body, "min_p"),
            presence_penalty=_ranged(body, "presence_penalty"),
            frequency_penalty=_ranged(body, "frequency_penalty"),
            repetition_penalty=_ranged(body, "repetition_penalty"),
            min_tokens=get_typed(body, "min_tokens", int, 0),
            ignore_eos=get_typed(body, "ignore_eos", bool, False),
            stop=_stop_texts(body, policy),
            stop_token_ids=tuple(require_token_ids(stop_token_ids, policy, param="stop_token_ids")),
        )
    except ValueError as error:
        param = str(error).removeprefix("sampling ").split("=")[0]
        raise RequestError(str(error), param=param) from error


def _ranged(body: dict, key: str, *, kind: type | tuple = (int, float)) -> float:
    default, low, high = RANGES[key]
    value = get_typed(body, key, kind, default)
    if not low <= value <= high:  # neither does NaN
        raise RequestError(f"{key}={shorten(value)}: must be in [{low:g}, {high:g}]", param=key)
    return float(value)


def _stop_texts(body: dict, policy: ServedModel) -> tuple[str, ...]:
    stop: str | Sequence = get_typed(body, "stop", (str, list), [])
    texts = [stop] if isinstance(stop, str) else list(stop)
    if len(texts) > MAX_STOPS or not all(isinstance(text, str) and len(text) <= MAX_STOP_CHARACTERS for text in texts):
        raise RequestError(
            f"stop={shorten(stop)}: must be a text, or at most {MAX_STOPS} texts, of at most {MAX_STOP_CHARACTERS} "
            "characters",
            param="stop",
        )
    for text in texts:
        require_text(text, "stop")
    if unknown := unwritable_strings(policy.tokenizer, texts):
        raise RequestError(
            f"stop={shorten(unknown[0])}: this model's tokenizer cannot write it, so it would never stop an answer; "
            "use the composed form of its characters (Unicode NFC), or stop_token_ids",
            param="stop",
        )
    return tuple(texts)
