"""`reward_model.limits`: what one process of a reward function may use, and which variables it sees."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.system.child_process import ProcessLimits
from hybridrl.system.machine import memory_bytes

KEY = "reward_model.limits"
MEMORY_SHARE = 0.5  # of the machine, for all reward processes together, where memory_mb is not set
LEAST_MEMORY_MB = 1024  # of a share: Python with numpy and a parser needs some hundred

# Variables that programs need to find their files, and to use the machine as told. None of them holds a secret.
VARIABLES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"),
    *("CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("TORCH_HOME", "NLTK_DATA", "TOKENIZERS_PARALLELISM"),
}
PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_")


@dataclass(frozen=True)
class RewardLimits:
    """The limits of one process that runs reward functions.

    Attributes:
        memory_mb: Data of each process; null: half of the machine's memory, divided by the number of reward processes.
        file_mb: Size of each file that it writes.
        processes: Processes at the same time, that of the reward function included.
        output_mb: Output that reaches the run's; more is dropped.
        env: Names of environment variables that it sees besides `VARIABLES` and `PREFIXES`, such as a judge's key.
    """

    memory_mb: float | None = None
    file_mb: float = 4096
    processes: int = 64
    output_mb: float = 16
    env: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, key: str = KEY) -> "RewardLimits":
        """Return the limits in the setting `key`.

        Raises:
            ConfigError: An unknown name, or a value that is none.
        """
        known = [entry.name for entry in fields(cls)]
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(f"{key}.{name}: there is no such limit; there are {', '.join(known)}")
            if name == "env":
                _require_names(value, key)
            elif not (name == "memory_mb" and value is None) and not _is_limit(value, whole=name == "processes"):
                rule = "a whole number above 0" if name == "processes" else "a number above 0"
                raise ConfigError(f"{key}.{name}={value!r}: must be {rule}")
        return cls(**{**settings, "env": tuple(settings.get("env", ()))})

    def resolved(self, num_processes: int) -> "RewardLimits":
        """Return the limits with the memory of each of `num_processes` processes."""
        if self.memory_mb is not None:
            return self
        share = int(memory_bytes() * MEMORY_SHARE / num_processes) >> 20
        return replace(self, memory_mb=max(LEAST_MEMORY_MB, share))

    def of_process(self) -> ProcessLimits:
        """Return the limits that the operating system and the guard keep."""
        return ProcessLimits(
            memory_mb=self.memory_mb, file_mb=self.file_mb, processes=self.processes, output_mb=self.output_mb
        )

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return those of the variables that a reward process sees."""
        allowed = VARIABLES | set(self.env)
        return {name: value for name, value in variables.items() if name in allowed or name.startswith(PREFIXES)}


def _is_limit(value: Any, *, whole: bool) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < float("inf")


def _require_names(value: Any, key: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"{key}.env={value!r}: must be a list of names of environment variables")
