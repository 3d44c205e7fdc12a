"""The programs of docs/training_service.md run as they stand there, with another model's directory."""

import re
from pathlib import Path

import pytest

from hybridrl.training_service.client import OperationFailed, datum, training_client

PAGE = Path(__file__).parents[2] / "docs" / "training_service.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_program_of_the_page_trains_and_samples(tiny_qwen2, tmp_path, capsys):
    [program] = [program for program in PROGRAMS if "import training_client" in program]
    named = program.replace("data/service/model", str(tiny_qwen2)).replace(
        "data/service/store", str(tmp_path / "store")
    )
    exec(named, {})
    *losses, samples = capsys.readouterr().out.splitlines()[-21:]
    assert float(losses[-1]) < float(losses[0]) / 2
    assert re.fullmatch(r"\[\d+(, \d+){0,7}\]", samples)


def test_a_client_has_a_session_that_ends_with_the_block(tiny_qwen2, tmp_path):
    options = {"store": str(tmp_path / "store"), "device": "cpu", "num_threads": 1}
    with training_client(str(tiny_qwen2), **options) as client:
        model = client.create_model(rank=4)
        path = model.save("kept")
        exported = model.export("adapters")
        place, _ = client.service.store.find(exported, owner="local")
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in place.iterdir()}
        with pytest.raises(OperationFailed, match="kept exists"):
            model.save("kept")
    with training_client(str(tiny_qwen2), **options) as client:
        assert client.load(path).forward([datum([20, 21], [21, 22])]).loss > 0
