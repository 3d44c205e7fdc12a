"""Reading requests of OpenAI's form. What cannot be answered as asked is refused, with the parameter's name; nothing is
left out silently.

A request that would raise in a replica would end all others there, so everything is looked at here: lengths, token ids,
sampling.
"""

import secrets
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

MOST_SAMPLES = 128  # n times the number of prompts, in one request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions; a chat answer may take what room there is

# What is not done here, with the values that ask for nothing.
NOT_DONE: dict[str, tuple] = {
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
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}  # change no answer
COMMON = {
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
KNOWN = {
    "completions": COMMON | {"prompt", "max_tokens"},
    "chat": COMMON | {"messages", "max_tokens", "max_completion_tokens"},
}


class Refusal(Exception):
    """A request that is not carried out: what OpenAI's clients raise.

    status: HTTP; param: which of the request's parameters is meant.
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
    """What has to be known of the model to read a request."""

    name: str
    tokenizer: Any
    max_length: int
    max_response_length: int
    vocab_size: int


@dataclass(frozen=True)
class Question:
    """What one HTTP request asks for. requests: a response each, n for each prompt, prompts in order."""

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


def read_question(body: Any, *, kind: str, policy: Policy, name: str) -> Question:
    """Return what is asked. name: of this request, no other's. Raises Refusal."""
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    _refuse_what_is_not_done(body, kind)
    model = _typed(body, "model", str, None)
    if model != policy.name:
        raise Refusal(
            f"there is no model {model!r} here; it is called {policy.name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )
    prompts = [_chat_prompt(body, policy)] if kind == "chat" else _prompts(body, policy)
    sampling, n = _sampling(body, policy), _typed(body, "n", int, 1)
    if not 1 <= n * len(prompts) <= MOST_SAMPLES:
        raise Refusal(
            f"n={n} of {len(prompts)} prompts: there may be 1 to {MOST_SAMPLES} responses in one request", param="n"
        )
    seed = _typed(body, "seed", int, None)
    seed = secrets.randbits(63) if seed is None else seed
    if not -(2**63) <= seed < 2**63:
        raise Refusal(f"seed={seed}: must be an integer of 64 bits", param="seed")
    requests = [
        Request(
            f"{name}.{i}.{sample}",
            tuple(ids),
            replace(sampling, max_new_tokens=_room(body, ids, kind, policy)),
            seed,
            sample=sample,
        )
        for i, ids in enumerate(prompts)
        for sample in range(n)
    ]
    options = _typed(body, "stream_options", dict, {})
    return Question(
        kind=kind,
        requests=requests,
        n=n,
        stream=_typed(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage", False)),
        logprobs=_wants_logprobs(body, kind),
        return_token_ids=_typed(body, "return_token_ids", bool, False),
        stop=sampling.stop,
    )


def _refuse_what_is_not_done(body: dict, kind: str) -> None:
    for key, value in body.items():
        if key in NOT_DONE and value not in NOT_DONE[key]:
            raise Refusal(f"{key}={value!r}: is not done by this endpoint; leave it out", param=key)
        if key not in NOT_DONE and key not in KNOWN[kind] | IGNORED and value is not None:
            raise Refusal(f"there is no parameter {key!r}", param=key, code="unknown_parameter")


def _typed(body: dict, key: str, kind: type | tuple, default: Any) -> Any:
    value = body.get(key)
    if value is None:
        if key == "model":
            raise Refusal("say which model; GET /v1/models lists it", param="model")
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise Refusal(f"{key}={value!r}: must be of type {names}", param=key)
    return value


def _wants_logprobs(body: dict, kind: str) -> bool:
    value = body.get("logprobs")
    if kind == "chat":
        return _typed(body, "logprobs", bool, False)
    if value is None or value is False:
        return False
    if value is True or value == 0:
        return True
    raise Refusal(
        f"logprobs={value!r}: there are log-probs of the chosen tokens only; use logprobs=0", param="logprobs"
    )


def _sampling(body: dict, policy: Policy) -> SamplingParams:
    numbers = (int, float)
    temperature, stop = _typed(body, "temperature", numbers, 1.0), _typed(body, "stop", (str, list), [])
    if not 0 <= temperature <= 1000:
        raise Refusal(
            f"temperature={temperature}: must be in [0, 1000]; 0 takes the likeliest token", param="temperature"
        )
    stop = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) for text in stop):
        raise Refusal(f"stop={stop!r}: must be a text or a list of texts", param="stop")
    top_k = _typed(body, "top_k", int, -1)
    try:
        return SamplingParams(
            max_new_tokens=1,
            do_sample=temperature > 0,
            temperature=float(temperature) or 1.0,
            top_p=_typed(body, "top_p", numbers, 1.0),
            top_k=top_k if top_k != 0 else -1,
            min_p=_typed(body, "min_p", numbers, 0.0),
            presence_penalty=_typed(body, "presence_penalty", numbers, 0.0),
            frequency_penalty=_typed(body, "frequency_penalty", numbers, 0.0),
            repetition_penalty=_typed(body, "repetition_penalty", numbers, 1.0),
            min_tokens=_typed(body, "min_tokens", int, 0),
            ignore_eos=_typed(body, "ignore_eos", bool, False),
            stop=tuple(stop),
            stop_token_ids=tuple(_token_ids(_typed(body, "stop_token_ids", list, []), policy, param="stop_token_ids")),
        )
    except ValueError as error:
        param = str(error).removeprefix("sampling ").split("=")[0]
        raise Refusal(str(error), param=param) from error


def _prompts(body: dict, policy: Policy) -> list[list[int]]:
    """A text, texts, token ids, or lists of token ids."""
    prompt = _typed(body, "prompt", (str, list), None)
    if prompt is None or prompt == []:
        raise Refusal("prompt is missing: a text, token ids, or a list of either", param="prompt")
    several = prompt if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]
    return [_ids_of(one, policy) for one in several]


