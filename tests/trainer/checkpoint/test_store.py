"""Checkpoints on storage: what is committed, which ones stay, and which one a run resumes from."""

import json
import os
import sys

import pytest

from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import CheckpointError, ConfigError, StorageError
from hybridrl.trainer.checkpoint.reading import find_resume_checkpoint, verify_manifest
from hybridrl.trainer.checkpoint.store import CheckpointStore, ManifestWriter, check_engine_state


def write(content: str = "weights"):
    """Return a writer of a small checkpoint with the engine state of one rank."""

    def into(directory: str) -> None:
        os.makedirs(os.path.join(directory, "actor"))
        for name in (".metadata", "__0_0.distcp"):
            with open(os.path.join(directory, "actor", name), "w", encoding="utf-8") as f:
                f.write(content)

    return into


def store_with(root, *steps: int, keep: int | None = None) -> CheckpointStore:
    store = CheckpointStore(str(root), keep=keep)
    for step in steps:
        store.commit(step, write())
    return store


def test_the_newest_commits_stay_and_the_one_just_made_always(tmp_path):
    store = store_with(tmp_path, 10, 20, 30, keep=2)
    assert store.steps() == [20, 30]
    assert os.path.isdir(store.commit(11, write())) and store.steps() == [11, 30]


def test_a_step_that_is_committed_is_not_replaced(tmp_path):
    store = store_with(tmp_path, 3)
    with pytest.raises(CheckpointError, match="global_step_3 exists already"):
        store.commit(3, write("others"))
    assert verify_manifest(store.path(3)) == 3 and (tmp_path / "global_step_3/actor/.metadata").read_text() == "weights"


def test_a_commit_whose_thread_ends_at_its_birth_fails_in_time_and_in_our_words(tmp_path, monkeypatch, capfd):
    def no_memory(writer: ManifestWriter) -> None:  # for its first frame
        raise MemoryError

    store = store_with(tmp_path, 1)
    monkeypatch.setattr(ManifestWriter, "_run", no_memory)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with pytest.raises(StorageError, match=r"did not begin in 0.1 s; this process may have no memory left"):
        store.commit(2, write(), finish_timeout_s=0.1)
    assert store.steps() == [1]
    assert sys.unraisablehook is sys.__unraisablehook__ and "MemoryError" not in capfd.readouterr().err


def test_a_failed_write_leaves_no_commit(tmp_path):
    store = store_with(tmp_path, 1)

    def fail(directory: str) -> None:
        write()(directory)
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        store.commit(2, fail)
    assert store.steps() == [1] and store.latest() == store.path(1)


@pytest.mark.parametrize("harm", ["lacks", "is damaged"])
def test_a_changed_checkpoint_is_rejected_with_a_hint(tmp_path, harm):
    path = store_with(tmp_path, 1, 2).path(2)
    victim = os.path.join(path, "actor", "__0_0.distcp")
    if harm == "lacks":
        os.remove(victim)
    else:
        with open(victim, "w", encoding="utf-8") as f:
            f.write("Weights")
    with pytest.raises(
        CheckpointError,
        match=f"{harm}.*remove the whole checkpoint: trainer.resume_mode=auto",
    ):
        verify_manifest(path)


def test_a_run_resumes_from_the_newest_checkpoint_or_the_given_one(tmp_path):
    store = store_with(tmp_path / "run", 2, 10)
    assert find_resume_checkpoint(store, TrainerConfig(save_freq=1)) == store.path(10)
    empty = CheckpointStore(str(tmp_path / "branch"))
    branch = TrainerConfig(save_freq=1, resume_mode="resume_path", resume_from_path=store.path(2))
    assert find_resume_checkpoint(empty, branch) == store.path(2)
    assert find_resume_checkpoint(empty, TrainerConfig(save_freq=1)) is None


@pytest.mark.parametrize("mode", ["disable", "resume_path"])
def test_a_run_does_not_mix_its_checkpoints_with_later_ones_of_another(tmp_path, mode):
    store = store_with(tmp_path, 2, 4)
    start = store.path(2) if mode == "resume_path" else None
    with pytest.raises(ConfigError, match="newest of step 4; set trainer.default_local_dir"):
        find_resume_checkpoint(store, TrainerConfig(save_freq=1, resume_mode=mode, resume_from_path=start))
    assert (
        find_resume_checkpoint(store, TrainerConfig(save_freq=-1, resume_mode=mode, resume_from_path=start)) == start
    )  # it saves nothing
    assert (
        find_resume_checkpoint(
            store, TrainerConfig(save_freq=1, val_only=True, resume_mode=mode, resume_from_path=start)
        )
        == start
    )
    newest = store.path(4)
    assert (
        find_resume_checkpoint(store, TrainerConfig(save_freq=1, resume_mode="resume_path", resume_from_path=newest))
        == newest
    )


def test_only_what_a_commit_is_called_is_one(tmp_path):
    store = store_with(tmp_path, 2)
    for name in ("global_step_007", "global_step_" + "9" * 200, "global_step_-1", "global_step_9.damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_8").write_text("a file")
    assert store.steps() == [2]


