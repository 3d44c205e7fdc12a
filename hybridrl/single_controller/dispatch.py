"""Dispatch modes: how a call's arguments are split over workers and how their outputs are merged.

Users import `register`, `Dispatch`, `Execute` and the modes from here to write worker methods. A worker group calls a
mode in the driver. A mode is a pair of functions:

    dispatch_fn(group, *args, **kwargs) -> (args, kwargs)   each argument replaced by a sequence, one entry per worker
    collect_fn(group, outputs) -> result                    outputs: one per worker, `OutputRefs` if not waited for

The group offers them `world_size`, `put(value)` (one copy, shared by all workers), `put_each(values)` and
`dp_layout(mesh)`. A batch is split over any number of workers: chunks differ by at most one row and may be empty.
Nothing is padded. Workers with an empty chunk run the method too, because it may contain collectives.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

from hybridrl.data_plane.batches import chunk_rows, concat_batches, is_batch
from hybridrl.data_plane.chunking import even_bounds
from hybridrl.data_plane.futures import DataProtoFuture
from hybridrl.single_controller.invocation import MAGIC_ATTR, Dispatch, Execute, Invocation, register
from hybridrl.single_controller.references import OutputRefs

# What a dispatch function returns: each argument as a sequence with one entry per worker.
Dispatched = tuple[tuple[Any, ...], dict[str, Any]]


class DispatchMode(NamedTuple):
    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]


def _each(split: Callable[[Any], Sequence[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dispatched:
    return tuple(split(a) for a in args), {k: split(v) for k, v in kwargs.items()}


def dispatch_one_to_all(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Send every argument to every worker, as one shared copy."""
    return _each(lambda a: [group.put(a)] * group.world_size, args, kwargs)


