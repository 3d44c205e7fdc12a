"""FLOPs per second of large matrix products on a device: the denominator of model FLOPs utilization (MFU).

Of known GPUs in bfloat16 it is the vendor's figure, as everywhere in the field. Of CPUs, other GPUs and other dtypes it
is measured. Workers call it; the driver adds up their answers.
"""

import functools
import math
import time

import torch

VENDOR_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "MI300X": 1300e12,
}
"""Words of a device's name -> dense bfloat16 FLOPs per second, from the data sheets that verl and torchtitan cite."""
MIN_SECONDS = 0.001  # of a measured product, so that starting threads or kernels does not count
SERIES_SECONDS = 0.02  # of measured products: the CPU time of threads that run is known to a few milliseconds only
FIRST_SIZE, MAX_SIZE = 512, 4096
REPEATS = 3


@functools.cache
def matmul_peak(device: str, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of this process's device, measured once per process if no table has them.

    On the CPU, time is the process's CPU time divided by its threads: what other programs use at the moment does not
    count. Processes that share cores should measure at the same time. Takes about 0.1 s of CPU time per thread.

    Args:
        device: "cpu" or "cuda".
        dtype: Of the products' operands.
    """
    known = vendor_peak(torch.cuda.get_device_name()) if device == "cuda" and dtype is torch.bfloat16 else None
    return known or _measured_peak(device, dtype)


def vendor_peak(name: str) -> float | None:
    """Return the dense bfloat16 FLOPs per second of a GPU with this name, None for an unknown one."""
    words = {*name.replace("-", " ").split()}
    found = [entry for entry in VENDOR_PEAKS if {*entry.split()} <= words]
    return VENDOR_PEAKS[max(found, key=len)] if found else None


def _measured_peak(device: str, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of square products, of the smallest size that takes `MIN_SECONDS`."""
    size = FIRST_SIZE
    while (seconds := _series_seconds(size, 1, device, dtype)) < MIN_SECONDS and size < MAX_SIZE:
        size *= 2
    number = math.ceil(SERIES_SECONDS / seconds)
    best = min(_series_seconds(size, number, device, dtype) for _ in range(REPEATS))
    if device == "cuda":
        torch.cuda.empty_cache()  # the models need it
    return 2 * size**3 * number / best


def _series_seconds(size: int, number: int, device: str, dtype: torch.dtype) -> float:
    """Return the time of so many products of two matrices, after one that warms up."""
    draw = torch.Generator(device).manual_seed(0)  # the process's random numbers stay what they are
    matrix = torch.rand(size, size, generator=draw, device=device).to(dtype)
    out = matrix @ matrix
    start = _clock(device)
    for _ in range(number):
        torch.mm(matrix, matrix, out=out)
    return _clock(device) - start


def _clock(device: str) -> float:
    """Return seconds: of the CPU per thread, or on CUDA of the clock after all kernels."""
    if device == "cpu":
        return time.process_time() / torch.get_num_threads()
    torch.cuda.synchronize()
    return time.perf_counter()
