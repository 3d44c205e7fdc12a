"""Storage that rejects a checkpoint (full, not writable, too slow): old commits stay, nothing half-written does."""

import contextlib
import errno
import logging
import os
import resource
import threading
import time

import pytest
import torch

from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import CallTimeout, CheckpointError, StorageError
from hybridrl.trainer.checkpoint.reading import verify_manifest
from hybridrl.trainer.checkpoint.saver import CheckpointSaver
from hybridrl.trainer.checkpoint.store import CheckpointStore, directory_bytes


def write(num_bytes: int = 100):
    def into(directory: str) -> None:
        os.makedirs(os.path.join(directory, "actor"))
        for name in (".metadata", "__0_0.distcp"):
            with open(os.path.join(directory, "actor", name), "wb") as f:
                f.write(bytes(num_bytes))

    return into


@contextlib.contextmanager
def no_file_larger_than(num_bytes: int):
    """Fail writes beyond `num_bytes` in this process, as a full disk or a quota would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make_saver(root, **settings) -> CheckpointSaver:
    return CheckpointSaver(CheckpointStore(str(root)), TrainerConfig(**settings))


def test_a_failed_save_leaves_no_commit_and_the_next_save_succeeds(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    saver = make_saver(tmp_path)
    saver.save(1, write(), required=False)
    with no_file_larger_than(50_000):
        saver.save(2, write(100_000), required=False)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"] and verify_manifest(saver.committed) == 1
    [line] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("no checkpoint of step 2: cannot write") and os.strerror(errno.EFBIG) in line
    assert f"{tmp_path}/global_step_1 is still committed; training continues" in line
    saver.save(3, write(100_000), required=False)
    assert (
        saver.store.steps() == [1, 3]
        and verify_manifest(saver.committed) == 3
        and saver.metrics() == {"checkpoint/num_failed": 1.0}
    )


@pytest.mark.parametrize(("policy", "required"), [("stop", False), ("continue", True)])
def test_a_run_stops_by_policy_or_if_no_later_save_follows(tmp_path, policy, required):
    saver = make_saver(tmp_path, save_failure=policy)
    with no_file_larger_than(50_000), pytest.raises(StorageError, match="cannot write") as caught:
        saver.save(2, write(100_000), required=required)
    assert caught.value.__notes__[0].startswith(
        "nothing is committed yet; free space there, set trainer.max_ckpt_to_keep"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_torch_cannot_write_is_a_storage_error(tmp_path):
    store = CheckpointStore(str(tmp_path))
    with no_file_larger_than(50_000), pytest.raises(StorageError, match="cannot write .*global_step_2"):
        store.commit(2, lambda directory: torch.save(torch.zeros(100_000), os.path.join(directory, "model.pt")))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_logged_and_skipped(tmp_path, caplog):
    (tmp_path / "file").touch()
    make_saver(tmp_path / "file" / "run").save(1, write(), required=False)
    assert "no checkpoint of step 1: cannot write" in caplog.text and "Not a directory" in caplog.text


def test_too_little_space_is_reported_before_anything_is_written(tmp_path, caplog):
    saver = CheckpointSaver(CheckpointStore(str(tmp_path / "run")), TrainerConfig(), min_checkpoint_bytes=10**18)
    saver.save(1, write(), required=False)
    assert (
        "a checkpoint takes 1000000000.00 GB at least, and" in caplog.text
        and "free; nothing was written" in caplog.text
    )
    assert list((tmp_path / "run").iterdir()) == []
    saver = make_saver(tmp_path)
    saver.save(1, write(), required=False)
    assert directory_bytes(saver.committed) == 200


def test_storage_that_does_not_respond_is_abandoned_and_never_commits_later(tmp_path, caplog):
    pipe = tmp_path / "global_step_2.partial" / "pipe"

    def write_a_pipe(directory: str) -> None:
        write()(directory)
        os.mkfifo(pipe)  # hashing reads it, and blocks until a writer opens it

    saver = make_saver(tmp_path, call_timeout_s=2)
    saver.save(1, write(), required=False)
    [waiting] = [threading.Thread(target=saver.save, args=(2, write_a_pipe), kwargs={"required": False})]
    waiting.start()
    until = time.monotonic() + 60
    while not pipe.exists() and time.monotonic() < until:
        time.sleep(0.01)
    directory_fd = os.open(tmp_path, os.O_RDONLY)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # a writer that has not written yet
    waiting.join(60)
    assert "within trainer.call_timeout_s=2 s: storage is slow" in caplog.text
    os.close(end)
    os.close(directory_fd)
    until = time.monotonic() + 60
    while any(thread.name == "commit" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    saver.save(3, write(), required=False)
    assert saver.store.steps() == [1, 3]


def test_half_written_checkpoints_are_removed_by_the_next_commit(tmp_path):
    (tmp_path / "global_step_4.partial").mkdir()
    (tmp_path / "notes.partial").mkdir()
    make_saver(tmp_path).save(7, write(), required=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_7", "notes.partial"]


def test_an_error_in_code_is_raised_and_not_counted_as_a_storage_failure(tmp_path):
    saver = make_saver(tmp_path)
    saver.save(1, write(), required=False)
    with pytest.raises(CheckpointError, match="exists already"):
        saver.save(1, write(), required=False)

    def fail(directory: str) -> None:
        raise KeyError("our own bug")

    with pytest.raises(KeyError):
        saver.save(2, fail, required=False)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


@pytest.mark.parametrize("required", [False, True])
def test_a_process_that_does_not_answer_a_save_is_left_to_the_caller_that_replaces_it(tmp_path, required):
    def sleeps(directory: str) -> None:
        raise CallTimeout("actor-1 did not answer", role="actor", ranks=(1,), method="save_checkpoint")

    saver = make_saver(tmp_path)
    with pytest.raises(CallTimeout):
        saver.save(1, sleeps, required=required, retries=True)
    saver.save(1, write(), required=required, retries=True)  # the same step again, with another process
    assert saver.store.steps() == ([1] if required else []), "slow storage would keep the new process waiting, too"
    assert saver.num_failed == (not required)
    saver.save(2, sleeps, required=False)  # without a snapshot nothing can be replaced
    assert saver.num_failed == 2 - required
