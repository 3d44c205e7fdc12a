"""Events within a task: listeners, labels, and what a process without peers has in place of them."""

from collections.abc import Callable
from typing import Any

ListenerFn = Callable[..., Any]
ROUTERS: list[Any] = []  # the router to the peers of this process, in a process that has loaded `framework.parallel`
