"""`RecordedRow`: what a checkpoint has of a row whose batch is not complete: the policy's turns, or the whole output.

A resumed loop starts anew and gets the turns again. A loop that had ended does not start. `AgentLoopManager` writes and
reads the columns; their names and JSON are a format on disk.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.data_plane.futures import array_of
from hybridrl.serving.agent_loop.base import AgentLoopOutput
from hybridrl.workers.rollout.requests import TokenOutput

TURNS_COLUMN, OUTPUT_COLUMN = "said", "agent_output"


@dataclass
class RecordedRow:
    """What is known of a row.

    Attributes:
        turns: Of the policy so far, by their keys (`RowClient`).
        output: Of a loop that has ended.
    """

    turns: dict[str, TokenOutput] = field(default_factory=dict)
    output: AgentLoopOutput | None = None


def to_columns(records: Sequence[RecordedRow]) -> dict[str, np.ndarray]:
    """Return records as columns of JSON; `pop_records` restores them bit for bit."""
    turns, outputs = [_dump_turns(row.turns) for row in records], [_dump_output(row.output) for row in records]
    return {TURNS_COLUMN: np.array(turns, dtype=object), OUTPUT_COLUMN: np.array(outputs, dtype=object)}


def pop_records(columns: dict[str, np.ndarray]) -> list[RecordedRow]:
    """Remove the columns of `to_columns`, and return the records.

    Turns of an earlier version of this library have other keys: their responses begin anew.
    """
    turns = columns.pop(TURNS_COLUMN)
    outputs = columns.pop(OUTPUT_COLUMN, ["null"] * len(turns))
    return [RecordedRow(_load_turns(one), _load_output(output)) for one, output in zip(turns, outputs, strict=True)]


def _dump_turns(turns: Mapping[str, TokenOutput]) -> str:
    return json.dumps(
        [[k, t.token_ids, t.log_probs, t.finish_reason, t.version, t.mixed, t.routes] for k, t in turns.items()],
        default=_plain,
    )


def _load_turns(text: str) -> dict[str, TokenOutput]:
    return {
        key: TokenOutput(key, token_ids, log_probs, finish_reason, version, tuple(mixed), routes=_routes_from(routes))
        for key, token_ids, log_probs, finish_reason, version, mixed, *routes in json.loads(text)
    }


def _dump_output(output: AgentLoopOutput | None) -> str:
    values = None if output is None else asdict(output)
    return json.dumps(values, default=_plain)


def _plain(value: Any) -> Any:
    """Return an array, or a number of numpy or torch, as JSON has it."""
    return array_of(value).tolist()


def _load_output(text: str) -> AgentLoopOutput | None:
    values = json.loads(text)
    return None if values is None else _output_from(values)


def _output_from(values: dict[str, Any]) -> AgentLoopOutput:
    branches = [_output_from(one) for one in values["branches"]]
    objects = {"routes": _routes_from([values.get("routes")]), "images": _images_from(values.get("images"))}
    return AgentLoopOutput(**values | {"branches": branches} | objects)


def _images_from(stored: dict[str, Any] | None) -> RowImages | None:
    """Return stored images; earlier versions have stored none."""
    if stored is None:
        return None
    parts = tuple(np.array(part, dtype=np.float32) for part in stored.pop("pixel_values"))
    arrays = {name: np.array(values, dtype=np.int64) for name, values in stored.items()}
    return cast(RowImages, {"pixel_values": parts, **arrays})


def _routes_from(stored: list[Any]) -> np.ndarray | None:
    """Return stored routes; earlier versions have stored none."""
    return None if not stored or stored[0] is None else np.array(stored[0], dtype=np.int16)
