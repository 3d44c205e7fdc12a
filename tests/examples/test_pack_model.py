"""examples/smollm/pack_model.py: a model in 64 MiB."""

from safetensors.torch import load_file

from examples.smollm.pack_model import pack, unpack


def test_an_unpacked_model_has_the_names_shapes_and_about_the_weights_of_the_packed_one(tmp_path, tiny_qwen2):
    pack(tiny_qwen2, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "model")
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_qwen2, tmp_path / "model"))
    assert {name: one.shape for name, one in before.items()} == {name: one.shape for name, one in after.items()}
    for name, tensor in before.items():
        # A group of 64 normal weights has a largest one of about 2.4 sigma: steps of 0.34, an error of 0.34 / sqrt(12).
        assert (after[name].float() - tensor).norm() <= 0.12 * tensor.norm(), name
    assert (tmp_path / "packed").stat().st_size < 0.2 * sum(one.numel() * 4 for one in before.values()) + 2**20
