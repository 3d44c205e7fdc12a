"""What vLLM changes in the process that it runs in, put back."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def process_left_alone() -> Iterator[None]:
    """Undo what vLLM changes around itself.

    It seeds and draws from the global generators, switches grad mode, replaces `torch.set_num_threads`, and sets
    variables that child processes and torch.distributed would inherit (LD_PRELOAD, LOCAL_WORLD_SIZE); its own VLLM_*
    variables stay.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    environment = dict(os.environ)
    try:
        with torch.random.fork_rng(devices=_cuda_device()), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            set_num_threads(num_threads)
        for key in set(os.environ) | set(environment):
            if not key.startswith("VLLM_"):
                _restore(key, environment.get(key))


def _cuda_device() -> list[int]:
    """Return the CUDA device of this process, whose random state is to be kept; none where CUDA is not in use."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def _restore(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    elif os.environ.get(key) != value:
        os.environ[key] = value