def _ids_of(prompt: Any, policy: Policy) -> list[int]:
    if isinstance(prompt, str):
        return _not_empty(policy.tokenizer.encode(prompt), "prompt")
    if not isinstance(prompt, list):
        raise Refusal(f"prompt={prompt!r:.80}: must be a text or token ids", param="prompt")
    return _not_empty(_token_ids(prompt, policy, param="prompt"), "prompt")


def _token_ids(ids: list, policy: Policy, *, param: str) -> list[int]:
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < policy.vocab_size]
    if wrong:
        raise Refusal(
            f"{param}: {wrong[0]!r} is no token id; ids are integers from 0 to {policy.vocab_size - 1}", param=param
        )
    return ids


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise Refusal(f"{param} has no token; a model cannot start from nothing", param=param)
    return ids


def _chat_prompt(body: dict, policy: Policy) -> list[int]:
    messages = _typed(body, "messages", list, None)
    if not messages:
        raise Refusal("messages is missing: a list of messages with role and content", param="messages")
    if not getattr(policy.tokenizer, "chat_template", None):
        raise Refusal("this model's tokenizer has no chat template; use /v1/completions", param="messages")
    plain = [_plain(message) for message in messages]
    try:
        rendered = policy.tokenizer.apply_chat_template(
            plain, tokenize=True, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template raises what it likes
        raise Refusal(
            f"the chat template refuses these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return _not_empty(list(rendered["input_ids"]), "messages")


def _plain(message: Any) -> dict:
    """A message whose content is a text, also where it came in parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(f"messages: {message!r:.80} is no message; one has a role and a content", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise Refusal("messages: this model reads text only", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refusal(f"messages: content={content!r:.80} must be a text", param="messages")
    return message | {"content": content}


def _room(body: dict, ids: list[int], kind: str, policy: Policy) -> int:
    """How many tokens may come after these."""
    room = min(policy.max_response_length, policy.max_length - len(ids))
    param = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wanted = _typed(body, param, int, max(1, room) if kind == "chat" else DEFAULT_COMPLETION_TOKENS)
    if wanted < 1:
        raise Refusal(f"{param}={wanted}: must be 1 or more", param=param)
    if body.get(param) is None:
        wanted = max(1, min(wanted, room))
    if wanted > room:
        raise Refusal(
            f"this model takes {policy.max_length} tokens in all, at most {policy.max_response_length} of "
            "them new; the request has "
            f"{len(ids)} and asks for {wanted} more",
            param=param if room > 0 else ("messages" if kind == "chat" else "prompt"),
            code="context_length_exceeded",
        )
    return wanted
