"""Adapters of somebody else: what `adapter_config.json` says is checked before anything starts."""

import pytest

from hybridrl.config.checks.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_saved_adapter
from hybridrl.errors import ConfigError

FINE = '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "(a+)+$", "auto_map": {"AutoModel": "x.py"}}'


def test_patterns_and_code_of_an_adapter_have_no_effect(tmp_path):
    (tmp_path / ADAPTER_CONFIG).write_text(FINE)
    (tmp_path / ADAPTER_WEIGHTS).touch()
    assert read_saved_adapter(str(tmp_path)).rank == 4


@pytest.mark.parametrize(
    "content",
    [
        FINE.replace("4", "0"),
        FINE.replace("4", "-4"),
        FINE.replace("8", "NaN"),
        FINE.replace("8", "1e999"),
        FINE.replace("8", "1" + "0" * 400),
        "[" * 100_000,
        "[1]",
        "{}",
    ],
    ids=range(8),
)
def test_numbers_that_no_adapter_has_are_one_line(tmp_path, content):
    (tmp_path / ADAPTER_CONFIG).write_text(content)
    (tmp_path / ADAPTER_WEIGHTS).touch()
    with pytest.raises(ConfigError, match="adapter_config.json of a LoRA adapter cannot be read"):
        read_saved_adapter(str(tmp_path))


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / ADAPTER_CONFIG).write_text(FINE)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ConfigError, match="has no adapter_model.safetensors"):
        read_saved_adapter(str(tmp_path))
