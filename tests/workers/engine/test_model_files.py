"""A model is checked before anything starts: damaged files are named, and a vocabulary that is too small is refused."""

import json
import logging
import shutil
import struct

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.workers.engine.hf_model import overridden_config
from hybridrl.workers.engine.model_files import INDEX, check_model
from hybridrl.workers.rollout.base import load_special_tokens
from tests.support.workers.engine_cases import make_engine


@pytest.fixture
def model(tiny_qwen2, tmp_path):
    return shutil.copytree(tiny_qwen2, tmp_path / "model")


def test_a_whole_model_passes_and_so_does_a_name_of_the_hub(model):
    check_model(str(model), key="model.path", tokenizer=AutoTokenizer.from_pretrained(model))
    check_model("some/name", key="model.path")


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_header(data: bytes) -> bytes:
    return data[:100]


def with_broken_header(data: bytes) -> bytes:
    return data[:8] + b"\xff" + data[9:]


def with_endless_header(data: bytes) -> bytes:
    return struct.pack("<Q", 2**60) + data[8:]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, r"it has \d+ bytes, but its header says \d+"),
        (without_header, "its 100 bytes do not hold its header"),
        (with_broken_header, "its header cannot be read"),
        (with_endless_header, "do not hold its header"),
        (lambda data: b"", "its 0 bytes do not hold its header"),
    ],
)
def test_a_damaged_file_is_named_with_the_setting(model, damage, reason):
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=rf"^critic\.model\.path={model}: model\.safetensors is damaged: .*{reason}"):
        check_model(str(model), key="critic.model.path")


def test_a_missing_part_of_a_model_is_named(model):
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=rf"1 of 2 files of {INDEX} .*: model-2.safetensors"):
        check_model(str(model), key="model.path")


def resize(model, vocab_size: int) -> None:
    config = Qwen2Config.from_pretrained(model)
    config.vocab_size = vocab_size
    Qwen2ForCausalLM(config).save_pretrained(model)


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    resize(model, 40)
    with pytest.raises(ConfigError, match=rf"vocabulary has 40 tokens \(vocab_size\), .* has {len(tokenizer)}: "):
        check_model(str(model), key="model.path", tokenizer=tokenizer)


def test_an_added_token_that_every_prompt_has_is_refused_and_another_is_a_warning(model, caplog):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    with caplog.at_level(logging.WARNING):
        check_model(str(model), key="model.path", tokenizer=tokenizer)
    assert [message for message in caplog.messages if "1 added tokens beyond" in message]
    tokenizer.chat_template = "<|image|>" + tokenizer.chat_template
    with pytest.raises(ConfigError, match=r"'<\|image\|>' is number"):
        check_model(str(model), key="model.path", tokenizer=tokenizer)


def test_files_of_another_shape_than_config_json_says_are_named(model):
    saved = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(saved | {"vocab_size": saved["vocab_size"] + 5}))
    with pytest.raises(
        CheckpointError,
        match=r"embed_tokens.weight is \((\d+), 64\) .*config.json .*\(\d+, 64\)",
    ):
        make_engine(str(model))


def test_a_directory_without_the_tokenizers_files_is_refused(model):
    for file in [*model.glob("tokenizer*"), *model.glob("chat_template*")]:
        file.unlink()
    with pytest.raises(ConfigError, match=r"^model\.path=.*: its tokenizer has no vocabulary; .* tokenizer\.json"):
        load_tokenizer(str(model), key="model.path")


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "none", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, b"1234"),
        ({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, b"1234"),
        ({"__metadata__": {"format": 5}}, b""),
    ],
)
def test_a_header_that_describes_no_tensors_is_damage(model, header, data):
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(ConfigError, match="model.safetensors is damaged: its header cannot be read"):
        check_model(str(model), key="model.path")


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"hidden_size": "64"}, "cannot read it as a model: .*hidden_size"),
        ({"eos_token_id": "x"}, "cannot read it as a model: .*eos_token_id"),
        ({"num_hidden_layers": -1}, "cannot read it as a model: .*num_hidden_layers"),
        ({"dtype": "banana"}, "cannot read it as a model: .*banana"),
        ({"hidden_act": "nope"}, "cannot load it: KeyError: 'nope'"),
        ({"hidden_size": 0}, "cannot load it: ZeroDivisionError"),
        ({"hidden_size": 10**9}, "cannot load it: RuntimeError: .*allocate"),
    ],
)
def test_a_wrong_entry_of_config_json_is_one_line_with_the_models_path(model, entries, reason):
    saved = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(saved | entries))
    with pytest.raises(ConfigError, match=f"^model.path='{model}': transformers {reason}") as caught:
        make_engine(str(model))
    assert "\n" not in str(caught.value) and "check its config.json" in str(caught.value)


def test_an_override_that_the_model_refuses_is_named(model):
    with pytest.raises(ConfigError, match=r"^model.override_config.hidden_size='x': Qwen2Config refuses it: "):
        overridden_config(str(model), {"hidden_size": "x"}, trust_remote_code=False)


@pytest.mark.parametrize("text", ["[]", '{"eos_token": 5.5}', "{"])
def test_damaged_settings_of_a_tokenizer_are_one_line(model, text):
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (model / name).write_text(text)
    with pytest.raises(ConfigError, match=r"^model\.path=.*: no tokenizer can be loaded from it") as caught:
        load_tokenizer(str(model), key="model.path")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eos", ["x", ["x"], 1.5])
def test_an_end_of_sequence_that_is_no_tokens_number_is_named(model, eos):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=.* must be a token's number"):
        load_special_tokens(str(model))