def test_a_manifest_that_is_nested_too_deeply_is_damaged(tmp_path):
    path = store_with(tmp_path, 1).path(1)
    with open(os.path.join(path, "manifest.json"), "w", encoding="utf-8") as f:
        f.write("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged \(RecursionError"):
        verify_manifest(path)


def test_a_directory_without_manifest_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="it has no manifest.json"):
        verify_manifest(str(tmp_path))
    store_with(tmp_path, 1)
    manifest = json.loads((tmp_path / "global_step_1/manifest.json").read_text())
    assert manifest["step"] == 1 and set(manifest["files"]) == {"actor/.metadata", "actor/__0_0.distcp"}


def test_a_checkpoint_without_engine_state_is_rejected(tmp_path):
    def only_the_drivers_part(directory: str) -> None:
        with open(os.path.join(directory, "trainer.json"), "w", encoding="utf-8") as f:
            f.write("{}")

    path = CheckpointStore(str(tmp_path)).commit(3, only_the_drivers_part)
    with pytest.raises(CheckpointError, match="holds no engine state; restore it, or remove"):
        verify_manifest(path)


def test_state_that_other_machines_wrote_to_their_own_disks_is_detected(tmp_path):
    write()(str(tmp_path))
    check_engine_state(str(tmp_path / "actor"), num_ranks=1)
    with pytest.raises(CheckpointError, match=r"lacks the state of ranks \[1, 2\].*trainer.default_local_dir"):
        check_engine_state(str(tmp_path / "actor"), num_ranks=3)
    (tmp_path / "actor/.metadata").unlink()
    with pytest.raises(CheckpointError, match="lacks .metadata"):
        check_engine_state(str(tmp_path / "actor"), num_ranks=1)
    with pytest.raises(CheckpointError, match=r"lacks the state of ranks \[0\]"):
        check_engine_state(str(tmp_path / "critic"), num_ranks=1)


def test_an_engine_may_write_one_file_per_rank_of_its_own(tmp_path):
    store = CheckpointStore(str(tmp_path))

    def into(directory: str) -> None:
        os.makedirs(os.path.join(directory, "actor"))
        for rank in (0, 1):
            with open(os.path.join(directory, "actor", f"rank_{rank}.pt"), "w", encoding="utf-8") as f:
                f.write("weights")

    path = store.commit(1, into)
    assert verify_manifest(path) == 1
    check_engine_state(os.path.join(path, "actor"), num_ranks=2)
    with pytest.raises(CheckpointError, match=r"lacks the state of ranks \[2\]"):
        check_engine_state(os.path.join(path, "actor"), num_ranks=3)


MANIFEST_DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "list": lambda text: "[]",
    "no files": lambda text: '{"step": 4}',
    "no sizes": lambda text: '{"step": 4, "files": {"actor/.metadata": {}}}',
}


@pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
def test_a_damaged_manifest_is_named(tmp_path, damage):
    path = store_with(tmp_path, 4).path(4)
    manifest = tmp_path / "global_step_4/manifest.json"
    manifest.write_text(MANIFEST_DAMAGE[damage](manifest.read_text()))
    with pytest.raises(CheckpointError, match="global_step_4/manifest.json is damaged .*remove the whole checkpoint"):
        verify_manifest(path)


def test_a_run_resumes_from_the_newest_checkpoint_that_is_whole(tmp_path, caplog):
    store = store_with(tmp_path, 2, 4, 6, 8)
    (tmp_path / "global_step_6/actor/__0_0.distcp").write_text("Weights")
    os.remove(tmp_path / "global_step_8/manifest.json")
    (tmp_path / "global_step_9").write_text("a file")
    (tmp_path / "global_step_8.damaged").mkdir()
    assert find_resume_checkpoint(store, TrainerConfig(save_freq=2)) == store.path(4)
    assert store.steps() == [2, 4]
    assert (tmp_path / "global_step_6.damaged/actor/__0_0.distcp").read_text() == "Weights"
    assert (tmp_path / "global_step_8.damaged.2/actor").is_dir()
    assert [message.split("; ")[0] for message in caplog.messages] == [
        f"{store.path(8)} is not a checkpoint: it has no manifest.json",
        f"actor/__0_0.distcp in checkpoint {store.path(6)} is damaged",
    ]
    assert all(f"the run resumes from {store.path(4)}" in message for message in caplog.messages)
    assert os.path.isdir(store.commit(6, write()))


def test_without_a_whole_checkpoint_nothing_is_renamed(tmp_path):
    store = store_with(tmp_path, 2, 4)
    for step in store.steps():
        (tmp_path / f"global_step_{step}/actor/__0_0.distcp").write_text("Weights")
    with pytest.raises(CheckpointError, match="global_step_4 is damaged"):
        find_resume_checkpoint(store, TrainerConfig(save_freq=2))
    assert store.steps() == [2, 4]
