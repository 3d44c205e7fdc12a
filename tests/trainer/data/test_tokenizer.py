"""Loading a tokenizer: a wrong path is rejected without a long wait."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hybridrl.errors import ConfigError
from hybridrl.trainer.data.tokenizer import load_tokenizer


def test_a_directory_is_loaded_and_pads_on_the_left(tiny_qwen2):
    assert load_tokenizer(str(tiny_qwen2), key="model.path").padding_side == "left"


@pytest.mark.parametrize("path", ["nope/model", "nope", "no pe"])
def test_a_wrong_path_is_named_with_its_key(path):
    with pytest.raises(
        ConfigError,
        match=f"^critic.model.path={path}: no such directory.*Hugging Face hub",
    ):
        load_tokenizer(path, key="critic.model.path")


def test_a_failing_hub_gets_one_request():
    requests = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_error(503)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = (
            "from hybridrl.trainer.data.tokenizer import load_tokenizer\nload_tokenizer('nope/model', key='model.path')"
        )
        environment = os.environ | {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "NO_PROXY": "*",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, timeout=100, capture_output=True, text=True
        )
        server.shutdown()
    assert "model.path=nope/model: no such directory" in done.stderr.splitlines()[-1] and "Retrying" not in done.stderr
    assert len([path for path in requests if "nope/model" in path]) == 1


def test_a_directory_without_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer can be loaded from it"):
        load_tokenizer(str(tmp_path), key="model.path")


@pytest.mark.parametrize(("folder", "hint"), [("huggingface", "its model is "), ("actor", "hybridrl export ")])
def test_a_checkpoint_instead_of_a_model_gets_the_way_to_its_model(tmp_path, folder, hint):
    (tmp_path / folder).mkdir()
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: .*checkpoint of a run; .*{hint}"):
        load_tokenizer(str(tmp_path), key="model.path")


def test_a_config_with_a_billion_layers_is_refused_before_it_is_read(tiny_qwen2, tmp_path):
    model = shutil.copytree(tiny_qwen2, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (model / "config.json").write_text(json.dumps(settings))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"num_hidden_layers=1000000000; at most 10000"):
        load_tokenizer(str(model), key="model.path")
    assert time.monotonic() - began < 20


def test_a_directory_with_nothing_but_a_gguf_file_asks_for_the_file(tmp_path):
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError,
        match=f"model.path={tmp_path}: this directory has GGUF files only; name the file: {tmp_path}/a.gguf",
    ):
        load_tokenizer(str(tmp_path), key="model.path")
