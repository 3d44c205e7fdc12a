"""A training engine of somebody else, in one file: plain torch, one process, one row at a time. Not a test file.

actor_rollout_ref.actor.strategy=tests/support/third_party/toy_engine.py:ToyEngine
actor_rollout_ref.actor.engine_config={foreach:true}
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrl.algos import log_probs_and_entropy, micro_batches
from hybridrl.config.fields import setting
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.errors import CheckpointError, ConfigError, NonFiniteError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine import EngineSetup, LossFn, MeshPosition, MicroBatching, StateTensors

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ToySettings(EngineSettings):
    foreach: bool = setting(False, "Update all parameters in one kernel.")


class ToyEngine:
    """An `Engine` of kind causal_lm with a constant learning rate."""

    Config = ToySettings

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup

    def setup(self) -> None:
        from transformers import AutoModelForCausalLM

        setup = self._setup
        if setup.kind != "causal_lm":
            raise ConfigError(f"strategy=ToyEngine: trains language models only, not a {setup.kind} model; use fsdp")
        self.mesh_position = MeshPosition(dp_rank=0, dp_size=1, is_output_rank=True)
        self.num_updates = 0
        self._model = AutoModelForCausalLM.from_pretrained(setup.path, dtype=torch.float32).eval().to(setup.device)
        self._optimizer: torch.optim.AdamW | None = None
        if setup.optim is not None:
            self._optimizer = torch.optim.AdamW(
                self._model.parameters(),
                lr=setup.optim.lr,
                betas=tuple(setup.optim.betas),
                weight_decay=setup.optim.weight_decay,
                foreach=setup.settings.foreach,
            )

    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> Outputs:
        shape = batch.batch["response_mask"].shape
        found = {name: torch.zeros(shape) for name in outputs}
        with torch.no_grad():
            for rows in self._groups(batch, micro):
                for name, values in self._outputs(batch.select_idxs(rows), outputs).items():
                    found[name][rows] = values.cpu()
        return found

    def forward_backward(
        self, batch: DataProto, micro: MicroBatching, loss_fn: LossFn, *, outputs: tuple[str, ...]
    ) -> list[dict[str, float]]:
        found = []
        for rows in self._groups(batch, micro):
            part = batch.select_idxs(rows).to(self._setup.device)
            loss, stats = loss_fn(self._outputs(part, outputs), part)
            loss.backward()
            found.append({name: float(torch.as_tensor(value).detach()) for name, value in stats.items()})
        return found

    def optimizer_step(self, *, skip: bool = False) -> dict[str, float]:
        assert self._optimizer is not None, "an engine without an optimizer does not train"
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._setup.grad_clip))
        skipped = skip or not math.isfinite(norm)
        if not skipped:
            self._optimizer.step()
            self.num_updates += 1
        self._optimizer.zero_grad()
        return {"grad_norm": norm, "lr": self._setup.optim.lr, "skipped": float(skipped)}

    def weights(self, *, lora: str = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def save(self, directory: str) -> None:
        if not all(bool(parameter.isfinite().all()) for parameter in self._model.parameters()):
            raise NonFiniteError("the model's parameters are not finite; no checkpoint is written")
        torch.save(self._state(), Path(directory) / "rank_0.pt")

    def load(self, directory: str) -> None:
        file = Path(directory) / "rank_0.pt"
        if not file.is_file():
            raise CheckpointError(f"{directory} holds no engine state: there is no {file.name}")
        state = torch.load(file, weights_only=True)
        self._model.load_state_dict(state["model"])
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]
        torch.set_rng_state(state["random"])

    def state_tensors(self) -> StateTensors:
        if self._optimizer is None:
            return StateTensors([self._model], [])
        for parameter in self._model.parameters():
            if not self._optimizer.state[parameter]:  # the state that the first step would create
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return StateTensors([self._model], [self._optimizer])

    def to(self, device: str, *, params: bool = True, optimizer: bool = True) -> None:
        """Do nothing: `ToySettings` has no offload."""

    def _state(self) -> dict[str, Any]:
        optimizer = None if self._optimizer is None else self._optimizer.state_dict()
        random = torch.get_rng_state()
        return {
            "model": self._model.state_dict(),
            "optimizer": optimizer,
            "num_updates": self.num_updates,
            "random": random,
        }

    def _groups(self, batch: DataProto, micro: MicroBatching) -> list[list[int]]:
        lengths = batch.batch["attention_mask"].sum(-1)
        return micro_batches(lengths, max_rows=micro.max_rows, max_tokens=micro.max_tokens) if len(batch) else []

    def _outputs(self, rows: DataProto, outputs: tuple[str, ...]) -> Outputs:
        """Return the outputs (b, R) of some rows: each row is computed without its padding."""
        found = [self._row(rows, row) for row in range(len(rows))]
        return {name: torch.stack([one[name] for one in found]) for name in outputs}

    def _row(self, rows: DataProto, row: int) -> Outputs:
        real, wanted = rows.batch["attention_mask"][row].bool(), rows.batch["response_mask"][row].bool()
        ids = rows.batch["input_ids"][row][real].to(self._setup.device)
        token = real.cumsum(0)[-len(wanted) :][wanted].to(ids.device) - 1  # index of each wanted token in `ids`
        logits = self._model(input_ids=ids[None]).logits[0, token - 1]
        log_probs, entropy = log_probs_and_entropy(
            logits, ids[token], temperature=self._setup.temperature, with_entropy=True
        )
        cells = torch.zeros(len(wanted), device=ids.device)
        return {
            name: cells.masked_scatter(wanted.to(ids.device), values)
            for name, values in (("log_probs", log_probs), ("entropy", entropy))
        }
