"""Storage that does not take a checkpoint: full, not writable, too slow.

The commits that are there stay, and nothing half-written does.
"""

import contextlib
import errno
import logging
import os
import resource
import threading
import time

import pytest

from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import CheckpointError, StorageError
from hybridrl.trainer.checkpoint.saver import Saver
from hybridrl.trainer.checkpoint.store import CheckpointStore, size_of, verify


def write(num_bytes: int = 100):
    def into(directory: str) -> None:
        os.makedirs(os.path.join(directory, "actor"))
        for name in (".metadata", "__0_0.distcp"):
            with open(os.path.join(directory, "actor", name), "wb") as f:
                f.write(bytes(num_bytes))

    return into


@contextlib.contextmanager
def no_file_larger_than(num_bytes: int):
    """What a full disk or a quota does to a write, for this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saver(root, **settings) -> Saver:
    return Saver(CheckpointStore(str(root)), TrainerConfig(**settings))


def test_a_run_goes_on_without_a_commit_and_tries_again(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    saves = saver(tmp_path)
    saves.save(1, write(), must=False)
    with no_file_larger_than(50_000):
        saves.save(2, write(100_000), must=False)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"] and verify(saves.committed) == 1
    [line] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("no checkpoint of step 2: cannot write") and os.strerror(errno.EFBIG) in line
    assert f"{tmp_path}/global_step_1 is committed as before; training goes on, and the next save tries again" in line
    saves.save(3, write(100_000), must=False)
    assert (
        saves.store.steps() == [1, 3]
        and verify(saves.committed) == 3
        and saves.metrics() == {"checkpoint/num_failed": 1.0}
    )


@pytest.mark.parametrize(("policy", "must"), [("stop", False), ("continue", True)])
def test_a_run_stops_if_it_is_told_to_or_has_no_other_save(tmp_path, policy, must):
    saves = saver(tmp_path, save_failure=policy)
    with no_file_larger_than(50_000), pytest.raises(StorageError, match="cannot write") as caught:
        saves.save(2, write(100_000), must=must)
    assert caught.value.__notes__[0].startswith(
        "nothing is committed yet; free space there, set trainer.max_ckpt_to_keep"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one(tmp_path, caplog):
    (tmp_path / "file").touch()
    saver(tmp_path / "file" / "run").save(1, write(), must=False)
    assert "no checkpoint of step 1: cannot write" in caplog.text and "Not a directory" in caplog.text


def test_too_little_space_is_told_before_anything_is_written(tmp_path, caplog):
    saves = Saver(CheckpointStore(str(tmp_path / "run")), TrainerConfig(), least_bytes=10**18)
    saves.save(1, write(), must=False)
    assert (
        "a checkpoint takes 1000000000.00 GB at least, and" in caplog.text
        and "free; nothing was written" in caplog.text
    )
    assert list((tmp_path / "run").iterdir()) == []
    saves = saver(tmp_path)
    saves.save(1, write(), must=False)
    assert size_of(saves.committed) == 200


def test_storage_that_does_not_answer_is_given_up_and_what_it_does_later_is_no_commit(tmp_path, caplog):
    pipe = tmp_path / "global_step_2.partial" / "pipe"

    def write_a_pipe(directory: str) -> None:
        write()(directory)
        os.mkfifo(pipe)  # reading it, for its hash, waits for somebody who writes

    saves = saver(tmp_path, call_timeout_s=0.5)
    saves.save(1, write(), must=False)
    [waiting] = [threading.Thread(target=saves.save, args=(2, write_a_pipe), kwargs={"must": False})]
    waiting.start()
    until = time.monotonic() + 20
    while not pipe.exists() and time.monotonic() < until:
        time.sleep(0.01)
    held = os.open(tmp_path, os.O_RDONLY)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # somebody who has not written yet
    waiting.join(20)
    assert "was not on the disk within trainer.call_timeout_s=0.5 s: storage is slow" in caplog.text
    os.close(end)
    os.close(held)
    until = time.monotonic() + 20
    while any(thread.name == "commit" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    saves.save(3, write(), must=False)
    assert saves.store.steps() == [1, 3]


def test_what_was_left_half_written_is_removed_by_the_next_commit(tmp_path):
    (tmp_path / "global_step_4.partial").mkdir()
    (tmp_path / "notes.partial").mkdir()
    saver(tmp_path).save(7, write(), must=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_7", "notes.partial"]


def test_a_mistake_is_no_trouble_with_storage(tmp_path):
    saves = saver(tmp_path)
    saves.save(1, write(), must=False)
    with pytest.raises(CheckpointError, match="is there already"):
        saves.save(1, write(), must=False)

    def fail(directory: str) -> None:
        raise KeyError("our own bug")

    with pytest.raises(KeyError):
        saves.save(2, fail, must=False)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
