"""Measure a model family: an engine's layouts, the `hf` rollout after a push, export and resume.

Not a test file. A number is the largest absolute difference of log-probs, or of gradients of a loss per token.
Gradients above 1 count in units of the model's largest.
"""

import functools
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridrl.config.checks.megatron import model_problems
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.workers import MegatronConfig, ModelConfig, OptimConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.attention.layer_kinds import layer_kinds
from hybridrl.workers.engine.batching.layout import make_layout, token_grid
from hybridrl.workers.engine.export import export_hf
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights
from tests.families.configurations import EOS, VOCAB, configuration, save_family
from tests.support.workers.engine_cases import WHOLE, make_engine, num_response_tokens, whole_weights
from tests.support.workers.prefix_cases import conversation_batch

LAYOUTS = {
    "padded": {},
    "packed": {"packed": True},
    "shared prefixes": {"packed": True, "share_prefixes": True},
}
LIMIT = 1e-5
ROLLOUT_LIMITS = {"Nemotron-H": 1e-3, "Qwen3.5": 2e-5}
"""transformers' own code for one token of Nemotron-H leaves out the lower bound of the time step (`time_step_min`).
Qwen3.5's linear attention sums in another order there: 1.1e-5 on a CPU with AMX, below 1e-5 on others."""
FAST = OptimConfig(lr=1e-2)
RESPONSE = 12


@dataclass(frozen=True)
class Row:
    """What was measured of a family.

    Attributes:
        kinds: Its kinds of layers.
        layouts: An engine's, by the names of LAYOUTS.
        rollout: The `hf` rollout after a push of trained weights, against the engine.
        export: Plain transformers with the exported model, against the engine.
        resumes: Whether a loaded engine continues bit for bit.
        megatron: Why the Megatron engine refuses the family; empty if it runs it.
    """

    kinds: frozenset[str]
    layouts: dict[str, "Cell"]
    rollout: "Cell"
    export: "Cell"
    resumes: bool
    megatron: str

    @property
    def notes(self) -> list[str]:
        cells = [*self.layouts.values(), self.rollout]
        return list(dict.fromkeys(note for cell in cells for note in [*cell.notes, cell.refusal] if note))


