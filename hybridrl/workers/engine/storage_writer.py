"""`PortableWriter`: writes checkpoint files that every supported Python reads."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta


class PortableWriter(dcp.FileSystemWriter):
    """Writer of torch.distributed.checkpoint whose metadata hold the directory as text.

    torch's own writer pickles a `pathlib.Path`. Python 3.13 keeps that class in a module that other versions lack, so
    they could not read the metadata. Files are fsynced.
    """

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)
