"""hybridrl: reinforcement-learning post-training of language models.

Importing this package imports no third-party module. `DataProto` is loaded on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto, DataProtoFuture, DataProtoItem

__version__ = "0.1.0"
__all__ = ["DataProto", "DataProtoFuture", "DataProtoItem", "__version__"]


def __getattr__(name: str):
    if name in ("DataProto", "DataProtoFuture", "DataProtoItem"):
        return getattr(import_module("hybridrl.protocol"), name)
    raise AttributeError(f"module 'hybridrl' has no attribute {name!r}")
