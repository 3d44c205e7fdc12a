"""Parse requests in OpenAI's format.

A request that cannot be served as written is rejected with the parameter's name; nothing is ignored silently. A request
that raised in a replica would end all others there. Lengths, token ids and sampling are therefore checked here. Called
by `server`.
"""

import secrets
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

MAX_SAMPLES = 128  # n times the number of prompts, in one request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat answer may use all tokens that are left

# Parameters that are not supported, with the values that have no effect and are accepted.
UNSUPPORTED: dict[str, tuple] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "top_logprobs": (None, 0),
    "prediction": (None,),
    "web_search_options": (None,),
}
IGNORED_PARAMETERS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}  # change no answer
COMMON_PARAMETERS = {
    *("model", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "return_token_ids",
    ),
}
SUPPORTED = {
    "completions": COMMON_PARAMETERS | {"prompt", "max_tokens"},
    "chat": COMMON_PARAMETERS | {"messages", "max_tokens", "max_completion_tokens"},
}


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
        self.message, self.param, self.code, self.status, self.retry_after_s = (
            message,
            param,
            code,
            status,
            retry_after_s,
        )


class Policy(Protocol):
    """The facts about the model that parsing needs."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def max_length(self) -> int: ...

    @property
    def max_response_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class CompletionRequest:
    """One parsed HTTP request. requests: one per response, n for each prompt, in the order of the prompts."""

    kind: str  # "completions" or "chat"
    requests: list[Request]
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    stop: tuple[str, ...]

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat"


def parse_request(body: Any, *, kind: str, policy: Policy, name: str) -> CompletionRequest:
    """Return the parsed request.

    Args:
        body: The JSON body.
        kind: "completions" or "chat".
        policy: The served model.
        name: Unique id of this request.

    Raises:
        RequestError: The request cannot be served as written.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    _reject_unsupported(body, kind)
    model = _get_typed(body, "model", str, None)
    if model != policy.name:
        raise RequestError(
            f"there is no model {model!r} here; use {policy.name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )
    prompts = [_chat_prompt(body, policy)] if kind == "chat" else _prompts(body, policy)
    sampling, n = _sampling(body, policy), _get_typed(body, "n", int, 1)
    if not 1 <= n * len(prompts) <= MAX_SAMPLES:
        raise RequestError(
            f"n={n} for {len(prompts)} prompts: one request may have 1 to {MAX_SAMPLES} responses", param="n"
        )
    seed = _get_typed(body, "seed", int, None)
    seed = secrets.randbits(63) if seed is None else seed
    if not -(2**63) <= seed < 2**63:
        raise RequestError(f"seed={seed}: must be an integer of 64 bits", param="seed")
    requests = [
        Request(
            f"{name}.{i}.{sample}",
            tuple(ids),
            replace(sampling, max_new_tokens=_max_new_tokens(body, ids, kind, policy)),
            seed,
            sample=sample,
        )
        for i, ids in enumerate(prompts)
        for sample in range(n)
    ]
    options = _get_typed(body, "stream_options", dict, {})
    return CompletionRequest(
        kind=kind,
        requests=requests,
        n=n,
        stream=_get_typed(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage", False)),
        logprobs=_wants_logprobs(body, kind),
        return_token_ids=_get_typed(body, "return_token_ids", bool, False),
        stop=sampling.stop,
    )


def _reject_unsupported(body: dict, kind: str) -> None:
    for key, value in body.items():
        if key in UNSUPPORTED and value not in UNSUPPORTED[key]:
            raise RequestError(f"{key}={value!r}: is not supported by this endpoint; leave it out", param=key)
        if key not in UNSUPPORTED and key not in SUPPORTED[kind] | IGNORED_PARAMETERS and value is not None:
            raise RequestError(f"there is no parameter {key!r}", param=key, code="unknown_parameter")


def _get_typed(body: dict, key: str, kind: type | tuple, default: Any) -> Any:
    value = body.get(key)
    if value is None:
        if key == "model":
            raise RequestError("model is missing; GET /v1/models lists it", param="model")
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise RequestError(f"{key}={value!r}: must be of type {names}", param=key)
    return value


def _wants_logprobs(body: dict, kind: str) -> bool:
    value = body.get("logprobs")
    if kind == "chat":
        return _get_typed(body, "logprobs", bool, False)
    if value is None or value is False:
        return False
    if value is True or value == 0:
        return True
    raise RequestError(
        f"logprobs={value!r}: only log-probs of the sampled tokens are available; use logprobs=0", param="logprobs"
    )


def _sampling(body: dict, policy: Policy) -> SamplingParams:
    numbers = (int, float)
    temperature, stop = _get_typed(body, "temperature", numbers, 1.0), _get_typed(body, "stop", (str, list), [])
    if not 0 <= temperature <= 1000:
        raise RequestError(f"temperature={temperature}: must be in [0, 1000]; 0 is greedy", param="temperature")
    stop = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) for text in stop):
        raise RequestError(f"stop={stop!r}: must be a text or a list of texts", param="stop")
    top_k = _get_typed(body, "top_k", int, -1)
    try:
        return SamplingParams(
            max_new_tokens=1,
            do_sample=temperature > 0,
            temperature=float(temperature) or 1.0,
            top_p=_get_typed(body, "top_p", numbers, 1.0),
            top_k=top_k if top_k != 0 else -1,
            min_p=_get_typed(body, "min_p", numbers, 0.0),
            presence_penalty=_get_typed(body, "presence_penalty", numbers, 0.0),
            frequency_penalty=_get_typed(body, "frequency_penalty", numbers, 0.0),
            repetition_penalty=_get_typed(body, "repetition_penalty", numbers, 1.0),
            min_tokens=_get_typed(body, "min_tokens", int, 0),
            ignore_eos=_get_typed(body, "ignore_eos", bool, False),
            stop=tuple(stop),
            stop_token_ids=tuple(
                _token_ids(_get_typed(body, "stop_token_ids", list, []), policy, param="stop_token_ids")
            ),
        )
    except ValueError as error:
        param = str(error).removeprefix("sampling ").split("=")[0]
        raise RequestError(str(error), param=param) from error


