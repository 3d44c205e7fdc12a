"""A stored transport through a directory that all machines can access, and that other programs can read.

    directory/version_12/bucket_00000.safetensors ...      one file per bucket
    directory/version_12/manifest.json                     the files in order, the number of bytes, the fingerprint

The directory may be any address that fsspec opens (/shared/w, s3://bucket/w). A version becomes visible completely, by
one rename. On stores without a rename the manifest is written last, and a version without a manifest does not count.
"""

import json
from collections.abc import Iterator
from typing import Any

from hybridrl.config.capabilities import TransportCapabilities
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.workers.weight_transfer import base
from hybridrl.workers.weight_transfer.buckets import Bucket, OutgoingWeights, unpack
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, is_adapter

NAME = "disk"
MANIFEST = "manifest.json"


class DiskSender(base.Sender):
    """The trainer's side; see `base.Sender`.

    directory: where versions are written. bucket_bytes: size of a file, and of this process's memory for it.
    """

    def __init__(self, directory: str, *, bucket_bytes: int):
        self._directory, self._bucket_bytes = directory.rstrip("/"), bucket_bytes

    def send(self, version: int, weights: OutgoingWeights) -> base.PushReceipt:
        fs, root = _open(self._directory)
        final = f"{root}/version_{version}"
        aside = f"{final}.partial"
        for old in (aside, final):  # left by a failed push, or by the run before a resume
            if fs.exists(old):
                fs.rm(old, recursive=True)
        fs.makedirs(aside, exist_ok=True)
        files = base.store_buckets(
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
        return base.PushReceipt(
            NAME, weights.fingerprint, weights.num_bytes, len(files), f"{self._directory}/version_{version}"
        )

    def delete_older_than(self, before: int) -> None:
        """Delete the versions older than `before`. The newest version stays, for other programs."""
        fs, root = _open(self._directory)
        for path in fs.ls(root, detail=False) if fs.exists(root) else []:
            number = path.rstrip("/").rpartition("version_")[2]
            if number.isdigit() and int(number) < before:
                fs.rm(path, recursive=True)


class DiskReceiver(base.StoredReceiver):
    """A rollout's side; see `base.Receiver`."""

    def tensors(self, sent: base.PushReceipt) -> Iterator[NamedTensor]:
        """Yield the weights of a push.

        Raises:
            CheckpointError: The files are missing or belong to another push; the error names the directory.
        """
        from safetensors.torch import load

        fs, folder = _open(sent.stored)
        try:
            manifest = json.loads(fs.cat_file(f"{folder}/{MANIFEST}"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{sent.stored} holds no {MANIFEST}: can all machines access {base.KEY}.directory?"
            ) from error
        if manifest["fingerprint"] != sent.fingerprint:
            raise CheckpointError(
                f"{sent.stored} holds other weights than were pushed: do two runs write to the same "
                f"{base.KEY}.directory?"
            )
        for name in manifest["files"]:
            named = load(fs.cat_file(f"{folder}/{name}")).items()
            # A file keeps no order, but adapters must come before the weights that they change.
            yield from sorted(named, key=lambda pair: not is_adapter(pair[0]))


class DiskTransport(base.Transport):
    """See the module."""

    capabilities = TransportCapabilities(streaming=False, needs_directory=True)

    @staticmethod
    def make_sender(setup: base.SenderSetup) -> DiskSender:
        if setup.directory is None:
            raise ConfigError(f"{base.KEY}.transport={setup.transport}: has no directory; set {base.KEY}.directory")
        return DiskSender(setup.directory, bucket_bytes=setup.bucket_bytes)

    @staticmethod
    def make_receiver(setup: base.ReceiverSetup, address: None) -> DiskReceiver:
        return DiskReceiver()


def _open(directory: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    return url_to_fs(directory)


def _write(fs: Any, folder: str, number: int, bucket: Bucket) -> str:
    from safetensors.torch import save

    name = f"bucket_{number:05d}.safetensors"
    with fs.open(f"{folder}/{name}", "wb") as f:
        f.write(save(dict(unpack(bucket)), metadata={"format": "pt"}))
    return name
