"""`check_engine`: the contract of a training engine as a test, for engines of any origin.

A test calls it in one process, or on every rank of a process group. Each rule compares the engine with plain torch on a
tiny Qwen2, or with itself. What is not checked: training of value and score heads, adapters, speed and memory.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.workers import OptimConfig
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.protocol import DataProto
from hybridrl.testing.conformance import Check, run_checks
from hybridrl.testing.engine_reference import (
    RESPONSE,
    assert_same_weights,
    make_batch,
    num_response_tokens,
    plain_numbers,
    plain_outputs,
    policy_loss,
    save_tiny_qwen2,
)
from hybridrl.trainer.checkpoint.store import check_engine_state
from hybridrl.workers.engine.base import Engine, EngineSetup, MicroBatching
from hybridrl.workers.engine.snapshot import load_engine_state, take_engine_state

POLICY = ("log_probs", "entropy")
NUMBERS = {"value": "values", "score": "scores"}  # kind of a model with one number -> output
WHOLE = MicroBatching()
CUTS = (MicroBatching(max_rows=1), MicroBatching(max_rows=5), MicroBatching(max_tokens=40), WHOLE)
OPTIM = OptimConfig(lr=1e-4, weight_decay=0.1)
CLIP = 0.3  # below the gradient norm of the tiny model, so that clipping is tested
STEPS = 2
OUTPUT_ATOL, WEIGHT_ATOL, NORM_RTOL = 1e-5, 1e-6, 1e-5  # float32 rounding of other orders of summation


def check_engine(
    make: Callable[[EngineSetup], Engine],
    *,
    settings: EngineSettings | None = None,
    device: str = "cpu",
    directory: str | None = None,
) -> list[str]:
    """Put an engine through every check of the contract of `hybridrl.workers.engine.Engine`; return their names.

    With several ranks it is collective: all ranks call it in a process group, with the same arguments.

    Args:
        make: The engine's class, or a function that returns an engine that is not set up.
        settings: The engine's own settings; they must compute in float32. None: `make.Config()`.
        device: "cpu" or "cuda".
        directory: Directory of models and checkpoints, the same on all ranks. None: a temporary one, for one rank.

    Raises:
        ConformanceError: The engine breaks its contract; the message has the sentence that does not hold.
    """
    own = settings if settings is not None else getattr(make, "Config", EngineSettings)()
    if directory is None and _world_size() > 1:
        raise ValueError("directory=None: give the same directory on all ranks, for models and checkpoints")
    with tempfile.TemporaryDirectory() as folder:
        return run_checks(CHECKS, _Trial(make, own, device, Path(directory or folder)), subject="engine")


@dataclass
class _Trial:
    """The engine under test, with the tiny model and what plain torch computes on it."""

    make: Callable[[EngineSetup], Engine]
    settings: EngineSettings
    device: str
    directory: Path
    batch: DataProto = field(default_factory=make_batch)

    def __post_init__(self) -> None:
        self.path = str(self.directory / "model")
        if _rank() == 0:
            save_tiny_qwen2(self.path)
            for kind in NUMBERS:
                save_tiny_qwen2(self.directory / kind, kind=kind)
        _barrier()
        self.num_tokens = num_response_tokens(self.batch)

    def engine(self, **changes: Any) -> Engine:
        """Return a new engine that is set up."""
        engine = self.make(self.setup(**changes))
        engine.setup()
        return engine

    def setup(self, **changes: Any) -> EngineSetup:
        setup = EngineSetup(kind="causal_lm", path=self.path, settings=self.settings, device=self.device)
        return replace(setup, **{"optim": OPTIM, "grad_clip": CLIP, "total_steps": 10, **changes})

    def rows(self, engine: Engine) -> list[int]:
        """Return the numbers of this rank's rows: every dp_size-th row of the batch."""
        return list(range(engine.mesh_position.dp_rank, len(self.batch), engine.mesh_position.dp_size))

    def share(self, engine: Engine) -> DataProto:
        """Return this rank's rows; peers of one model have the same."""
        return self.batch.select_idxs(self.rows(engine))

    def step(self, engine: Engine, micro: MicroBatching = WHOLE) -> dict[str, float]:
        """Take one optimizer step on the batch and return its report."""
        engine.forward_backward(self.share(engine), micro, policy_loss(self.num_tokens), outputs=POLICY)
        return engine.optimizer_step()

    @cached_property
    def plain_model(self) -> Any:
        """The model as transformers loads it."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    @cached_property
    def plain_steps(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Gradient norms and weights of a plain training loop on the whole batch.

        Norms before clipping, weights after STEPS steps.
        """
        from transformers import AutoModelForCausalLM

        model, norms = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, weight_decay=0.1)
        for _ in range(STEPS):
            policy_loss(self.num_tokens)(plain_outputs(model, self.batch), self.batch)[0].backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _constructor_and_setup(trial: _Trial) -> None:
    engine = trial.make(trial.setup())
    engine.setup()
    position = engine.mesh_position
    assert 0 <= position.dp_rank < position.dp_size, f"mesh_position is {position}"
    assert engine.num_updates == 0, f"num_updates is {engine.num_updates} before the first step"


