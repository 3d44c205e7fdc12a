"""Parse requests in OpenAI's format.

A request that cannot be served as written is rejected with the parameter's name; nothing is ignored silently. Names,
types and ranges are in `parameters`; here are prompts and lengths. The endpoint calls `parse_request` in a thread,
because tokenizing takes time: texts that cannot fit are rejected before.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.errors import DataError
from hybridrl.serving.openai.chat import read_messages, read_tools, wants_calls
from hybridrl.serving.openai.parameters import (
    RequestError,
    ServedModel,
    get_typed,
    require_text,
    require_token_ids,
    sampling_of,
    shorten,
)
from hybridrl.serving.openai.tool_calls import ToolFormat, detect_format
from hybridrl.serving.sessions.session import PromptPlan, Session, SessionEnded, SessionFull, context_length
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

MAX_DEPTH = 100  # of lists and mappings in a body
MAX_SAMPLES = 128  # n times the number of prompts, in one request
MAX_CHARACTERS_PER_TOKEN = 16  # of the model's length; a longer text is taken for too long without tokenizing it
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat answer may use all tokens that are left


@dataclass(frozen=True)
class CompletionRequest:
    """One parsed HTTP request.

    Attributes:
        name: Id of the answer.
        policy: The model.
        is_chat: Whether it has messages and not prompts.
        requests: One per response, n for each prompt, in the order of the prompts.
        tool_format: Of the calls in the answers; None: answers are text.
        has_one_call: Only the first call of an answer is returned (`parallel_tool_calls=false`).
        session, plan: Of a chat. The session is one of this request alone if it belongs to none.
        given: The body, as the client sent it.
        messages: Of a chat, in OpenAI's format.
        created: Seconds since 1970.
    """

    name: str
    policy: ServedModel
    is_chat: bool
    requests: list[Request]
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    stop: tuple[str, ...]
    tool_format: ToolFormat | None = None
    has_one_call: bool = False
    session: Session | None = None
    plan: PromptPlan | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    created: int = field(default_factory=lambda: int(time.time()))


def parse_request(
    body: dict[str, Any], *, is_chat: bool, policy: ServedModel, name: str, session: Session | None = None
) -> CompletionRequest:
    """Return the parsed request.

    Args:
        body: Of a request, with known parameters.
        is_chat: Whether it has messages and not prompts.
        policy: The served model.
        name: Unique id of this request.
        session: That a chat belongs to.

    Raises:
        RequestError: The request cannot be served as written.
    """
    check_model(body, policy)
    sampling, n = sampling_of(body, policy), get_typed(body, "n", int, 1)
    given = [None] if is_chat else _given_prompts(body)
    if not 1 <= n * len(given) <= MAX_SAMPLES:
        raise RequestError(
            f"n={shorten(n)} for {len(given)} prompts: one request may have 1 to {MAX_SAMPLES} responses", param="n"
        )
    seed = get_typed(body, "seed", int, None)
    seed = secrets.randbits(63) if seed is None else seed
    if not -(2**63) <= seed < 2**63:
        raise RequestError(f"seed={shorten(seed)}: must be an integer of 64 bits", param="seed")
    options = get_typed(body, "stream_options", dict, {})
    completion = CompletionRequest(
        name=name,
        policy=policy,
        is_chat=is_chat,
        requests=[],
        n=n,
        stream=get_typed(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage", False)),
        logprobs=_wants_logprobs(body, is_chat=is_chat),
        return_token_ids=get_typed(body, "return_token_ids", bool, False),
        stop=sampling.stop,
    )
    if is_chat:
        return _with_chat(completion, body, session or Session(name), sampling, seed)
    for i, prompt in enumerate(given):  # the first one that does not fit ends the request before the next is tokenized
        ids = _encode_prompt(prompt, policy)
        own_sampling = replace(sampling, max_new_tokens=_max_new_tokens(body, ids, policy, is_chat=False))
        completion.requests.extend(
            Request(f"{name}.{i}.{one}", tuple(ids), own_sampling, seed, sample=one) for one in range(n)
        )
    return completion


def _with_chat(
    completion: CompletionRequest, body: dict, session: Session, sampling: SamplingParams, seed: int
) -> CompletionRequest:
    """Return the completion with the requests of a chat. In an episode, the training batch says how to sample."""
    policy, num_before = completion.policy, 0
    plan = plan_chat(body, policy, session, n=completion.n)
    if (episode := session.episode) is not None and plan.tokens_left is not None:
        requested = get_typed(body, "max_tokens", int, plan.tokens_left)
        requested = get_typed(body, "max_completion_tokens", int, requested)
        longest = min(plan.tokens_left, episode.sampling.max_new_tokens, requested)
        if longest < 1:
            raise RequestError(f"max_tokens={shorten(requested)}: must be 1 or more", param="max_tokens")
        stop = tuple(dict.fromkeys((*episode.sampling.stop, *sampling.stop)))
        sampling, seed = replace(episode.sampling, max_new_tokens=longest, stop=stop), session.seed(plan)
        num_before = episode.max_response_length - plan.tokens_left
    else:
        sampling = replace(sampling, max_new_tokens=_max_new_tokens(body, plan.prompt_ids, policy, is_chat=True))
    names = [f"{completion.name}.0.{sample}" for sample in range(completion.n)]
    return replace(
        completion,
        requests=[
            Request(name, plan.prompt_ids, sampling, seed, sample=sample, num_before=num_before, images=plan.images)
            for sample, name in enumerate(names)
        ],
        stop=sampling.stop,
        tool_format=detect_format(policy.tokenizer) if wants_calls(body) else None,
        has_one_call=not get_typed(body, "parallel_tool_calls", bool, True),
        session=session,
        plan=plan,
        messages=body["messages"],
    )


def check_model(body: dict[str, Any], policy: ServedModel) -> None:
    """Raise RequestError for a request to another model."""
    model = get_typed(body, "model", str, None)
    if model != policy.name:
        raise RequestError(
            f"there is no model {shorten(model)} here; use {policy.name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and mappings enclose each other more than `depth` times."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deeper(item, depth - 1) for item in inner if isinstance(item, dict | list))


def read_json(raw: bytes) -> dict[str, Any]:
    """Return a body. Raises RequestError if it is no JSON object."""
    try:
        body = json.loads(raw)
        if is_deeper(body, MAX_DEPTH):
            raise RecursionError
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise RequestError(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _wants_logprobs(body: dict, *, is_chat: bool) -> bool:
    value = body.get("logprobs")
    if is_chat:
        return get_typed(body, "logprobs", bool, False)
    if value is None or value is False:
        return False
    if value is True or value == 0:
        return True
    raise RequestError(
        f"logprobs={shorten(value)}: only log-probs of the sampled tokens are available; use logprobs=0",
        param="logprobs",
    )


def _given_prompts(body: dict) -> list[Any]:
    """Return the prompts as they were given: texts or lists."""
    prompt = get_typed(body, "prompt", (str, list), None)
    if prompt is None or prompt == []:
        raise RequestError("prompt is missing: a text, token ids, or a list of either", param="prompt")
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]


def _encode_prompt(prompt: Any, policy: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        return _require_tokens(policy.tokenizer.encode(_require_length(prompt, policy, "prompt")), "prompt")
    if not isinstance(prompt, list):
        raise RequestError(f"prompt={shorten(prompt)}: must be a text or token ids", param="prompt")
    if len(prompt) > policy.max_length:
        raise _too_long(f"{len(prompt)} tokens", policy, "prompt")
    return _require_tokens(require_token_ids(prompt, policy, param="prompt"), "prompt")


def _require_length(text: str, policy: ServedModel, param: str) -> str:
    """Return the text. Raises RequestError if it cannot have few enough tokens, or is none."""
    if len(text) > MAX_CHARACTERS_PER_TOKEN * policy.max_length:
        raise _too_long(f"{len(text)} characters", policy, param)
    return require_text(text, param)


def _too_long(size: str, policy: ServedModel, param: str) -> RequestError:
    return RequestError(
        f"{context_length(policy.max_length)}; {param} has {size}", param=param, code="context_length_exceeded"
    )


def _require_tokens(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise RequestError(f"{param} has no tokens; give at least one", param=param)
    return ids


def plan_chat(body: dict, policy: ServedModel, session: Session, *, n: int = 1) -> PromptPlan:
    """Return the prompt of a chat. Raises RequestError if the template rejects it, or it is too long."""
    messages = read_messages(body, policy)
    tools = read_tools(body, policy)
    if len(messages) > policy.max_length:
        raise _too_long(f"{len(messages)} messages", policy, "messages")
    _require_length("".join(message["content"] for message in messages), policy, "messages")
    try:
        plan = session.plan(
            messages,
            tools,
            policy.tokenizer,
            n=n,
            check_text=lambda text: _require_length(text, policy, "messages"),
            options=policy.template_options,
            processor=policy.processor,
        )
    except DataError as error:
        raise RequestError(str(error), param="messages") from error
    except SessionFull as error:
        raise RequestError(str(error), param="messages", code="context_length_exceeded") from error
    except SessionEnded as error:
        raise RequestError(str(error), status=410) from error
    except RequestError:
        raise
    except Exception as error:  # a template may raise any exception
        raise RequestError(
            f"the chat template rejects these messages: {type(error).__name__}: {str(error)[:200]}", param="messages"
        ) from error
    _require_tokens(list(plan.given_ids), "messages")
    return plan


def _max_new_tokens(body: dict, ids: Sequence[int], policy: ServedModel, *, is_chat: bool) -> int:
    """Return how many tokens may follow these."""
    tokens_left = min(policy.max_response_length, policy.max_length - len(ids))
    param = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    requested = get_typed(body, param, int, max(1, tokens_left) if is_chat else DEFAULT_COMPLETION_TOKENS)
    if requested < 1:
        raise RequestError(f"{param}={shorten(requested)}: must be 1 or more", param=param)
    if body.get(param) is None:
        requested = max(1, min(requested, tokens_left))
    if requested > tokens_left:
        raise RequestError(
            f"{context_length(policy.max_length)}, at most {policy.max_response_length} of them new; the request has "
            f"{len(ids)} and asks for {shorten(requested)} more",
            param=param if tokens_left > 0 else ("messages" if is_chat else "prompt"),
            code="context_length_exceeded",
        )
    if (least := get_typed(body, "min_tokens", int, 0)) > requested:
        raise RequestError(f"min_tokens={shorten(least)}: must be at most {param}={requested}", param="min_tokens")
    return requested
