"""`DataProtoConfig.auto_padding`, verl's switch: whether `chunk` may return chunks of different sizes."""

import os

AUTO_PADDING_KEY = "_verl_auto_padding"


class _AutoPadding(type):
    """Metaclass that makes `auto_padding` a property of the class itself."""

    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("1", "TRUE")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """Process-wide settings of `DataProto`.

    `auto_padding`: every batch of this process may be chunked unevenly. VERL_AUTO_PADDING=1 sets it too.
    """
