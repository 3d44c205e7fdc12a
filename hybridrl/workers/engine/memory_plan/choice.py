"""Settings of an engine that fit a budget of memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridrl.workers.engine.memory_plan.prediction import EngineMemory, EngineSizes
from hybridrl.workers.engine.model_shape import ModelShape

LOGITS_SHARE = 0.05  # of a budget, at most
MAX_CHUNK = 4096  # tokens; larger chunks are not faster
TOKEN_STEP = 256  # a chosen token budget is a multiple


@dataclass(frozen=True)
class MemoryChoice:
    """Settings that fit a budget.

    Attributes:
        sizes: The settings, with what was chosen.
        phase: The largest phase.
        bytes: Its size.
        fits: Whether that is within the budget. If not, `sizes` need the least memory that these settings can.
    """

    sizes: EngineSizes
    phase: str
    bytes: float
    fits: bool


def choose(
    shape: ModelShape,
    sizes: EngineSizes,
    *,
    budget: float,
    min_tokens: int,
    max_tokens: int = 65536,
    beside: float = 0.0,
) -> MemoryChoice:
    """Return the settings that fit a budget and need the least extra time, with the largest token budget.

    Chooses `chunk`, `gradient_checkpointing`, `param_offload`, `optimizer_offload` and `tokens`; what `sizes` has of
    these does not matter. Offload comes before recomputation only where the rest would not fit beside the rollout.

    Args:
        shape: The model.
        sizes: The other settings.
        budget: Bytes of one process.
        min_tokens: Tokens of the longest sequence, which a micro-batch must hold.
        max_tokens: Largest token budget worth having.
        beside: Bytes that others on the device need between calls: a rollout that shares it.
    """
    if min_tokens > max_tokens:
        raise ValueError(f"min_tokens={min_tokens} is above max_tokens={max_tokens}; raise max_tokens")
    sizes = replace(sizes, chunk=chunk_for(shape, sizes, budget=budget))
    options = list(_options(sizes))
    for option in options:
        if _fits(shape, option, budget, min_tokens, beside):
            tokens = _largest_tokens(shape, option, budget, beside, low=min_tokens, high=max_tokens)
            return _choice(shape, replace(option, tokens=tokens), fits=True)
    return _choice(shape, replace(options[-1], tokens=min_tokens, chunk=1), fits=False)


def chunk_for(shape: ModelShape, sizes: EngineSizes, *, budget: float) -> int:
    """Return the tokens whose logits take a small share of a budget: at least 1, at most MAX_CHUNK."""
    per_token = shape.vocab / sizes.tensor * sizes.tile_element
    return int(max(1, min(MAX_CHUNK, LOGITS_SHARE * budget // per_token)))


def _options(sizes: EngineSizes) -> Iterator[EngineSizes]:
    """Yield what may be switched on, the cheapest in time first.

    Megatron with a distributed optimizer has no offload (`config/checks/megatron.py`).
    """
    stays = not sizes.has_host_memory or (sizes.strategy == "megatron" and sizes.distributed_optimizer)
    for recompute in (False, True):
        for optimizer, params in ((False, False),) if stays else ((False, False), (True, False), (True, True)):
            yield replace(sizes, gradient_checkpointing=recompute, optimizer_offload=optimizer, param_offload=params)


def _fits(shape: ModelShape, sizes: EngineSizes, budget: float, tokens: int, beside: float) -> bool:
    memory = EngineMemory(shape, replace(sizes, tokens=tokens))
    return memory.peak <= budget and memory.by_phase()["rest"].total + beside <= budget


def _largest_tokens(shape: ModelShape, sizes: EngineSizes, budget: float, beside: float, *, low: int, high: int) -> int:
    """Return the largest token budget that fits: `low`, `high`, or a multiple of TOKEN_STEP."""
    if _fits(shape, sizes, budget, high, beside):
        return high
    first, last = low // TOKEN_STEP, high // TOKEN_STEP + 1  # the first fits or is below `low`, the last does not fit
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if _fits(shape, sizes, budget, middle * TOKEN_STEP, beside) else (first, middle)
    return max(low, first * TOKEN_STEP)


def _choice(shape: ModelShape, sizes: EngineSizes, *, fits: bool) -> MemoryChoice:
    phases = EngineMemory(shape, sizes).by_phase()
    phase = max(phases, key=lambda name: phases[name].total)
    return MemoryChoice(sizes, phase, phases[phase].total, fits)
