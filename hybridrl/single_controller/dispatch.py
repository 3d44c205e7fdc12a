"""The dispatch modes: how a call's arguments are split over workers and how their answers are merged.

A mode is a pair of functions:

    dispatch_fn(group, *args, **kwargs) -> (args, kwargs)   each argument replaced by a list, one entry per worker
    collect_fn(group, outputs) -> result                    outputs: one per worker; `References` when the call did not
    wait

The group offers them `world_size`, `put(value)` (one copy, shared by all workers), `put_each(values)` and
`dp_layout(mesh)`. A batch goes to any number of workers: pieces differ by at most one row and may be empty, nothing is
padded. Workers whose computation is collective take part with an empty piece too.

The names users import to write worker methods: `register`, `Dispatch`, `Execute` and the dispatch modes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

from hybridrl.data_plane.batches import chunk_rows, concat_batches, is_batch
from hybridrl.protocol import DataProtoFuture
from hybridrl.single_controller.invocation import MAGIC_ATTR, Dispatch, Execute, Invocation, register
from hybridrl.single_controller.references import References


class DispatchMode(NamedTuple):
    dispatch_fn: Callable
    collect_fn: Callable


def _each(split: Callable[[Any], Sequence], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tuple(split(a) for a in args), {k: split(v) for k, v in kwargs.items()}


def dispatch_one_to_all(group, *args, **kwargs):
    """Every worker gets every argument; one copy is shared, however many workers there are."""
    return _each(lambda a: [group.put(a)] * group.world_size, args, kwargs)


def dispatch_all_to_all(group, *args, **kwargs):
    """Arguments are lists with one entry per worker already; they pass as they are."""
    return _each(partial(_presplit, num_parts=group.world_size), args, kwargs)


def dispatch_dp(group, *args, **kwargs):
    """Batches are split by rows, one piece per worker; anything else goes to all."""
    return _each(partial(split_rows, group, num_parts=group.world_size), args, kwargs)


def dispatch_dp_with_func(group, func, *args, **kwargs):
    """As `dispatch_dp`, with a function first that goes to all."""
    if not isinstance(func, FunctionType):
        raise TypeError(f"the first argument must be a function, got {type(func).__name__}")
    args, kwargs = dispatch_dp(group, *args, **kwargs)
    return ([group.put(func)] * group.world_size, *args), kwargs


def refuse_dispatch(group, *args, **kwargs) -> NoReturn:
    """Methods of this mode are called on one worker at a time, by whoever routes requests to it."""
    raise TypeError("a DIRECT_ROLLOUT_METHOD is called on one worker: group.execute_rank(rank, method, ...)")


def _presplit(argument: Any, num_parts: int) -> Sequence:
    if not isinstance(argument, list | tuple) or len(argument) != num_parts:
        size = len(argument) if isinstance(argument, list | tuple) else type(argument).__name__
        raise ValueError(f"this method takes one argument per worker: a list of {num_parts}, got {size}")
    return argument


def split_rows(group, argument: Any, *, num_parts: int) -> list:
    """Return one piece per part: a batch cut by rows, a future by shards, a list of ready-made pieces as it is, the
    rest shared.

    A future with as many shards as parts is handed over by reference; otherwise each worker fetches the shards its rows
    are in.
    """
    if is_batch(argument):
        return group.put_each(chunk_rows(argument, num_parts))
    if isinstance(argument, DataProtoFuture):
        pieces = argument.chunk(num_parts)
        return [p.futures[0] if len(p.futures) == 1 and p.dispatch_fn is None and p.part is None else p for p in pieces]
    if isinstance(argument, list | tuple) and argument and all(map(is_batch, argument)):
        return group.put_each(_presplit(argument, num_parts))
    return [group.put(argument)] * num_parts


def collect_list(group, outputs: list) -> list:
    return outputs


def collect_dp(group, outputs: list) -> Any:
    """Batches are joined in worker order; references become a `DataProtoFuture`; other answers stay a list."""
    if isinstance(outputs, References):
        return DataProtoFuture(
            collect_fn=concat_batches, futures=list(outputs), fetch=outputs.fetch, sizes=outputs.sizes
        )
    return concat_batches(outputs) if all(map(is_batch, outputs)) else outputs


MODES: dict[str, DispatchMode] = {
    Dispatch.RANK_ZERO: DispatchMode(dispatch_one_to_all, collect_list),
    Dispatch.ONE_TO_ALL: DispatchMode(dispatch_one_to_all, collect_list),
    Dispatch.ALL_TO_ALL: DispatchMode(dispatch_all_to_all, collect_list),
    Dispatch.DP_COMPUTE: DispatchMode(dispatch_all_to_all, collect_list),
    Dispatch.DP_COMPUTE_PROTO: DispatchMode(dispatch_dp, collect_dp),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode(dispatch_dp_with_func, collect_dp),
    Dispatch.DP_COMPUTE_METRIC: DispatchMode(dispatch_dp, collect_list),
    Dispatch.DIRECT_ROLLOUT_METHOD: DispatchMode(refuse_dispatch, collect_list),
}


def register_dispatch_mode(name: str, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Add a mode under a new name; afterwards `Dispatch.<name>` is that name. A known name is refused."""
    if name in MODES:
        raise ValueError(f"dispatch mode {name!r} is registered already; use update_dispatch_mode to replace it")
    MODES[name] = DispatchMode(dispatch_fn, collect_fn)
    setattr(Dispatch, name, name)


