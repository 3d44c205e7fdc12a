"""A disk that is really full, and one that is read-only: the run trains on, and its checkpoints stay.

The run has a mount of its own, a tmpfs of some megabytes, in a user namespace. That needs no privileges if the kernel
allows it.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.trainer.checkpoint.reading import verify_manifest
from tests.support.end_to_end.runs import settings
from tests.support.workers.engine_cases import save_tiny_qwen2

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
CODE = """
import os, subprocess
from hybridrl.trainer.checkpoint.store import directory_bytes

DISK, HARM = {disk!r}, {harm!r}
BALLAST = os.path.join(DISK, "ballast")

def use(task, trainer):
    task.insert_before("save_checkpoint", lambda ctx: harm(trainer.global_steps, trainer.store.latest()))

def harm(step, newest):
    if HARM == "read-only":
        # A disk with files that are open for writing cannot be remounted, so a read-only view covers it.
        if step == 2:
            subprocess.run(["mount", "--bind", DISK, DISK], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", DISK], check=True)
        elif step == 3:
            subprocess.run(["umount", DISK], check=True)
    elif step == 2:
        fill()
        if HARM == "full in the middle":  # leaves enough bytes, but too few pages: files end in partly filled ones
            os.truncate(BALLAST, os.path.getsize(BALLAST) - -(-directory_bytes(newest) // 4096) * 4096)
    elif step == 3:
        os.remove(BALLAST)

def fill():
    ballast = os.open(BALLAST, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(ballast, bytes(4096))
    except OSError:
        os.close(ballast)
"""
SAVED = """
from tests.support.workers.engine_cases import make_engine
try:
    make_engine({model!r}).save({disk!r})
except Exception as error:
    print(type(error).__name__ + ":", error)
"""


def can_mount() -> bool:
    command = [*NAMESPACE, "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("harm", ["full", "full in the middle", "read-only"])
def test_a_disk_that_takes_no_checkpoint_costs_that_checkpoint_only(tmp_path, tiny_qwen2, harm):
    if not can_mount():
        pytest.skip("this kernel lets only root mount a tmpfs")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    (tmp_path / "harm.py").write_text(CODE.format(disk=str(disk), harm=harm))
    changes = {
        "trainer__middleware": f"[{tmp_path}/harm.py:use]",
        "trainer__default_local_dir": disk / "run",
        "trainer__total_training_steps": 3,
        "trainer__val_before_train": False,
        "trainer__test_freq": -1,
        "trainer__logger": "[console]",
    }
    arguments = [f"'{argument}'" for argument in settings(tmp_path, tiny_qwen2, **changes)]
    script = (
        f"mount -t tmpfs -o size=20m tmpfs {disk} && {sys.executable} -m hybridrl.main_ppo "
        f"{' '.join(arguments)}; code=$?"
    )
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", f"{script}; cp -r {disk} {copy}; exit $code"],
        cwd=ROOT,
        timeout=500,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [line] = [text for text in done.stderr.splitlines() if text.startswith("no checkpoint of step 2")]
    reasons = {
        "full": "nothing was written",
        "full in the middle": "No space left on device",
        "read-only": "Read-only file system",
    }
    assert reasons[harm] in line and "run/global_step_1 is still committed; training continues" in line
    names = sorted(path.name for path in (copy / "run").glob("global_step*"))
    assert names == ["global_step_1", "global_step_3"] and [
        verify_manifest(str(copy / "run" / name)) for name in names
    ] == [
        1,
        3,
    ]


@pytest.mark.parametrize("size", ["16k", "64k", "128k"])
def test_a_disk_that_is_full_anywhere_in_a_file_is_a_storage_error(tmp_path, size):
    if not can_mount():
        pytest.skip("this kernel lets only root mount a tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    code = SAVED.format(disk=str(disk), model=save_tiny_qwen2(tmp_path / "model"))
    shell = f"mount -t tmpfs -o size={size} tmpfs {disk} && exec {sys.executable} -c {shlex.quote(code)}"
    done = subprocess.run([*NAMESPACE, "sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "StorageError: rank 0 cannot write" in done.stdout, done.stderr