def _prompts(body: dict, policy: Policy) -> list[list[int]]:
    """Return the prompts' token ids.

    The body has a text, texts, token ids, or lists of token ids.
    """
    prompt = _get_typed(body, "prompt", (str, list), None)
    if prompt is None or prompt == []:
        raise RequestError("prompt is missing: a text, token ids, or a list of either", param="prompt")
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]
    return [_encode_prompt(one, policy) for one in prompts]


def _encode_prompt(prompt: Any, policy: Policy) -> list[int]:
    if isinstance(prompt, str):
        return _require_tokens(policy.tokenizer.encode(prompt), "prompt")
    if not isinstance(prompt, list):
        raise RequestError(f"prompt={prompt!r:.80}: must be a text or token ids", param="prompt")
    return _require_tokens(_token_ids(prompt, policy, param="prompt"), "prompt")


def _token_ids(ids: list, policy: Policy, *, param: str) -> list[int]:
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < policy.vocab_size]
    if wrong:
        raise RequestError(
            f"{param}: {wrong[0]!r} is not a token id; ids are integers from 0 to {policy.vocab_size - 1}", param=param
        )
    return ids


def _require_tokens(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise RequestError(f"{param} has no tokens; give at least one", param=param)
    return ids


def _chat_prompt(body: dict, policy: Policy) -> list[int]:
    messages = _get_typed(body, "messages", list, None)
    if not messages:
        raise RequestError("messages is missing: a list of messages with role and content", param="messages")
    if not getattr(policy.tokenizer, "chat_template", None):
        raise RequestError("this model's tokenizer has no chat template; use /v1/completions", param="messages")
    plain = [_flatten_content(message) for message in messages]
    try:
        rendered = policy.tokenizer.apply_chat_template(
            plain, tokenize=True, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template may raise any exception
        raise RequestError(
            f"the chat template rejects these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return _require_tokens(list(rendered["input_ids"]), "messages")


def _flatten_content(message: Any) -> dict:
    """Return the message with its content as one text, also where it came in parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages: {message!r:.80} is not a message; give an object with role and content", param="messages"
        )
    content = message.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise RequestError("messages: this model takes text only", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"messages: content={content!r:.80} must be a text", param="messages")
    return message | {"content": content}


def _max_new_tokens(body: dict, ids: list[int], kind: str, policy: Policy) -> int:
    """Return how many tokens may follow these."""
    tokens_left = min(policy.max_response_length, policy.max_length - len(ids))
    param = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    requested = _get_typed(body, param, int, max(1, tokens_left) if kind == "chat" else DEFAULT_COMPLETION_TOKENS)
    if requested < 1:
        raise RequestError(f"{param}={requested}: must be 1 or more", param=param)
    if body.get(param) is None:
        requested = max(1, min(requested, tokens_left))
    if requested > tokens_left:
        raise RequestError(
            f"this model takes {policy.max_length} tokens in all, at most {policy.max_response_length} of them new; "
            f"the request has {len(ids)} and asks for {requested} more",
            param=param if tokens_left > 0 else ("messages" if kind == "chat" else "prompt"),
            code="context_length_exceeded",
        )
    return requested
