"""Loading a tokenizer: a path that is none is refused at once."""

import os
import subprocess
import sys
import time

import pytest

from hybridrl.errors import ConfigError
from hybridrl.trainer.tokenizer import load_tokenizer


def test_a_directory_is_loaded_and_pads_on_the_left(tiny_qwen2):
    assert load_tokenizer(str(tiny_qwen2), key="model.path").padding_side == "left"


@pytest.mark.parametrize("path", ["nope/model", "nope", "no pe"])
def test_what_is_neither_a_directory_nor_a_model_is_named_with_its_key(path):
    with pytest.raises(ConfigError, match=f"^critic.model.path={path}: there is no such directory, and as a name of the Hugging Face hub"):
        load_tokenizer(path, key="critic.model.path")


def test_a_hub_that_does_not_answer_is_asked_once():
    code = "from hybridrl.trainer.tokenizer import load_tokenizer\nload_tokenizer('nope/model', key='model.path')"
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=100, capture_output=True, text=True)
    assert "there is no such directory" in done.stderr.splitlines()[-1] and "Retrying" not in done.stderr
    assert time.monotonic() - started < 20  # mostly the import of transformers; the client's own retries take over 20 s


def test_a_directory_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer can be loaded from it"):
        load_tokenizer(str(tmp_path), key="model.path")