def _forward(trial: _Trial) -> None:
    for temperature in (1.0, 0.7):
        engine = trial.engine(optim=None, temperature=temperature)
        with torch.no_grad():
            expected = plain_outputs(trial.plain_model, trial.share(engine), temperature=temperature)
        for micro in CUTS:
            found = engine.forward(trial.share(engine), micro, outputs=POLICY)
            assert set(found) == set(POLICY), f"forward returned {sorted(found)}"
            for name in POLICY:
                about = f"{name} at temperature {temperature}, {micro}"
                assert (found[name].dtype, found[name].device.type) == (torch.float32, "cpu"), about
                _close(found[name], expected[name], atol=OUTPUT_ATOL, about=about)


@torch.no_grad()
def _values_and_scores(trial: _Trial) -> None:
    for kind, name in NUMBERS.items():
        path = str(trial.directory / kind)
        try:
            engine = trial.engine(kind=kind, path=path, optim=None)
        except ConfigError:  # an engine of language models only
            continue
        expected = plain_numbers(path, trial.share(engine), kind=kind)
        for micro in CUTS:
            found = engine.forward(trial.share(engine), micro, outputs=(name,))[name]
            _close(found, expected, atol=OUTPUT_ATOL, about=f"{name}, {micro}")


def _optimizer_steps(trial: _Trial) -> None:
    norms, weights = trial.plain_steps
    for micro in CUTS:
        engine = trial.engine()
        for number, norm in enumerate(norms, start=1):
            report = trial.step(engine, micro)
            assert abs(report["grad_norm"] - norm) <= NORM_RTOL * norm, (
                f"grad_norm of step {number} is {report['grad_norm']}, plain torch has {norm} before clipping; {micro}"
            )
            assert (report["lr"], report["skipped"]) == (OPTIM.lr, 0.0), f"the report of step {number} is {report}"
            assert engine.num_updates == number, f"num_updates is {engine.num_updates} after step {number}"
        assert_same_weights(_weights(engine), weights, atol=WEIGHT_ATOL)


def _gradients_add_up(trial: _Trial) -> None:
    engine = trial.engine()
    for half in trial.share(engine).chunk(2):
        engine.forward_backward(half, WHOLE, policy_loss(trial.num_tokens), outputs=POLICY)
    norm, expected = engine.optimizer_step()["grad_norm"], trial.plain_steps[0][0]
    assert abs(norm - expected) <= NORM_RTOL * expected, f"the gradient norm is {norm}, of the whole batch {expected}"


def _stats(trial: _Trial) -> None:
    engine = trial.engine()
    share = trial.share(engine)
    stats = engine.forward_backward(share, MicroBatching(max_rows=5), policy_loss(trial.num_tokens), outputs=POLICY)
    wanted = float(len(share)) if engine.mesh_position.is_output_rank else 0.0
    counted = sum(row["rows"] for row in stats)
    assert counted == wanted, f"the stats count {counted} rows, this rank reports {wanted}: {stats}"
    assert all(row["rows"] <= 5 for row in stats), f"a micro-batch exceeds max_rows=5: {stats}"
    assert all(type(value) is float for row in stats for value in row.values()), f"a stat is not a float: {stats}"


def _no_rows(trial: _Trial) -> None:
    engine = trial.engine()
    empty = trial.batch.select_idxs([])
    found = engine.forward(empty, WHOLE, outputs=POLICY)["entropy"]
    assert found.shape == (0, RESPONSE), f"forward of no rows has the shape {tuple(found.shape)}"
    stats = engine.forward_backward(empty, WHOLE, policy_loss(1.0), outputs=POLICY)
    assert stats == [], f"forward_backward of no rows returned {stats}"
    norm = engine.optimizer_step()["grad_norm"]
    assert norm == 0.0, f"the gradient norm of no rows is {norm}"


