"""`reward_model.limits`: what one process of a reward function may use, and which variables it sees."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.config.build import from_section
from hybridrl.config.fields import setting
from hybridrl.system.child_process import ProcessLimits
from hybridrl.system.machine import memory_bytes

KEY = "reward_model.limits"
MEMORY_SHARE = 0.5  # of the machine, for all reward processes together, where memory_mb is not set
MAX_MB = 1e9
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
    """The limits of one process that runs reward functions."""

    memory_mb: float | None = setting(
        None,
        "Data of each process; null: half of the machine's memory, divided by the number of reward processes.",
        gt=0,
        le=MAX_MB,
    )
    file_mb: float = setting(4096, "Size of each file that it writes.", gt=0, le=MAX_MB)
    processes: int = setting(64, "Processes at the same time, that of the reward function included.", gt=0)
    output_mb: float = setting(16, "Output that reaches the run's; more is dropped.", gt=0, le=MAX_MB)
    env: list[str] = setting(
        [], "Environment variables that it sees besides `VARIABLES` and `PREFIXES`, such as a judge's key."
    )

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, key: str = KEY) -> "RewardLimits":
        """Return the limits in the setting `key`.

        Raises:
            ConfigError: An unknown name, or a value that is none.
        """
        return from_section(cls, settings, key=key)

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
