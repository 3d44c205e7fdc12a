"""Preserve the state of the worker process around calls into vLLM.

`VLLMRollout` and `VLLMRequestEngine` wrap every such call. Not covered: what vLLM keeps for itself, such as its VLLM_*
variables.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore the process state that vLLM changes.

    vLLM seeds and draws from the global generators, switches grad mode, and replaces `torch.set_num_threads`. It also
    sets variables that child processes and torch.distributed would inherit (LD_PRELOAD, LOCAL_WORLD_SIZE). Its own
    VLLM_* variables stay.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    environment = dict(os.environ)
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            set_num_threads(num_threads)
        for key in set(os.environ) | set(environment):
            if not key.startswith("VLLM_"):
                _restore_variable(key, environment.get(key))


def _restore_variable(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    elif os.environ.get(key) != value:
        os.environ[key] = value
