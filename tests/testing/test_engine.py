"""`check_engine` passes for engines that keep the contract, and names the rule that an engine breaks."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.testing import ConformanceError, check_engine
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
from tests.support.third_party.toy_engine import ToyEngine

ROOT = Path(__file__).parents[2]
RANK_PROGRAM = """
import sys, torch
import torch.distributed as dist
from hybridrl.testing import check_engine
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
check_engine(FSDPEngine, directory=folder)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    mine = not dist.is_initialized()
    yield
    if mine and dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("engine", [FSDPEngine, ToyEngine], ids=lambda one: one.__name__)
def test_an_engine_that_keeps_the_contract_passes(engine):
    check_engine(engine)


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_the_fsdp_engine_keeps_the_contract_on_two_ranks(tmp_path):
    command = [sys.executable, "-c", RANK_PROGRAM]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in (0, 1)
    ]
    output = [process.communicate(timeout=120)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(output)[-6000:]


class Averaged(ToyEngine):
    """Divides the loss by the number of micro-batches, although it is divided by a global count already."""

    def forward_backward(self, batch, micro, loss_fn, *, outputs):
        num = max(1, len(self._groups(batch, micro)))

        def averaged(results, rows):
            loss, stats = loss_fn(results, rows)
            return loss / num, stats

        return super().forward_backward(batch, micro, averaged, outputs=outputs)


class Sorted(ToyEngine):
    """Returns outputs in the order in which it computed them."""

    def forward(self, batch, micro, *, outputs):
        order = [row for group in self._groups(batch, micro) for row in group]
        return super().forward(batch.select_idxs(order), micro, outputs=outputs)


class Trusting(ToyEngine):
    """Applies gradients that are not finite."""

    def optimizer_step(self, *, skip=False):
        report = super().optimizer_step(skip=skip)
        if report["skipped"] and not skip:
            self.num_updates += 1
        return report


class Renamed(ToyEngine):
    def weights(self, *, lora="merged"):
        yield from ((f"module.{name}", tensor) for name, tensor in super().weights(lora=lora))


class Forgetful(ToyEngine):
    """Saves no optimizer state."""

    def load(self, directory):
        super().load(directory)
        self._optimizer.state.clear()


class Unseeded(ToyEngine):
    def load(self, directory):
        state = torch.get_rng_state()
        super().load(directory)
        torch.set_rng_state(state)


class Nameless(ToyEngine):
    """Writes a file without its rank."""

    def save(self, directory):
        super().save(directory)
        (Path(directory) / "rank_0.pt").rename(Path(directory) / "toy.pt")


class Late(FSDPEngine):
    """Returns the value of each token's own state."""

    def forward(self, batch, micro, *, outputs):
        found = super().forward(batch, micro, outputs=outputs)
        return {name: each.roll(-1, dims=1) if name == "values" else each for name, each in found.items()}


class Rounded(FSDPEngine):
    """Returns scores with the digits of bfloat16."""

    def forward(self, batch, micro, *, outputs):
        found = super().forward(batch, micro, outputs=outputs)
        return {name: each.bfloat16().float() if name == "scores" else each for name, each in found.items()}


BROKEN = {
    Late: "values and scores, or setup.. refuses the kind.*values, MicroBatching",
    Rounded: "values and scores, or setup.. refuses the kind.*scores, MicroBatching",
    Averaged: "steps are plain torch's.*grad_norm of step 1 is",
    Sorted: "forward.. returns plain torch's log-probs.*log_probs at temperature 1.0",
    Trusting: "leaves out what is not finite.*num_updates is 2",
    Renamed: "under its Hugging Face name.*names differ: .*module.model",
    Forgetful: "an engine that loads what another saved continues bit for bit.*weights one step after load differ",
    Nameless: "continues bit for bit.*save writes no file rank_N",
    Unseeded: "continues bit for bit.*load does not restore torch's random state",
}


@pytest.mark.parametrize("engine", BROKEN, ids=lambda one: one.__name__)
def test_an_engine_that_breaks_a_rule_fails_with_its_name(engine):
    with pytest.raises(ConformanceError, match=f"(?s)^engine: .*{BROKEN[engine]}"):
        check_engine(engine)