def _weight_names(trial: _Trial) -> None:
    names = [name for name, _ in trial.engine().weights()]
    assert len(names) == len(set(names)), f"weights() yields a tensor twice: {names}"
    assert_same_weights(_weights(trial.engine()), dict(trial.plain_model.named_parameters()), atol=0.0)


def _skipped_steps(trial: _Trial) -> None:
    engine = trial.engine()
    trial.step(engine)
    before = _weights(engine)

    def infinite_loss(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict]:
        return outputs["log_probs"].sum() * torch.nan, {}

    for about, loss, skip in (
        ("a gradient that is not finite", infinite_loss, False),
        ("skip=True", policy_loss(trial.num_tokens), True),
    ):
        engine.forward_backward(trial.share(engine), WHOLE, loss, outputs=POLICY)
        report = engine.optimizer_step(skip=skip)
        assert report["skipped"] == 1.0, f"after {about} the report is {report}"
        assert engine.num_updates == 1, f"after {about} num_updates is {engine.num_updates}, before it was 1"
        _same(_weights(engine), before, about=f"weights after {about}")
    trial.step(engine)
    assert_same_weights(_weights(engine), trial.plain_steps[1], atol=WEIGHT_ATOL)


def _checkpoints(trial: _Trial) -> None:
    folder = trial.directory / "checkpoint"
    if _rank() == 0:
        folder.mkdir(exist_ok=True)
    _barrier()
    saved, loaded = trial.engine(), trial.engine()
    trial.step(saved)
    saved.save(str(folder))
    _barrier()
    try:
        check_engine_state(str(folder), num_ranks=_world_size())
    except CheckpointError as error:
        raise AssertionError(f"save writes no file rank_N.* for some rank N: {sorted(os.listdir(folder))}") from error
    drawn = torch.rand(3)
    loaded.load(str(folder))
    assert torch.equal(torch.rand(3), drawn), "load does not restore torch's random state"
    assert loaded.num_updates == 1, f"num_updates is {loaded.num_updates} after load, {saved.num_updates} when saved"
    reports = trial.step(saved), trial.step(loaded)
    assert reports[0] == reports[1], f"the saved engine's next step is {reports[0]}, the loaded one's {reports[1]}"
    _same(_weights(loaded), _weights(saved), about="weights one step after load")


def _snapshots(trial: _Trial) -> None:
    engine = trial.engine()
    load_engine_state(engine, take_engine_state(engine))  # also before the first step
    trial.step(engine)
    snapshot = take_engine_state(engine)
    report, wanted = trial.step(engine), _weights(engine)
    for resumed in (engine, trial.engine()):
        load_engine_state(resumed, snapshot)
        assert trial.step(resumed) == report, f"a step after a snapshot differs from {report}"
        _same(_weights(resumed), wanted, about="weights one step after a snapshot")


def _offload(trial: _Trial) -> None:
    engine = trial.engine()
    for _ in range(STEPS):
        engine.to("cpu")
        trial.step(engine)
        engine.to(trial.device)
    assert_same_weights(_weights(engine), trial.plain_steps[1], atol=WEIGHT_ATOL)


CHECKS: tuple[Check[_Trial], ...] = (
    Check("setup() makes the engine ready: mesh_position, and num_updates of 0", _constructor_and_setup),
    Check("forward() returns plain torch's log-probs and entropy in row order, however rows are cut", _forward),
    Check("forward() returns plain torch's values and scores, or setup() refuses the kind", _values_and_scores),
    Check("weights() yields every parameter once, under its Hugging Face name", _weight_names),
    Check("forward_backward() returns stats of this rank's micro-batches", _stats),
    Check("steps are plain torch's: losses are divided by global counts and gradients summed", _optimizer_steps),
    Check("gradients add up over calls of forward_backward()", _gradients_add_up),
    Check("a batch without rows is computed like any other", _no_rows),
    Check("optimizer_step() leaves out what is not finite, or skip=True, and changes nothing then", _skipped_steps),
    Check("an engine that loads what another saved continues bit for bit", _checkpoints),
    Check("state_tensors() holds the whole state, so that a snapshot continues bit for bit", _snapshots),
    Check("to() moves parameters and optimizer state; other methods move back what they need", _offload),
)


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.weights()}


def _close(found: torch.Tensor, expected: torch.Tensor, *, atol: float, about: str) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0, msg=lambda text: f"{about}: {text}")


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, about: str) -> None:
    differing = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not differing, f"{about} differ: {', '.join(differing)}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if _world_size() > 1:
        dist.barrier()
