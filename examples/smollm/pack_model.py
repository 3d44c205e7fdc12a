"""Pack a model's weights to about 3.7 bits each, and unpack them.

The packed model fits into 64 MiB, for a machine that gets no more.

    python -m examples.smollm.pack_model pack MODEL FILE        float weights -> FILE
    python -m examples.smollm.pack_model unpack FILE MODEL      FILE -> a Hugging Face directory, in bfloat16

Each 64 weights have 15 levels and a scale in float16; the levels are Huffman-coded (zlib). It loses accuracy, as every
4-bit format does: for a GPU rehearsal, not for results. Other tensors, and the small files, are kept as they are.
"""

import argparse
import io
import zipfile
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP, LEVELS = 64, 7
SMALL = (".json", ".txt", ".jinja", ".model")
MIN_PACKED = 4096  # elements; smaller tensors are kept


def pack(model: Path, file: Path) -> None:
    tensors = {name: one for part in sorted(model.glob("*.safetensors")) for name, one in load_file(part).items()}
    with zipfile.ZipFile(file, "w") as archive:
        for small in sorted(path for path in model.iterdir() if path.suffix in SMALL and path.stat().st_size < 2**23):
            archive.write(small, small.name, compress_type=zipfile.ZIP_LZMA)
        for name, tensor in tensors.items():
            archive.writestr(name, packed(tensor))


def packed(tensor: torch.Tensor) -> bytes:
    """Return a tensor as shape, scales and levels; a small one in bfloat16."""
    content = io.BytesIO()
    if tensor.numel() < MIN_PACKED or tensor.numel() % GROUP:
        torch.save({"plain": tensor.bfloat16()}, content)
        return content.getvalue()
    groups = tensor.float().reshape(-1, GROUP)
    scales = (groups.abs().amax(1, keepdim=True) / LEVELS).clamp(min=1e-8).half()
    levels = (groups / scales.float()).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(levels.numpy().tobytes()) + coder.flush()
    bytes_of = {"levels": torch.frombuffer(bytearray(coded), dtype=torch.uint8), "scales": scales.flatten()}
    torch.save(bytes_of | {"shape": list(tensor.shape)}, content)
    return content.getvalue()


def unpacked(content: bytes) -> torch.Tensor:
    found = torch.load(io.BytesIO(content), weights_only=True)
    if "plain" in found:
        return found["plain"]
    levels = torch.frombuffer(bytearray(zlib.decompress(found["levels"].numpy().tobytes(), -15)), dtype=torch.int8)
    return (levels.reshape(-1, GROUP) * found["scales"].float()[:, None]).reshape(found["shape"]).bfloat16()


def unpack(file: Path, model: Path) -> None:
    model.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file) as archive:
        small = [name for name in archive.namelist() if Path(name).suffix in SMALL and "/" not in name]
        for name in small:
            (model / name).write_bytes(archive.read(name))
        tensors = {name: unpacked(archive.read(name)) for name in archive.namelist() if name not in small}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    (pack if options.what == "pack" else unpack)(options.source, options.target)


if __name__ == "__main__":
    main()
