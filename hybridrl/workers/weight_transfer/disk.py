"""Weights through a directory that all machines see: a stored transport, and the one that other programs can read.

    directory/version_12/bucket_00000.safetensors ...      one file per bucket
    directory/version_12/manifest.json                     the files in order, the number of bytes, the fingerprint

The directory of a version appears whole, by one rename. It may be any address that fsspec opens (/shared/w,
s3://bucket/w); on stores without a rename the manifest is written last, and a version without one is not there.
"""

import json
from collections.abc import Iterator
from typing import Any

from hybridrl.errors import CheckpointError
from hybridrl.workers.weight_transfer.base import KEY, Incoming, Sent, store_buckets
from hybridrl.workers.weight_transfer.buckets import Bucket, Outgoing, unpack
from hybridrl.workers.weight_transfer.fingerprint import Named, is_adapter

NAME = "disk"
MANIFEST = "manifest.json"


class DiskSender:
    """directory: where versions are written. bucket_bytes: size of a file, and of this process's memory for it."""

    def __init__(self, directory: str, *, bucket_bytes: int):
        self._directory, self._bucket_bytes = directory.rstrip("/"), bucket_bytes

    def send(self, version: int, weights: Outgoing) -> Sent:
        fs, root = _open(self._directory)
        final = f"{root}/version_{version}"
        aside = f"{final}.partial"
        for old in (aside, final):  # of a push that failed, or of the run before a resume
            if fs.exists(old):
                fs.rm(old, recursive=True)
        fs.makedirs(aside, exist_ok=True)
        files = store_buckets(
            weights, num_bytes=self._bucket_bytes, store=lambda number, bucket: _write(fs, aside, number, bucket)
        )
        manifest = {
            "version": version,
            "fingerprint": weights.fingerprint,
            "num_bytes": weights.num_bytes,
            "files": files,
        }
        with fs.open(f"{aside}/{MANIFEST}", "w") as f:
            json.dump(manifest, f)
        fs.mv(aside, final, recursive=True)
        return Sent(NAME, weights.fingerprint, weights.num_bytes, len(files), f"{self._directory}/version_{version}")

    def forget(self, before: int) -> None:
        """Delete the versions older than `before`; the newest one stays, for whoever wants to look at it."""
        fs, root = _open(self._directory)
        for path in fs.ls(root, detail=False) if fs.exists(root) else []:
            number = path.rstrip("/").rpartition("version_")[2]
            if number.isdigit() and int(number) < before:
                fs.rm(path, recursive=True)

    def close(self) -> None:
        """Nothing: files stay until `forget`."""


def receive(sent: Sent) -> Incoming:
    """Return the weights; files that are not there, or not those of this push, are a CheckpointError naming the
    directory.
    """
    return Incoming(_tensors(sent), fingerprint=lambda: sent.fingerprint)


def _open(directory: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    return url_to_fs(directory)


def _write(fs: Any, folder: str, number: int, bucket: Bucket) -> str:
    from safetensors.torch import save

    name = f"bucket_{number:05d}.safetensors"
    with fs.open(f"{folder}/{name}", "wb") as f:
        f.write(save(dict(unpack(bucket)), metadata={"format": "pt"}))
    return name


def _tensors(sent: Sent) -> Iterator[Named]:
    from safetensors.torch import load

    fs, folder = _open(sent.parts)
    try:
        manifest = json.loads(fs.cat_file(f"{folder}/{MANIFEST}"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{sent.parts} holds no {MANIFEST}: do all machines see {KEY}.directory?") from error
    if manifest["fingerprint"] != sent.fingerprint:
        raise CheckpointError(
            f"{sent.parts} holds other weights than were pushed: do two runs write to the same {KEY}.directory?"
        )
    for name in manifest["files"]:
        named = load(
            fs.cat_file(f"{folder}/{name}")
        ).items()  # in any order, and adapters come before the weights that they change
        yield from sorted(named, key=lambda pair: not is_adapter(pair[0]))
