"""A checkpoint with planted code is refused, and the code does not run."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from hybridrl.errors import CheckpointError
from hybridrl.workers.engine.checkpoint_files import PortableWriter
from hybridrl.workers.engine.safe_load import METADATA, WEIGHTS_ONLY_VARIABLE, read_metadata, without_code

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Planted:
    """Pickles as a call that makes a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def saved(tmp_path):
    """Return a checkpoint of a model and an optimizer that has made a step."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    dcp.save(state, checkpoint_id=tmp_path / "actor")
    return tmp_path / "actor", state


def test_a_checkpoint_of_the_library_loads(saved):
    directory, state = saved
    with without_code(directory):
        assert os.environ[WEIGHTS_ONLY_VARIABLE] == "1"
        dcp.load(state, checkpoint_id=directory)
    assert WEIGHTS_ONLY_VARIABLE not in os.environ
    assert "model.weight" in read_metadata(directory / METADATA).state_dict_metadata


def test_metadata_of_engines_name_no_class_whose_module_differs_between_pythons(tmp_path):
    dcp.save({"step": torch.tensor(1)}, storage_writer=PortableWriter(tmp_path))
    assert read_metadata(tmp_path / METADATA).storage_meta.checkpoint_id == str(tmp_path)
    assert b"pathlib" not in (tmp_path / METADATA).read_bytes()


class Attribute:
    """Pickles as an attribute of a class, as Python 3.11.2 pickles members of enums."""

    def __init__(self, cls, name):
        self.arguments = (cls, name)

    def __reduce__(self):
        return getattr, self.arguments


def test_a_member_of_an_enum_is_read_as_python_3_11_2_pickles_it_and_no_other_attribute(tmp_path):
    (tmp_path / METADATA).write_bytes(pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")))
    assert read_metadata(tmp_path / METADATA) is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for cls, name in ((torch.Size, "numel"), (_MEM_FORMAT_ENCODING, "__subclasses__")):
        (tmp_path / METADATA).write_bytes(pickle.dumps(Attribute(cls, name)))
        with pytest.raises(CheckpointError, match="getattr|damaged"):
            read_metadata(tmp_path / METADATA)


def test_code_in_the_metadata_does_not_run(saved, tmp_path):
    directory, _ = saved
    (directory / METADATA).write_bytes(pickle.dumps({"a": Planted(tmp_path / "ran")}))
    refused = r"actor/.metadata names posix.mkdir, which no checkpoint needs"
    with pytest.raises(CheckpointError, match=refused), without_code(directory):
        pass
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("folder", ["..", "/tmp", "inner"])
def test_no_file_outside_of_a_checkpoint_is_read(saved, folder):
    directory, _ = saved
    metadata = read_metadata(directory / METADATA)
    for entry in metadata.storage_data.values():
        entry.relative_path = os.path.join(folder, entry.relative_path)
    (directory / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which is no file of it"), without_code(directory):
        pass


def test_code_in_an_entry_does_not_run(tmp_path):
    dcp.save({"setting": Planted(tmp_path / "ran")}, checkpoint_id=tmp_path / "actor")
    with pytest.raises((CheckpointError, dcp.api.CheckpointException)), without_code(tmp_path / "actor"):
        dcp.load({"setting": 0}, checkpoint_id=tmp_path / "actor")
    assert not (tmp_path / "ran").exists()


# The last one has 12 bytes, and Python's own unpickler takes 34 GB for it.
@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", b"\x80\x05}r\xff\xff\xff\x7f0N."])
def test_damaged_metadata_are_named(saved, content):
    directory, _ = saved
    (directory / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match="actor/.metadata is damaged"):
        read_metadata(directory / METADATA)
