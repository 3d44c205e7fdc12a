"""The service's directory: sessions, and weights under their `tinker://` paths.

    sessions/SESSION/session.json
    sessions/SESSION/models/N/           a model's ledger
    sessions/SESSION/samplers/N/         weights of a sampling session that have no name
    weights/MODEL_ID/KIND/NAME/          named weights, with an entry in `note`
    curves/MODEL_ID/metrics.jsonl        a model's steps, for `hybridrl view STORE`

`tinker://MODEL_ID/KIND/NAME` reaches no other part of the file system: ids are the service's, names are checked. The
service calls it. The training worker writes and reads what is in the directories.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError, DataError
from hybridrl.system.atomic_write import atomic_write

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MODEL_ID = re.compile(r"[0-9a-f]{16}:train:[0-9]{1,9}")
ENTRY = "note"
MIN_TTL_S, MAX_TTL_S = 1, 10 * 366 * 24 * 3600


@dataclass(frozen=True)
class Entry:
    """What the service knows about named weights.

    Attributes:
        owner: The tenant.
        request: The operation that wrote them.
        time: Of writing, in seconds since 1970.
        expires_at: The same unit; None: never.
        metadata: The client's.
    """

    owner: str
    request: str
    time: float
    base_model: str
    rank: int
    expires_at: float | None = None
    metadata: dict[str, str] | None = None
    train: dict[str, bool] = field(default_factory=dict)


class NotFound(DataError):
    """There is no such thing, or it is another tenant's."""


class Store:
    """The directory of a service, which is created if it is missing."""

    def __init__(self, root: Path):
        self.root = root
        for name in ("sessions", "weights"):
            try:
                (root / name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--store={root}: cannot be written ({error.strerror}); name another one") from error

    def session(self, session_id: str) -> Path:
        """Return the directory of a session."""
        return self.root / "sessions" / session_id

    def curves(self, model_id: str) -> Path:
        """Return the directory of a model's curves."""
        return self.root / "curves" / model_id

    def place(self, model_id: str, kind: str, name: Any) -> Path:
        """Return the directory of named weights. Raises DataError for a name that is none."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise DataError(f"path={name!r}: a name has letters, digits, '.', '_' and '-', and at most 200 of them")
        if not MODEL_ID.fullmatch(model_id) or kind not in KINDS:
            raise NotFound(f"there is no {SCHEME}{model_id}/{kind}/{name}")
        return self.root / "weights" / model_id / kind / name

    def find(self, path: Any, *, owner: str) -> tuple[Path, Entry]:
        """Return the directory of a `tinker://` path, and its entry.

        Raises:
            NotFound: There are no such weights, they have expired, or they are another tenant's.
        """
        parts = str(path).removeprefix(SCHEME).split("/")
        if not str(path).startswith(SCHEME) or len(parts) != 3:
            raise DataError(f"{path!r} is no path of weights; they have the form {SCHEME}MODEL_ID/weights/NAME")
        place = self.place(*parts)
        entry = read_entry(place)
        if entry is None or entry.owner != owner or _has_expired(entry):
            raise NotFound(f"there are no weights {path}")
        return place, entry

    def listed(self, *, owner: str, model_id: str | None = None) -> Iterator[tuple[str, Path, Entry]]:
        """Yield path, directory and entry of a tenant's named weights, newest first."""
        if model_id is not None and not MODEL_ID.fullmatch(model_id):
            return  # a pattern, or a path, would read the file system
        pattern = f"{model_id or '*'}/*/*"
        found = []
        for place in (self.root / "weights").glob(pattern):
            entry = None if place.name.startswith(".") else read_entry(place)
            if entry is not None and entry.owner == owner and not _has_expired(entry):
                found.append((f"{SCHEME}{place.parent.parent.name}/{place.parent.name}/{place.name}", place, entry))
        yield from sorted(found, key=lambda one: -one[2].time)

    def delete(self, path: Any, *, owner: str) -> None:
        """Delete named weights. Raises NotFound."""
        shutil.rmtree(self.find(path, owner=owner)[0])

    def set_ttl(self, path: Any, ttl_seconds: Any, *, owner: str) -> None:
        """Let named weights expire so many seconds from now; None: never. Raises NotFound."""
        place, entry = self.find(path, owner=owner)
        write_entry(place, replace(entry, expires_at=expiry(ttl_seconds)))

    def remove_expired(self) -> int:
        """Delete weights whose time is over and return how many."""
        places = [place for place in (self.root / "weights").glob("*/*/*") if not place.name.startswith(".")]
        over = [place for place in places if (entry := read_entry(place)) is not None and _has_expired(entry)]
        for place in over:
            shutil.rmtree(place, ignore_errors=True)
        return len(over)

    def used_bytes(self, *, owner: str) -> int:
        """Return the size of a tenant's named weights."""
        return sum(size_of(place) for _, place, _ in self.listed(owner=owner))


def size_of(place: Path) -> int:
    """Return the bytes of the files in a directory."""
    return sum(file.stat().st_size for file in place.iterdir() if file.is_file())


def expiry(ttl_seconds: Any) -> float | None:
    """Return when something expires that lives so many seconds; None: never. Raises DataError out of range."""
    if ttl_seconds is None:
        return None
    if not isinstance(ttl_seconds, int | float) or not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise DataError(f"ttl_seconds={ttl_seconds!r}: must be from {MIN_TTL_S} to {MAX_TTL_S}, or null for no end")
    return time.time() + ttl_seconds


def _has_expired(entry: Entry) -> bool:
    return entry.expires_at is not None and entry.expires_at <= time.time()


def read_entry(place: Path) -> Entry | None:
    """Return the entry of named weights; None if there are none."""
    try:
        return Entry(**json.loads((place / ENTRY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def entry_text(entry: Entry) -> str:
    """Return an entry as it is stored beside the weights."""
    return json.dumps(asdict(entry))


def write_entry(place: Path, entry: Entry) -> None:
    """Replace the entry of named weights."""
    with atomic_write(place / ENTRY) as file:
        file.write(entry_text(entry))


def described(path: str, place: Path, entry: Entry) -> dict[str, Any]:
    """Return named weights as the API lists them."""
    kind, name = path.split("/")[-2:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": iso(entry.time),
        "tinker_path": path,
        "size_bytes": size_of(place),
        "public": False,
        "user_metadata": entry.metadata,
        "expires_at": None if entry.expires_at is None else iso(entry.expires_at),
    }


def iso(seconds: float) -> str:
    """Return a time in seconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
