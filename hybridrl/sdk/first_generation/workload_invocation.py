"""`trainer_invocation`: how a trainer calls a workload's method, in the words of DLRover's first generation.

    class Actor(BaseWorkload):
        @trainer_invocation(is_async=True, timeout=30)
        def update(self, batch): ...

The decorator stores an `Invocation`, as `register` does.
"""

from collections.abc import Callable
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.sdk.first_generation.pre_post import parse_post, parse_pre
from hybridrl.single_controller.dispatch import Dispatch, Execute, register
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S

TARGETS = ("ALL", "RANK0")
TIMEOUT_S = 10  # DLRover's default


def trainer_invocation(
    blocking: Any = True,
    is_async: bool = False,
    timeout: float = TIMEOUT_S,
    target: str = "ALL",
    auto_shard: bool = True,
    pre_func: Callable[..., Any] | None = None,
    post_func: Callable[..., Any] | None = None,
    *,
    pre_function: Callable[..., Any] | None = None,
    post_function: Callable[..., Any] | None = None,
) -> Any:
    """Mark a workload's method; return it unchanged. Works with and without parentheses.

    Args:
        blocking: Wait for the outputs. Otherwise the call returns Ray's references to them, one per worker.
        is_async: Raise CallTimeout if not all outputs are there after `timeout`; for `blocking=True`. Otherwise the
            call waits as long as the job's other calls do.
        timeout: Seconds, more than 0.
        target: "ALL" workers, or "RANK0", whose output is a list of one.
        auto_shard: If all arguments are lists with one entry per worker, send entry i to worker i. Otherwise every
            worker gets all of them.
        pre_func: Computes the arguments, in the caller; see `pre_post.py` for its two forms.
        post_func: Computes what the call returns, in the caller; see `pre_post.py` for its two forms.
        pre_function, post_function: DLRover's guide also calls them so.

    Raises:
        ConfigError: An argument is wrong. The message names the method.
    """
    if callable(blocking):  # @trainer_invocation without parentheses
        return trainer_invocation()(blocking)
    pre = _one_of("pre_func", pre_func, pre_function)
    post = _one_of("post_func", post_func, post_function)
    for name, flag in {"blocking": blocking, "is_async": is_async, "auto_shard": auto_shard}.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"trainer_invocation({name}={flag!r}): must be True or False")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ConfigError(f"trainer_invocation(timeout={timeout!r}): must be a number of seconds, more than 0")
    if target not in TARGETS:
        raise ConfigError(f"trainer_invocation(target={target!r}): known are {' and '.join(TARGETS)}")
    timeout_s = float(timeout) if is_async else DEFAULT_TIMEOUT_S

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        return register(
            Dispatch.AUTO_SHARD if auto_shard else Dispatch.ONE_TO_ALL,
            Execute.RANK_ZERO if target == "RANK0" else Execute.ALL,
            blocking,
            timeout_s=timeout_s,
            pre=parse_pre(pre, method),
            post=parse_post(post, method, is_rank0=target == "RANK0"),
        )(method)

    return mark


def _one_of(name: str, short: Any, long: Any) -> Any:
    if short is not None and long is not None:
        raise ConfigError(f"trainer_invocation: {name} and {name}tion are two names for one; give one of them")
    return short if short is not None else long