def update_dispatch_mode(name: str, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Replace the functions of a registered mode."""
    get_dispatch_mode(name)
    MODES[name] = DispatchMode(dispatch_fn, collect_fn)


def get_dispatch_mode(mode: Any) -> DispatchMode:
    """Return the functions behind a mode's name or behind a `{"dispatch_fn", "collect_fn"}` mapping."""
    if isinstance(mode, str):
        if mode not in MODES:
            raise ValueError(f"dispatch mode {mode!r} is not registered; registered are {', '.join(MODES)}")
        return MODES[mode]
    missing = {"dispatch_fn", "collect_fn"} - set(mode)
    if missing:
        raise ValueError(
            f"a dispatch mode given as a mapping needs dispatch_fn and collect_fn; missing {', '.join(sorted(missing))}"
        )
    return DispatchMode(mode["dispatch_fn"], mode["collect_fn"])


def get_predefined_dispatch_fn(mode: str) -> dict[str, Callable]:
    """Return a mode as the mapping that users extend: `{"dispatch_fn", "collect_fn"}`."""
    return get_dispatch_mode(mode)._asdict()


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable]:
    """Return a mode for workers on a mesh with more than a data-parallel axis.

    Workers of one data-parallel rank (tensor- or pipeline-parallel peers) get the same piece, put once; one peer's
    answer is collected. Workers announce themselves with `Worker._register_dispatch_collect_info(mesh_name, dp_rank,
    is_collect)`.
    """
    return {"dispatch_fn": partial(_dispatch_mesh, mesh_name), "collect_fn": partial(_collect_mesh, mesh_name)}


def _dispatch_mesh(mesh_name: str, group, *args, **kwargs):
    dp_ranks, _ = group.dp_layout(mesh_name)
    num_parts = max(dp_ranks) + 1

    def split(argument):
        # A piece that peers share is put once, whatever it is.
        parts = [group.put(part) for part in split_rows(group, argument, num_parts=num_parts)]
        return [parts[dp_rank] for dp_rank in dp_ranks]

    return _each(split, args, kwargs)


def _collect_mesh(mesh_name: str, group, outputs: list) -> Any:
    """Answers in the order of the pieces, which need not be that of the workers."""
    dp_ranks, is_collect = group.dp_layout(mesh_name)
    workers = sorted((rank for rank, keep in enumerate(is_collect) if keep), key=dp_ranks.__getitem__)
    return collect_dp(
        group, outputs.pick(workers) if isinstance(outputs, References) else [outputs[w] for w in workers]
    )


__all__ = [
    "MAGIC_ATTR",
    "Dispatch",
    "Execute",
    "Invocation",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