@functools.cache
def measure_family(family: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path, batch = save_family(family, Path(folder, "model")), family_batch()
        expected = plain_results(path, batch)
        layouts = {name: measure_layout(path, batch, expected, **layout) for name, layout in LAYOUTS.items()}
        engine = make_engine(path, optim=FAST)
        train(engine, batch)
        return Row(
            kinds=layer_kinds(plain_model(path)),
            layouts=layouts,
            rollout=measure_rollout(path, engine),
            export=measure_export(path, engine, batch, Path(folder, "export")),
            resumes=resumes_bit_for_bit(path, engine, batch, Path(folder, "saved")),
            megatron=megatron_refusal(family),
        )


@dataclass
class Cell:
    """What one way of computing gave.

    Attributes:
        log_probs, gradients: Largest differences. NaN: not measured.
        notes: What was logged: a fallback and its reason.
        refusal: Error at the start.
    """

    log_probs: float = float("nan")
    gradients: float = float("nan")
    notes: list[str] = field(default_factory=list)
    refusal: str = ""


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("hybridrl").addHandler(self)
        return self.lines

    def __exit__(self, *error: object) -> None:
        logging.getLogger("hybridrl").removeHandler(self)


def plain_model(path: str) -> Any:
    """Return transformers' model with its own plain attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def row_log_probs(model: Any, batch: DataProto) -> torch.Tensor:
    """Return log-probs (B,R) of the response tokens: row by row, without padding and without an engine."""
    grid = token_grid(batch)
    rows = []
    for number in range(len(batch)):
        layout = make_layout(grid, [number], packed=False)
        states = model(input_ids=layout.input_ids).logits[0].float().log_softmax(-1)
        found = torch.zeros(layout.shape[1])
        rows.append(found.index_put((layout.cell,), states[layout.state, layout.labels]))
    return torch.stack(rows)


def loss_per_token(num_tokens: float) -> Any:
    def loss(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict]:
        return -(outputs["log_probs"] * rows.batch["advantages"]).sum() / num_tokens, {}

    return loss


def plain_results(path: str, batch: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probs and gradients of plain transformers."""
    model = plain_model(path)
    log_probs = row_log_probs(model, batch)
    loss_per_token(num_response_tokens(batch))({"log_probs": log_probs}, batch)[0].backward()
    return log_probs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def family_batch() -> DataProto:
    """Return turns of conversations: rows share prefixes at several depths, and are longer than the windows."""
    batch = conversation_batch()
    batch.batch["input_ids"] %= VOCAB
    return batch


def measure_layout(path: str, batch: DataProto, expected: tuple, **layout: Any) -> Cell:
    """Return how far an engine's log-probs and gradients are from plain transformers'."""
    cell = Cell()
    with _Notes() as cell.notes:
        try:
            engine = make_engine(path, **layout)
        except ConfigError as error:
            return Cell(refusal=str(error))
    found = engine.forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    engine.forward_backward(batch, WHOLE, loss_per_token(num_response_tokens(batch)), outputs=("log_probs",))
    cell.log_probs = (found - expected[0]).abs().max().item()
    own = {name: p.grad.full_tensor() for name, p in engine.model.named_parameters() if p.grad is not None}
    missing = expected[1].keys() ^ own.keys()
    assert not missing, f"only one of engine and transformers has gradients of {sorted(missing)[:3]}"
    largest = max(gradient.abs().max().item() for gradient in expected[1].values())
    cell.gradients = max((own[name] - expected[1][name]).abs().max().item() for name in own) / max(1.0, largest)
    return cell


def train(engine: FSDPEngine, batch: DataProto) -> None:
    engine.forward_backward(batch, WHOLE, loss_per_token(num_response_tokens(batch)), outputs=("log_probs",))
    engine.optimizer_step()


def prompts() -> DataProto:
    """Return prompts of 3 to 12 tokens, padded on the left."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor([12, 3, 7, 5])
    real = (torch.arange(12) >= 12 - lengths[:, None]).long()
    ids = torch.randint(VOCAB, real.shape, generator=draw) * real
    columns = {"input_ids": ids, "attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    return DataProto.from_dict(tensors=columns | {"seeds": torch.arange(len(ids)) + 100})


def measure_rollout(
    path: str, engine: FSDPEngine, *, name: str = "hf", dtype: str = "float32", replays: bool = False
) -> Cell:
    """Push an engine's weights to a rollout that had random ones, generate rows that end, and compare log-probs.

    replays: The engine takes the experts that the rollout took.
    """
    cell, more = Cell(), {"enable_rollout_routing_replay": replays, "enforce_eager": replays}
    with _Notes() as cell.notes:
        settings = RolloutConfig(dtype=dtype, kv_cache_memory_mb=16, max_num_seqs=16, **more)
        try:
            rollout = make_rollout(name, RolloutSetup(path, settings, EOS, 0, 12, RESPONSE, load_format="dummy"))
        except ConfigError as error:
            return Cell(refusal=str(error))
    weights = OutgoingWeights(engine.weights(), rollout.held)
    health = rollout.load_weights(1, weights, sent=lambda: weights.fingerprint)
    assert health.fingerprint == health.received == weights.fingerprint
    batch = rollout.generate(prompts(), SamplingParams(RESPONSE, n=3))
    lengths = batch.batch["response_mask"].sum(-1)
    assert 0 < lengths.min() < lengths.max() == RESPONSE, "some rows end early, some do not"
    found = engine.forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    cell.log_probs = (found - batch.batch["rollout_log_probs"]).abs().max().item()
    return cell


def measure_export(path: str, engine: FSDPEngine, batch: DataProto, folder: Path) -> Cell:
    """Export an engine's weights and compare the log-probs of plain transformers with the engine's."""
    export_hf(engine.weights(), str(folder), model=ModelConfig(path=path))
    found = engine.forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    with torch.no_grad():
        return Cell(log_probs=(row_log_probs(plain_model(str(folder)), batch) - found).abs().max().item())


def resumes_bit_for_bit(path: str, engine: FSDPEngine, batch: DataProto, folder: Path) -> bool:
    """Return whether an engine that was loaded trains as the saved one.

    Both take a step; all weights must be equal.
    """
    folder.mkdir()
    engine.save(str(folder))
    other = make_engine(path, optim=FAST)
    other.load(str(folder))
    for each in (engine, other):
        train(each, batch)
    saved, loaded = whole_weights(engine), whole_weights(other)
    return saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


def megatron_refusal(family: str) -> str:
    """Return why the Megatron engine refuses a family, empty if it runs it."""
    problems = list(model_problems(MegatronConfig(), configuration(family).to_dict(), key="megatron"))
    return problems[0] if problems else ""
