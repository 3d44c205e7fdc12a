"""Install a torchvision that can be imported beside a torch for CPU only; not a test file.

    python -m tests.support.workers.torchvision_on_cpu FOLDER
    PYTHONPATH=FOLDER python -m pytest -m slow tests/workers/rollout/test_images.py

Its package on PyPI is built for CUDA, and its compiled operators cannot be loaded then. vLLM's image processors need
its resizing alone, which is plain torch. So the operators are declared without an implementation: a call of one fails.
"""

import subprocess
import sys
from pathlib import Path

VERSION = "0.28.0"  # of torch 2.13
BOXES = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
SIZES = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
GRADIENT = f"Tensor grad, {BOXES.removeprefix('Tensor input, ')}"
CONVOLUTION = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, " + ", ".join(
    f"SymInt {name}_{side}" for name in ("stride", "pad", "dilation") for side in "hw"
)
LAST = "SymInt groups, SymInt offset_groups, bool use_mask"
TWO, FIVE = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({GRADIENT}, {SIZES}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({BOXES}) -> {TWO}",
    f"_roi_pool_backward({GRADIENT.replace('rois,', 'rois, Tensor argmax,')}, {SIZES}) -> Tensor",
    f"ps_roi_align({BOXES}, int sampling_ratio) -> {TWO}",
    f"_ps_roi_align_backward({GRADIENT.replace('rois,', 'rois, Tensor map,')}, int sampling_ratio, {SIZES}) -> Tensor",
    f"ps_roi_pool({BOXES}) -> {TWO}",
    f"_ps_roi_pool_backward({GRADIENT.replace('rois,', 'rois, Tensor map,')}, {SIZES}) -> Tensor",
    f"deform_conv2d({CONVOLUTION}, {LAST}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {CONVOLUTION}, {LAST}) -> {FIVE}",
)


def main(folder: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*pip, f"torchvision=={VERSION}"], check=True)
    lines = ["import torch", "", 'library = torch.library.Library("torchvision", "DEF")']
    lines += [f"library.define({schema!r})" for schema in SCHEMAS]
    (Path(folder) / "torchvision_operators.py").write_text("\n".join(lines) + "\n")
    start = Path(folder) / "torchvision" / "__init__.py"
    start.write_text("import torchvision_operators\n" + start.read_text())


if __name__ == "__main__":
    main(sys.argv[1])
