"""The names users import to write worker methods: `register`, `Dispatch`, `Execute` and the dispatch modes."""

from hybridrl.single_controller.dispatch import (
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from hybridrl.single_controller.invocation import MAGIC_ATTR, Dispatch, Execute, Invocation, register

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
