"""A GGUF file as a model: its weights bit by bit, one conversion for all, and one line about a bad file."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import DPOConfig, PPOConfig, gguf_models, load_config
from hybridrl.config.gguf_models import conversion_folder, model_folder
from hybridrl.config.load import compose_settings
from hybridrl.errors import ConfigError, model_errors
from tests.support.gguf_file import HEADS, KV_HEADS, unpermuted, write_gguf

CONVERT = "import sys; from hybridrl.config import model_folder; print(model_folder(sys.argv[1], key='model.path'))"
TIMEOUT_S = 200.0
MESSAGES = [{"role": "user", "content": "How many pens has Tom? 3 + 4 = 7, ök"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """HF_HOME of these tests."""
    return tmp_path_factory.mktemp("hf_home")


@pytest.fixture(autouse=True)
def own_home(home, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home))


@pytest.fixture(scope="module")
def tokenizer(tiny_qwen2):
    return AutoTokenizer.from_pretrained(tiny_qwen2)


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tokenizer)


@pytest.fixture
def folder(file) -> Path:
    return Path(model_folder(str(file), key="model.path"))


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        model_folder(str(path), key="model.path")
    assert "\n" not in str(caught.value)
    place = conversion_folder(path).parent
    assert not [left for left in place.glob("*") if path.stem in left.name]
    return str(caught.value)


def test_every_weight_is_what_gguf_itself_dequantises_bit_by_bit(file, folder):
    from gguf import GGUFReader, dequantize

    written = load_file(folder / "model.safetensors")
    names = {"token_embd": "embed_tokens", "output_norm": "norm"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    kinds = set()
    for tensor in GGUFReader(file).tensors:
        *layer, name, _ = tensor.name.split(".")
        weights = dequantize(tensor.data, tensor.tensor_type)
        if heads := {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name):
            weights = unpermuted(weights, heads)
        found = written.pop(".".join(["model", *(["layers", layer[1]] if layer else []), names[name], "weight"]))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), weights.view(np.uint32))
        kinds.add(tensor.tensor_type.name)
    assert kinds == {"Q4_1", "Q8_0", "F32"}
    assert not written  # the head is the embedding


def test_the_folder_is_a_plain_model_that_transformers_loads(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (HEADS, KV_HEADS)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_tokenizer_is_the_files_with_its_chat_template(folder, tokenizer):
    found = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert found.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == text
    ids = found(text, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found.decode(ids) == text
    assert (found.eos_token_id, found.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_a_second_call_finds_the_folder_also_of_a_moved_file(file, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")  # no conversion can start
    moved = shutil.copy(file, tmp_path / "tiny.gguf")
    assert model_folder(str(file), key="model.path") == model_folder(str(moved), key="model.path") == str(folder)


def test_a_file_with_another_content_has_another_folder(file, folder, tmp_path):
    changed = tmp_path / "tiny.gguf"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    assert conversion_folder(changed) != folder


@pytest.mark.slow
def test_two_processes_at_once_get_the_same_complete_folder(file, tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", CONVERT, str(file)], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    first, second = (process.communicate(timeout=TIMEOUT_S)[0].strip() for process in started)
    assert first == second and os.listdir(Path(first).parent) == [Path(first).name]
    assert AutoModelForCausalLM.from_pretrained(first).config.num_hidden_layers == 2


@pytest.mark.slow
def test_after_a_kill_in_the_middle_nothing_is_found_and_the_next_call_converts(file, tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    place = tmp_path / "hybridrl" / "gguf"
    process = subprocess.Popen([sys.executable, "-c", CONVERT, str(file)], env=environment)
    deadline = time.monotonic() + TIMEOUT_S
    while not list(place.glob(".tiny-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)
    (left,) = os.listdir(place)
    assert left.startswith(".")
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(file)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert os.listdir(place) == [Path(done.stdout.strip()).name]


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("version https://git-lfs")
    assert "is not a GGUF file: it begins with b'vers'" in refusal(path)


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match=r"^model.path=/no/x.gguf: the file cannot be read \(No such file"):
        model_folder("/no/x.gguf", key="model.path")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_file_that_was_cut_off_is_refused(file, tmp_path, share):
    path = tmp_path / "cut.gguf"
    content = file.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "the GGUF file is damaged or cut off" in refusal(path)


def test_a_list_that_is_longer_than_the_file_is_refused_and_not_read_for_ever(tmp_path):
    path = tmp_path / "long.gguf"
    list_of_numbers = struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**60)  # key, "is a list of uint32", length
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + list_of_numbers)
    assert "the GGUF file is damaged or cut off (ValueError: it ends before byte 49)" in refusal(path)


def test_an_architecture_that_transformers_does_not_have_is_refused(tmp_path, tokenizer):
    path = write_gguf(tmp_path / "odd.gguf", tokenizer, architecture="starfish")
    assert "GGUF model with architecture starfish is not supported" in refusal(path)


def test_a_file_without_some_weights_is_refused(tmp_path, tokenizer):
    path = write_gguf(tmp_path / "part.gguf", tokenizer, without="blk.1.ffn_up.weight")
    assert "lacks 1 weights of its model, such as model.layers.1.mlp.up_proj.weight" in refusal(path)


def test_without_the_packages_the_extra_is_named(tmp_path, tokenizer, monkeypatch):
    path = write_gguf(tmp_path / "new.gguf", tokenizer, without="output_norm.weight")
    monkeypatch.setattr(gguf_models, "PACKAGES", ("gguf", "not_installed"))
    assert "this environment has no not_installed: pip install 'hybridrl[gguf]'" in refusal(path)


def test_a_full_disk_is_named(file, tmp_path, monkeypatch):
    (tmp_path / "blocked").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "blocked"))
    with pytest.raises(ConfigError, match="its conversion cannot be written to .*set HF_HOME"):
        model_folder(str(file), key="model.path")


def test_settings_get_the_folder_wherever_a_model_is_named(file, folder):
    words = [
        f"actor_rollout_ref.model.path={file}",
        f"critic.model.path={file}",
        f"+distillation.teacher_models.one.model_path={file}",
        "reward_model.model.path=some/name",
    ]
    config = load_config(PPOConfig, words, program="main_ppo", config_name="ppo_trainer")
    assert {config.actor_rollout_ref.model.path, config.critic.model.path} == {str(folder)}
    assert config.distillation.teachers() == {"one": str(folder)}
    assert config.reward_model.model.path == "some/name"
    other = load_config(DPOConfig, [f"model.path={file}"], program="main_dpo", config_name="dpo_trainer")
    composed = compose_settings(PPOConfig, {"actor_rollout_ref.model.path": str(file)}, config_name="ppo_trainer")
    assert other.model.path == composed.actor_rollout_ref.model.path == str(folder)


def test_the_error_of_a_bad_file_names_the_setting(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("text")
    words = [f"critic.model.path={path}"]
    with pytest.raises(ConfigError, match=f"^critic.model.path={path}: is not a GGUF file"):
        load_config(PPOConfig, words, program="main_ppo", config_name="ppo_trainer")


def test_a_worker_on_a_machine_without_the_folder_says_how_to_get_it(folder):
    away = f"/elsewhere/hybridrl/gguf/{folder.name}"
    with (
        pytest.raises(ConfigError, match="this machine has no such directory.*let HF_HOME name"),
        model_errors(away, "cannot read it"),
    ):
        raise OSError("no config.json")
