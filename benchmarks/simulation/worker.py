"""`TimedWorker`: a stand-in for one process of the policy. It returns batches at once, and says how long they take.

It inherits `ActorRolloutRefWorker` for the contracts of its methods: how a group splits and merges their batches. It
overrides all that compute. A column of a response stands for `unit` tokens, so that a batch of thousands of long
responses fits into the driver; the first column of a response holds its exact number of tokens.

Shapes: B prompts, n samples of each, S = B * n rows, R columns of a response.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from benchmarks.simulation.lengths import Lengths
from hybridrl.config import PPOConfig
from hybridrl.data_plane.meta_info import GenerationRequest
from hybridrl.errors import StaleWeightsError
from hybridrl.planning.costs import Costs
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import register
from hybridrl.workers.actor_rollout_ref import ROLLOUT_COMPUTE, ROLLOUT_MESH, ActorRolloutRefWorker
from hybridrl.workers.mini_batch import ENGINE_MESH, split_mini_batches
from hybridrl.workers.rollout.base import RolloutHealth
from hybridrl.workers.rollout.responses import GeneratedTokens, with_responses
from hybridrl.workers.rollout.sampling.sampler import sampling_params

COLLECTIVE = frozenset({"compute_log_prob", "compute_ref_log_prob", "update_actor", "update_weights", "send_weights"})
"""Methods in which all ranks meet at the end of every phase."""
PAD = 0


@dataclass(frozen=True)
class SimulatedWork:
    """What the stand-ins of a run have in common.

    Attributes:
        costs: Seconds of a device's work.
        lengths: Of the responses.
        unit: Tokens that a column of a response stands for.
    """

    costs: Costs
    lengths: Lengths
    unit: int


@dataclass
class TimedAnswer:
    """What a call of a stand-in returns, and the seconds of its phases."""

    value: Any
    phases: list[float] = field(default_factory=list)


class TimedWorker(ActorRolloutRefWorker):
    """One process of the policy that takes no time; its methods return an `TimedAnswer`.

    Args:
        config: Settings of the whole job.
        role: Components, as for the worker it stands for.
        rank, world_size: Of the process.
        workload: What the work costs.
    """

    def __init__(self, config: PPOConfig, role: str, *, rank: int, world_size: int, workload: SimulatedWork):
        super().__init__(config, role)
        self._place, self.workload = (rank, world_size), workload
        self.version: int | None = None
        self.num_updates = 0

    @property
    def rank(self) -> int:
        return self._place[0]

    @property
    def world_size(self) -> int:
        return self._place[1]

    # -- set-up and pushes

    def init_model(self, total_optimizer_steps: int = 0) -> Any:
        num_peers = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        if "rollout" in self.components:
            self._register_dispatch_collect_info(ROLLOUT_MESH, self.rank // num_peers, self.rank % num_peers == 0)
        ranks = self.workload.costs.train_ranks
        self._register_dispatch_collect_info(ENGINE_MESH, self.rank // ranks, self.rank % ranks == 0)
        return TimedAnswer(None)

    def query_mesh_place(self, mesh_name: str) -> Any:
        return TimedAnswer(super().query_mesh_place(mesh_name))

    def open_weight_channel(self, transport: str, num_receivers: int) -> Any:
        return TimedAnswer(None)  # as of a transport that stores the weights: no rank waits for another

    def send_weights(self, version: int, adapters: bool = False) -> Any:
        return TimedAnswer(_Receipt(version) if self.rank == 0 else None, [self.workload.costs.push_s()])

    def receive_weights(self, version: int, sent: Any, adapters: bool = False, probe: Any = None) -> Any:
        self.version = version
        return TimedAnswer(self._health(), [self.workload.costs.push_s()])

    def update_weights(self, version: int, adapters: bool = False, probe: Any = None) -> Any:
        self.version = version
        return TimedAnswer(self._health(), [self.workload.costs.push_s()])

    def _health(self) -> RolloutHealth:
        return RolloutHealth(self.version, fingerprint=self.version, received=self.version)

    # -- generation

    def generate_sequences(self, prompts: DataProto, weights_version: int | None = None) -> Any:
        return self.generate_part(prompts, 0, self.config.data.max_response_length, weights_version)

    @register(ROLLOUT_COMPUTE)
    def generate_part(self, prompts: DataProto, start: int, stop: int, weights_version: int | None = None) -> Any:
        """Return responses up to column `stop`. It takes the time of the columns from `start` on."""
        self._check_version(weights_version)
        if not self._is_output_rank:
            return TimedAnswer(None)
        request, unit = GenerationRequest.of(prompts.meta_info), self.workload.unit
        sampling = sampling_params(self.config, validate=request.validate, seed=request.seed, greedy=request.greedy)
        lengths = self.workload.lengths.draw(cast(torch.Tensor, prompts.batch["seeds"]), sampling.n)
        generated = self._tokens(lengths, stop)
        batch = with_responses(prompts, generated, sampling=sampling, version=cast(int, self.version))
        left = (lengths[lengths > start * unit] - start * unit).clamp(max=(stop - start) * unit)
        return TimedAnswer(batch, [self._generate_s(left, done=start * unit)])

    def _tokens(self, lengths: torch.Tensor, stop: int) -> GeneratedTokens:
        """Return responses (S,) of these lengths in tokens, up to column `stop`."""
        new = GeneratedTokens.empty(len(lengths), self.config.data.max_response_length, pad_token_id=PAD)
        filled = ((lengths + self.workload.unit - 1) // self.workload.unit).clamp(max=stop)
        new.mask[:] = (torch.arange(new.mask.shape[1]) < filled[:, None]).long()
        new.tokens[:] = lengths[:, None] * new.mask  # every column: the first one of a response is what counts
        return new

    def _generate_s(self, lengths: torch.Tensor, *, done: int = 0) -> float:
        num_peers = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return self.workload.costs.generate_s(lengths.tolist(), done=done, devices=num_peers)

    @property
    def _is_output_rank(self) -> bool:
        return self.rank % self.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 0

    def _check_version(self, version: int | None) -> None:
        if version is not None and version != self.version:
            raise StaleWeightsError(f"rollout rank {self.rank} holds version {self.version}, not {version}")

    # -- training

    def compute_log_prob(self, data: DataProto, sum_pi_squared: bool = False, reference: bool = False) -> Any:
        return self._score(data, {"old_log_probs": 0.0, "entropys": 1.0})

    def compute_ref_log_prob(self, data: DataProto) -> Any:
        return self._score(data, {"ref_log_prob": 0.0})

    def _score(self, data: DataProto, columns: dict[str, float]) -> TimedAnswer:
        costs, shape = self.workload.costs, data.batch["responses"].shape
        values = {name: torch.full(shape, value) for name, value in columns.items()}
        return TimedAnswer(DataProto.from_dict(values), [costs.call_overhead_s + costs.score_s(_lengths(data))])

    def update_actor(self, data: DataProto) -> Any:
        costs, phases = self.workload.costs, []
        for mini_batch in split_mini_batches(data):
            phases.append(costs.update_overhead_s + costs.update_s(_lengths(mini_batch)))
        self.num_updates += len(phases)
        count = float(self.num_updates)
        metrics = {"actor/pg_loss": [0.0], "actor/grad_norm": [1.0], "actor/num_updates": [count]}
        return TimedAnswer(DataProto(meta_info={"metrics": metrics}), phases)


@dataclass(frozen=True)
class _Receipt:
    fingerprint: int


def _lengths(data: DataProto) -> np.ndarray:
    """Return the exact numbers of tokens of the responses, (S,) int64."""
    return data.batch["responses"][:, 0].numpy()
