"""Gives a program the names that judges of its data set import before it.

They are modules of Python, and what is in them. A program without its imports then runs as it does there. The names
join Python's builtins, and replace none of them. So the program's own names hide them, its line numbers stay, and it
may begin with `from __future__`.
"""

import builtins
import importlib

# Of a name in several modules, the first one counts: collections.Counter, not typing.Counter.
MODULES = "json sys io operator functools itertools statistics random math copy bisect heapq collections datetime re"
FOUND = {name: importlib.import_module(name) for name in (*MODULES.split(), "string", "typing")}

vars(builtins).update(FOUND)
for module in FOUND.values():
    for name in getattr(module, "__all__", dir(module)):
        if not name.startswith("_"):
            vars(builtins).setdefault(name, getattr(module, name))
