"""Answers to the page's requests: a run and the parameters of a request -> plain data.

Called by `server` in a thread, with the run's lock held. A parameter that does not fit raises BadRequest.
"""

import math
from collections.abc import Callable
from typing import Any

from multidict import MultiMapping

from hybridrl.view.graph_picture import graph_picture
from hybridrl.view.readers.samples import Place, SampleQuery
from hybridrl.view.readers.settings import SAMPLE_SETTINGS
from hybridrl.view.runs import Run

Query = MultiMapping[str]
MAX_NAMES = 50  # metrics in one request


class BadRequest(Exception):
    """A request that cannot be answered.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, text: str, *, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def metric_names(run: Run, query: Query) -> dict[str, Any]:
    """Return the metrics of the run, with their last values."""
    run.metrics.update()
    return {"metrics": run.metrics.names(), "rows": len(run.metrics), "revision": run.metrics.revision}


def series(run: Run, query: Query) -> dict[str, Any]:
    """Return the curves of the metrics `name`; with `since` and `revision` of an earlier answer only what is new."""
    run.metrics.update()
    names = query.getall("name", [])
    if len(names) > MAX_NAMES:
        raise BadRequest(f"name: at most {MAX_NAMES} at once")
    continues = _number(query, "revision", -1) == run.metrics.revision
    since = int(_number(query, "since", 0)) if continues else 0
    return {
        "revision": run.metrics.revision,
        "rows": len(run.metrics),
        "since": since,
        "series": {name: run.metrics.series(name, since=since) for name in names},
    }


def samples(run: Run, query: Query) -> dict[str, Any]:
    """Return a page of samples."""
    kind = query.get("kind", "rollout")
    if kind not in SAMPLE_SETTINGS:
        raise BadRequest(f"kind={kind}: there are {', '.join(SAMPLE_SETTINGS)}")
    wanted = SampleQuery(
        text=query.get("text", ""),
        prompt=_prompt(query.get("prompt", "")),
        lowest=_number(query, "lowest", -math.inf),
        highest=_number(query, "highest", math.inf),
        first=int(_number(query, "first", 0)),
        last=int(_number(query, "last", 10**15)),
        ascending=query.get("ascending") == "true",
    )
    store = run.samples(kind)
    answer = store.page(wanted, after=_place(query.get("after", "")), limit=max(1, int(_number(query, "limit", 20))))
    steps = store.steps()
    found = {"steps": [steps[0], steps[-1]] if steps else None, "setting": SAMPLE_SETTINGS[kind]}
    return answer | found


def tokens(run: Run, query: Query) -> dict[str, Any]:
    """Return the tokens of one sample; `tokens` is null if the run did not record them."""
    return {"tokens": run.samples("rollout").tokens(int(_number(query, "step", 0)), query.get("id", ""))}


def timeline(run: Run, query: Query) -> dict[str, Any]:
    """Return the timeline of the steps `first` to `last`."""
    first, last = (int(_number(query, name, -1)) for name in ("first", "last"))
    return run.timeline.window(
        job=query.get("job", ""), first=None if first < 0 else first, last=None if last < 0 else last
    )


def graph(run: Run, query: Query) -> bytes:
    """Return the picture of the stages as SVG."""
    picture = graph_picture(run.settings.values())
    if isinstance(picture, str):
        raise BadRequest(picture, status=404)
    return picture


UNLOCKED = ("graph.svg",)  # takes seconds in a process of its own
VIEWS: dict[str, Callable[[Run, Query], Any]] = {
    "metrics": metric_names,
    "series": series,
    "samples": samples,
    "tokens": tokens,
    "settings": lambda run, query: run.settings.table(),
    "timeline": timeline,
    "failures": lambda run, query: run.failures.read(),
    "ledger": lambda run, query: run.ledger.read(),
    "graph.svg": graph,
}


def _number(query: Query, name: str, default: float) -> float:
    text = query.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or abs(number) > 1e15:
        raise BadRequest(f"{name}={text}: must be a number")
    return number


def _prompt(text: str) -> str:
    if text and not (len(text) == 16 and all(letter in "0123456789abcdef" for letter in text)):
        raise BadRequest(f"prompt={text}: must be the 16 digits of prompt_id of a sample")
    return text


def _place(text: str) -> Place | None:
    parts = text.split(",") if text else []
    if not text:
        return None
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        raise BadRequest(f"after={text}: must be three numbers, `next` of an earlier answer")
    step, part, row = map(int, parts)
    return step, part, row
