"""Error messages for unknown keys: why it was removed, the renamed key, a reason, or the nearest one.

`REMOVED` has the keys of earlier versions, `verl/table.py` what is known of verl's keys. A suggestion for any other
key is made only if it is nearly certain: a wrong one costs more than none.
"""

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher

from hybridrl.config.verl.table import rows_of

MIN_SIMILARITY = 0.6  # of names of plugs: below it a suggestion confuses more than it helps
MIN_MOVED = 0.8  # of whole keys with the same last part, such as actor.temperature and rollout.temperature
MIN_TYPED = 0.85  # of whole keys and of their last parts: one or two letters are wrong
MAX_SUGGESTIONS = 3
MAX_LISTED = 25  # keys of a section in an error
REMOVED: Mapping[str, str] = {
    "trainer.standby": "was removed: it kept a second copy of all libraries in memory on every node to save seconds of "
    "a recovery; leave it out, a lost worker is started again without it",
    "trainer.hybrid_rollout": "was removed: on 8 to 1024 devices it made simulated steps at most 2 % faster; leave it "
    "out, and give the rollout's pool more of the devices (actor_rollout_ref.rollout.n_gpus_per_node)",
}
"""Dotted key to "was removed: REASON; WAY OUT". A key stands for those below it, too. Nothing else has the same key."""
ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "num_generations": "rollout.n",
    "max_completion_length": "data.max_response_length",
    "max_steps": "trainer.total_training_steps",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.default_local_dir",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
}
"""Names of other libraries -> the end of the keys here."""
DEFAULTS: Mapping[str, object] = {"trainer.standby": False, "trainer.hybrid_rollout": False}
"""Removed settings at the value that asked for nothing: files with settings that earlier versions saved have them."""


def suggest_key(name: str, known: Collection[str]) -> str:
    """Return the error message for a key that is not in `known`."""
    if gone := removal(name):
        return f"{name}: {gone}"
    for key, row in rows_of(name):
        ours = [target + name[len(key) :] for target in row.to]
        if ours and all(target in known for target in ours):
            return f"{name}: there is no such key; here it is {' and '.join(ours)}"
        if not ours:
            return f"{name}: there is no such key here: {row.text}"
    if ours := [key for key in known if f".{key}".endswith(f".{ELSEWHERE.get(name)}")]:
        return f"{name}: there is no such key; here it is {' or '.join(sorted(ours))}"
    if near := nearest_keys(name, known):
        return f"{name}: there is no such key; did you mean {' or '.join(near)}?"
    section = name.rpartition(".")[0]
    is_listed = bool(section) or not any("." in key for key in known)
    beside = sorted(key.rpartition(".")[2] for key in known if is_listed and key.rpartition(".")[0] == section)
    listed = f"{section} has" if section else "there are"
    hint = f"{listed} {', '.join(beside)}" if 0 < len(beside) <= MAX_LISTED else "--help lists all keys"
    return f"{name}: there is no such key; {hint}"


def removal(name: str) -> str | None:
    """Return why the setting `name`, or the group that it was in, is gone; None if no version had it."""
    above = (name[:dot] for dot, letter in enumerate(f"{name}.") if letter == ".")
    return next((REMOVED[key] for key in above if key in REMOVED), None)


def asks_nothing(name: str, value: object) -> bool:
    """Return whether this is a removed setting with the value that it had unless it was set."""
    return name in DEFAULTS and DEFAULTS[name] == value


def nearest_keys(name: str, known: Collection[str]) -> list[str]:
    """Return the keys of `known` that `name` may mean: another section, a missing one, or a typing error."""
    section, _, leaf = name.rpartition(".")
    moved = [
        key for key in known if key.rpartition(".")[2] == leaf and (not section or _similarity(name, key) >= MIN_MOVED)
    ]
    if len(moved) == 1:
        return moved
    likeness = {key: min(_similarity(name, key), _similarity(leaf, key.rpartition(".")[2])) for key in known}
    mistyped = [key for key in known if likeness[key] >= MIN_TYPED]
    return sorted(mistyped, key=lambda key: -likeness[key])[:1]


def nearest_names(name: str, known: Collection[str]) -> list[str]:
    """Return the names of `known` that are most similar to `name`, the nearest first; none if none is near."""
    likeness = {candidate: _similarity(name, candidate) for candidate in known}
    ranked = sorted(known, key=lambda candidate: -likeness[candidate])[:MAX_SUGGESTIONS]
    best = likeness[ranked[0]] if ranked else 0.0
    return [candidate for candidate in ranked if likeness[candidate] >= max(MIN_SIMILARITY, best - 0.1)]


def _similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def suggest_name(name: str, known: Collection[str]) -> str:
    """Return the hint for an unregistered plugin name: the nearest name, and all known ones."""
    near = nearest_names(name, known)
    return (f"did you mean {near[0]}? " if near else "") + f"known are {', '.join(sorted(known))}"
