"""Values as plain JSON, so that what a program returns is data wherever it is read.

None, booleans, numbers and texts are themselves, a list is a list; every other value is {"kind": ..., "value": ...}.
An object of another type stays where it is. It is named by the number of the call that returned it: a reference.
"""

import itertools

MAX_ITEMS = 100_000  # of an iterator, which may have no end


class Reference:
    """What call number `call` returned, if that cannot be sent."""

    def __init__(self, call):
        self.call = call


def encode(value):
    """Return a value as JSON. Raises TypeError for an object of another type."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    for name, (kind, parts) in PARTS.items():
        if isinstance(value, kind):
            return {"kind": name, "value": parts(value)}
    if hasattr(value, "__next__"):
        return {"kind": "iterator", "value": _encoded(itertools.islice(value, MAX_ITEMS))}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _encoded(items):
    return [encode(item) for item in items]


PARTS = {
    "dict": (dict, lambda found: [[encode(key), encode(item)] for key, item in found.items()]),
    "tuple": (tuple, _encoded),
    "set": (set, _encoded),
    "frozenset": (frozenset, _encoded),
    "bytes": (bytes, bytes.hex),
    "complex": (complex, lambda found: [found.real, found.imag]),
    "range": (range, lambda found: [found.start, found.stop, found.step]),
    "reference": (Reference, lambda found: found.call),
}
CONSTRUCTORS = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
    "dict": lambda pairs: {key: item for key, item in pairs},
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
}


def decode(value, look_up=Reference):
    """Return the value of its JSON. `look_up`: gives what a call returned, by its number."""
    if isinstance(value, list):
        return [decode(item, look_up) for item in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value["kind"], value["value"]
    if kind == "reference":
        return look_up(inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    return CONSTRUCTORS[kind]([decode(item, look_up) for item in inner])