def dispatch_all_to_all(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Send entry i of every argument, a list with one entry per worker, to worker i."""
    return _each(partial(_presplit, num_parts=group.world_size), args, kwargs)


def dispatch_auto_shard(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Send entry i of every argument to worker i, if all arguments are lists with one entry per worker.

    Otherwise send every argument to every worker.
    """
    values = [*args, *kwargs.values()]
    sharded = values and all(isinstance(value, list) and len(value) == group.world_size for value in values)
    return (dispatch_all_to_all if sharded else dispatch_one_to_all)(group, *args, **kwargs)


def dispatch_dp(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Split batches by rows, one chunk per worker; send anything else to all."""
    return _each(partial(split_rows, group, part_of=range(group.world_size)), args, kwargs)


def dispatch_dp_with_func(group: Any, func: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Send the function to all workers and the other arguments as `dispatch_dp` does."""
    if not isinstance(func, FunctionType):
        raise TypeError(f"the first argument must be a function, got {type(func).__name__}")
    args, kwargs = dispatch_dp(group, *args, **kwargs)
    return ([group.put(func)] * group.world_size, *args), kwargs


def refuse_dispatch(group: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise TypeError: a router calls methods of this mode on one worker at a time."""
    raise TypeError("a DIRECT_ROLLOUT_METHOD is called on one worker: group.execute_rank(rank, method, ...)")


def _presplit(argument: Any, num_parts: int) -> Sequence[Any]:
    if not isinstance(argument, list | tuple) or len(argument) != num_parts:
        size = len(argument) if isinstance(argument, list | tuple) else type(argument).__name__
        raise ValueError(f"this method takes one argument per worker: a list of {num_parts}, got {size}")
    return argument


def split_rows(group: Any, argument: Any, *, part_of: Sequence[int]) -> list[Any]:
    """Return what each worker is sent of an argument: worker i gets part `part_of[i]`.

    A batch is split by rows and a list of batches is taken as the parts. A future with as many shards as parts is
    passed by reference; otherwise each worker fetches the shards that contain its rows. Any other value is shared.
    """
    num_parts = max(part_of) + 1
    if is_batch(argument):
        return send_parts(group, chunk_rows(argument, num_parts), part_of)
    if isinstance(argument, DataProtoFuture):
        chunks = argument.chunk(num_parts)
        shards = [c.futures[0] if len(c.futures) == 1 and not (c.dispatch_fn or c.part) else c for c in chunks]
        return send_parts(group, shards, part_of)
    if isinstance(argument, list | tuple) and argument and all(map(is_batch, argument)):
        return send_parts(group, _presplit(argument, num_parts), part_of)
    return [group.put(argument)] * len(part_of)


def send_parts(group: Any, parts: Sequence[Any], part_of: Sequence[int]) -> list[Any]:
    """Return what each worker is sent, part `part_of[i]` for worker i; parts that several workers get are put once."""
    sent = group.put_each(parts) if len(parts) == len(part_of) else [group.put(part) for part in parts]
    return [sent[part] for part in part_of]


def collect_list(group: Any, outputs: list[Any]) -> list[Any]:
    return outputs


def collect_dp(group: Any, outputs: list[Any]) -> Any:
    """Concatenate batches in worker order; turn references into a `DataProtoFuture`; return other outputs as a list."""
    if isinstance(outputs, OutputRefs):
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
    Dispatch.AUTO_SHARD: DispatchMode(dispatch_auto_shard, collect_list),
}


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> None:
    """Add a mode as `Dispatch.<name>`; raise ValueError for a name that is registered."""
    if name in MODES:
        raise ValueError(f"dispatch mode {name!r} is registered already; use update_dispatch_mode to replace it")
    MODES[name] = DispatchMode(dispatch_fn, collect_fn)
    Dispatch.forget[name] = partial(MODES.pop, name)
    setattr(Dispatch, name, name)


def update_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> None:
    """Replace the functions of a registered mode."""
    get_dispatch_mode(name)
    MODES[name] = DispatchMode(dispatch_fn, collect_fn)


def get_dispatch_mode(mode: Any) -> DispatchMode:
    """Return the functions of a mode, given by name or as a `{"dispatch_fn", "collect_fn"}` mapping."""
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


def get_predefined_dispatch_fn(mode: str) -> dict[str, Callable[..., Any]]:
    """Return a registered mode as a `{"dispatch_fn", "collect_fn"}` mapping, which users may extend."""
    return get_dispatch_mode(mode)._asdict()


def sequence_mode(size: int) -> dict[str, Callable[..., Any]]:
    """Return a mode that cuts lists and tuples of `size` entries into one consecutive chunk per worker.

    Chunks differ by at most one entry, larger ones first, and may be empty. Any other value, a string too, goes to
    every worker. If all outputs are lists or tuples, they are concatenated to a list in worker order.

    Raises:
        ValueError: when the call is made, for a list or tuple of another length; names the argument.
    """
    return {"dispatch_fn": partial(_dispatch_sequences, size), "collect_fn": _collect_sequences}


def _dispatch_sequences(size: int, group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    bounds = even_bounds(size, group.world_size)

    def split(name: str, argument: Any) -> list[Any]:
        if not isinstance(argument, list | tuple):
            return [group.put(argument)] * group.world_size
        if len(argument) != size:
            raise ValueError(
                f"argument {name} has {len(argument)} entries, but this batch has {size}; give every list and tuple "
                "one entry per item of the batch, and wrap a value for all workers in another type"
            )
        return [argument[start:stop] for start, stop in bounds]

    positional = tuple(split(str(i), argument) for i, argument in enumerate(args))
    return positional, {name: split(name, argument) for name, argument in kwargs.items()}


def _collect_sequences(group: Any, outputs: list[Any]) -> list[Any]:
    if isinstance(outputs, OutputRefs) or not all(isinstance(output, list | tuple) for output in outputs):
        return outputs
    return [entry for output in outputs for entry in output]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Return a mode for workers on a mesh with more than a data-parallel axis.

    Workers of one data-parallel rank (tensor- or pipeline-parallel peers) get the same chunk, put once, and one peer's
    output is collected. Workers announce both with
    `Worker._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)`.
    """
    return {"dispatch_fn": partial(_dispatch_mesh, mesh_name), "collect_fn": partial(_collect_mesh, mesh_name)}


def _dispatch_mesh(mesh_name: str, group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    dp_ranks, _ = group.dp_layout(mesh_name)
    return _each(partial(split_rows, group, part_of=dp_ranks), args, kwargs)


def _collect_mesh(mesh_name: str, group: Any, outputs: list[Any]) -> Any:
    """Collect outputs in the order of the data-parallel ranks, which may differ from the order of the workers."""
    dp_ranks, is_collect = group.dp_layout(mesh_name)
    workers = sorted((rank for rank, keep in enumerate(is_collect) if keep), key=dp_ranks.__getitem__)
    return collect_dp(
        group, outputs.select(workers) if isinstance(outputs, OutputRefs) else [outputs[w] for w in workers]
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
    "sequence_mode",
    "update_dispatch_mode",
]
