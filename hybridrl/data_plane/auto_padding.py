"""`DataProtoConfig.auto_padding`: whether batches may be chunked into pieces of different size (verl's switch)."""

import os

AUTO_PADDING_KEY = "_verl_auto_padding"


class _AutoPadding(type):
    """Makes `auto_padding` readable and settable on the class itself."""

    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("1", "TRUE")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """`auto_padding`: every batch of this process may be chunked unevenly (also by the environment variable
    VERL_AUTO_PADDING=1).
    """
