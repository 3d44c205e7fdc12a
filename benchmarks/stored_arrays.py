"""Bytes through the driver in a step, and seconds: arrays stored, or in every message.

    python benchmarks/stored_arrays.py [--prompts 16] [--samples 8] [--patches 1024] [--tokens 1024] [--repeats 5]

Two real groups of two workers on Ray, as in a step with a separate rollout: the driver sends the prompts with their
patches to the rollout, which returns the routes of every token (48 layers, 8 experts). It reorders the rows, and sends
patches and routes to the trainer for old log-probs and for the update, and patches for the reference. Workers read what
they get; no model computes. The driver makes the patches in either case, 4.8 MB of a picture of 448 x 448 pixels.

Exits with status 1 if stored arrays do not take fewer bytes.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import ray
import torch

from hybridrl.data_plane import futures
from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.data_plane.futures import arrays_of, stored
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker import Worker

WIDTH, LAYERS, TOP_K = 1176, 48, 8  # numbers of a patch; layers and experts of a token, as in Qwen3-30B-A3B


class Stage(Worker):
    """A rollout or a trainer without a model."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: DataProto, samples: int, tokens: int, is_stored: bool) -> DataProto:
        read(prompts)
        routes = [np.full((tokens, LAYERS, TOP_K), row, dtype=np.uint8) for row in range(len(prompts) * samples)]
        rows = prompts.batch["x"].repeat_interleave(samples)
        return DataProto.from_dict({"x": rows}, {"routes": one_object_per_row(stored(routes) if is_stored else routes)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"], "sum": torch.full((len(data),), read(data))})


def read(data: DataProto) -> int:
    """Return the sum of the first numbers of all arrays."""
    found = [array for column in data.non_tensor_batch.values() for array in arrays_of(column)]
    return int(sum(array.flat[0] for array in found))


@dataclass
class Driver:
    """The driver of a step, which counts the bytes of its messages.

    Attributes:
        counts: Pickle every message once more, to count it. No time is measured then.
    """

    rollout: RayWorkerGroup
    trainer: RayWorkerGroup
    counts: bool
    num_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    def step(self, args: argparse.Namespace, *, is_stored: bool) -> None:
        begin = time.perf_counter()
        pixels = [np.full((args.patches, WIDTH), row, dtype=np.float32) for row in range(args.prompts)]
        column = one_object_per_row(stored(pixels) if is_stored else pixels)
        prompts = DataProto.from_dict({"x": torch.arange(args.prompts)}, {"images": column})
        self.count(prompts)
        batch = self.rollout.generate(prompts, args.samples, args.tokens, is_stored)
        self.count(batch)
        batch.non_tensor_batch["images"] = np.repeat(column, args.samples)
        batch.reorder(torch.randperm(len(batch)))
        for names in (["images", "routes"], ["images"], ["images", "routes"]):  # old log-probs, reference, update
            data = batch.select(non_tensor_batch_keys=names)
            self.count(data)
            self.trainer.compute(data)
        self.seconds.append(time.perf_counter() - begin)

    def count(self, batch: DataProto) -> None:
        if self.counts:
            buffers: list = []
            self.num_bytes += len(ray.cloudpickle.dumps(batch, protocol=5, buffer_callback=buffers.append))
            self.num_bytes += sum(buffer.raw().nbytes for buffer in buffers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("prompts", 16), ("samples", 8), ("patches", 1024), ("tokens", 1024), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=4 * 10**9)
    pools = [RayResourcePool([2], use_gpu=False, name_prefix=name) for name in ("rollout", "trainer")]
    groups = [RayWorkerGroup(pool, RayClassWithInitArgs(Stage), role="stage") for pool in pools]
    found: dict[bool, tuple[int, float]] = {}
    drivers = {is_stored: Driver(*groups, counts=False) for is_stored in (False, True)}
    for _ in range(args.repeats):
        for is_stored, driver in drivers.items():
            driver.step(args, is_stored=is_stored)
    for is_stored, driver in drivers.items():
        counting = Driver(*groups, counts=True)
        counting.step(args, is_stored=is_stored)
        own = args.prompts * args.patches * WIDTH * 4 if is_stored else 0  # the driver stores its patches once
        found[is_stored] = counting.num_bytes + own, min(driver.seconds)
    print(f"{args.prompts} prompts x {args.samples} samples, {args.patches} patches, routes of {args.tokens} tokens")
    for is_stored, (num_bytes, seconds) in found.items():
        what = f"stored above {futures.MIN_STORED_BYTES // 1024} KiB" if is_stored else "in every message"
        print(f"{what:<24}{num_bytes / 1e6:>12,.1f} MB through the driver{seconds:>10.2f} s a step (least)")
    for group in groups:
        group.shutdown()
    return 0 if found[True][0] < found[False][0] else 1


if __name__ == "__main__":
    sys.exit(main())
