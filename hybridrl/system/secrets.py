"""Settings whose names look like secrets: their values are in no file and no logger of a run.

Such as `custom_reward_function.kwargs.api_key`. The program that was started has the value; a file has `HIDDEN`.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(not saved)"  # instead of a value that looks like a secret
SECRET = r"(?:[a-z0-9_]*_)?(?:api_?key|access_?key|secret(?:_key)?|token|password|passwd|credentials?)"
SECRET_NAME = re.compile(SECRET, re.IGNORECASE)
SECRET_SETTING = re.compile(rf"(?P<key>[+~]*(?:[^=]*\.)?{SECRET})=.", re.IGNORECASE)
SECRET_ENTRY = re.compile(rf"(?P<key>[^=]*)=.*[{{,\s'\"]{SECRET}['\"]?\s*:", re.IGNORECASE | re.DOTALL)


def without_secret(word: str) -> str:
    """Return a word of a command line, a value that looks like a secret as `HIDDEN`."""
    found = SECRET_SETTING.match(word) or SECRET_ENTRY.match(word)
    return f"{found['key']}={HIDDEN}" if found else word


def without_secrets(value: Any) -> Any:
    """Return nested settings with `HIDDEN` as every value, except null, whose name looks like a secret."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _is_secret(name, entry) else without_secrets(entry) for name, entry in value.items()}
    return [without_secrets(entry) for entry in value] if isinstance(value, list) else value


def _is_secret(name: Any, value: Any) -> bool:
    return value is not None and isinstance(name, str) and SECRET_NAME.fullmatch(name) is not None
