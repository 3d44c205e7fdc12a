"""DI-engine's `ding_init`: what a program does once before its loop."""

import logging
from pathlib import Path
from typing import Any


def ding_init(cfg: Any) -> Path:
    """Create the folder of the experiment and show log lines from INFO on.

    DI-engine also opens a TensorBoard writer there. Here a stage of the program writes what it wants to keep.

    Args:
        cfg: Settings with the attribute or key `exp_name`, the folder.

    Returns:
        The folder.

    Raises:
        ValueError: `cfg` has no `exp_name`.
    """
    name = cfg.get("exp_name") if hasattr(cfg, "get") else getattr(cfg, "exp_name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"ding_init: cfg.exp_name={name!r} must be the folder of the experiment")
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO)
    return folder
