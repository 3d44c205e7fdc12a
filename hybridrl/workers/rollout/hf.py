"""The `hf` rollout: batched generation with a Hugging Face causal LM, in the calling process, on any device.

Prompts are prefilled once and expanded to n samples; the key-value cache grows in place; finished sequences are dropped
from the batch, so a batch costs what its tokens cost and not what its longest response costs. It is not a serving
engine: a batch is filled once (at most max_num_seqs sequences) and runs down, nothing joins it.

Shapes: S sequences decoded together, P width of their prompts, R most new tokens, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch

from hybridrl.workers.rollout.base import Generated, RolloutSetup, VersionedRollout, load_hf_config, register_rollout
from hybridrl.workers.rollout.batched_request_engine import PieceEngine
from hybridrl.workers.rollout.requests import RequestEngine
from hybridrl.workers.rollout.sampling.logits import History
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, draw_tokens, uniforms
from hybridrl.workers.weight_transfer.fingerprint import WeightNames, fingerprint

# Finished rows are dropped when they are this share of the batch: rarer, and they are computed for nothing; more often,
# and the cache is copied too often (one drop costs about as much as one decode step).
DROP_SHARE = 0.25

# Free places a cache gets when it is full. Larger wastes memory, smaller copies the cache more often (once in so many
# steps).
CACHE_GROWTH_TOKENS = 64


@register_rollout("hf")
class HFRollout(VersionedRollout):
    """Generates with its own copy of the model, in the rollout's dtype."""

    engine_name = "hf"

    def __init__(self, setup: RolloutSetup):
        self._model = _build_model(setup)
        self._device = torch.device(setup.device)
        self._accepted = frozenset(signature(self._model.forward).parameters)
        super().__init__(setup, names=WeightNames.of(self._model))
        self._adopt_weights_on_disk()

    @torch.no_grad()
    def request_engine(self) -> RequestEngine:
        return PieceEngine(self)

    def _copy_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = self._model.state_dict()
        for name, tensor in weights:
            if targets[name].shape != tensor.shape:
                raise ValueError(
                    f"hf rollout: weight {name!r} is {tuple(tensor.shape)}, the model needs "
                    f"{tuple(targets[name].shape)}"
                )
            targets[name].copy_(tensor)

    def _held_fingerprint(self) -> int:
        return fingerprint(self._model.state_dict().items(), self.setup.dtype)

    def _used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def _release_memory(self) -> int:
        held = sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()) if tensor.is_cuda)
        self._model.to("cpu")
        torch.cuda.empty_cache()
        return held

    def _reclaim_memory(self) -> None:
        self._model.to(self._device)

    @torch.inference_mode()
    def _generate(
        self, prompts: list[list[int]], keys: torch.Tensor, sampling: SamplingParams, *, num_done: int = 0
    ) -> Generated:
        history = History.start(prompts, sampling, self.ends(sampling), num_done=num_done, device=self._device)
        keys = keys.to(self._device)
        out = Generated.empty(
            len(keys), sampling.max_new_tokens, pad_token_id=self.setup.pad_token_id, device=self._device
        )
        for rows in torch.arange(len(keys), device=self._device).split(self.setup.config.max_num_seqs):
            batch, logits = self._prefill(prompts, rows, keys[rows], sampling)
            self._decode(batch, logits, sampling, out, history)
        return out.to("cpu")

    def _prefill(
        self, prompts: list[list[int]], rows: torch.Tensor, keys: torch.Tensor, sampling: SamplingParams
    ) -> tuple["_Decoding", torch.Tensor]:
        """Run the prompts of these sequences once each; return the sequences ready to decode and their first logits (S,
        V).
        """
        owners = rows // sampling.n
        first = int(owners[0])
        ids, mask = _left_padded(prompts[first : int(owners[-1]) + 1], self.setup.pad_token_id, self._device)
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)
        kv_cache = _new_cache(self._model.config)
        logits = self._forward(ids, mask, positions, kv_cache)
        owners -= first
        kv_cache.batch_select_indices(owners)
        room = mask.new_ones(len(rows), sampling.max_new_tokens)
        batch = _Decoding(
            rows=rows,
            keys=keys,
            kv_cache=kv_cache,
            mask=torch.cat([mask[owners], room], dim=1),
            lengths=mask.sum(-1)[owners],
            width=ids.shape[1],
            finished=torch.zeros_like(rows, dtype=torch.bool),
        )
        return batch, logits[owners]

    def _decode(
        self,
        batch: "_Decoding",
        logits: torch.Tensor,
        sampling: SamplingParams,
        out: Generated,
        history: History | None,
    ) -> None:
        """Draw tokens into `out` until every sequence has stopped or has max_new_tokens."""
        stop_ids = torch.tensor(self.ends(sampling).ids, dtype=torch.int64, device=self._device)
        for step in range(sampling.max_new_tokens):
            steps = torch.full_like(batch.rows, step)
            shaped = None if history is None else history.shape(logits, batch.rows, steps)
            tokens, log_probs = draw_tokens(logits, uniforms(batch.keys, step), sampling, shaped=shaped)
            alive = ~batch.finished
            rows = batch.rows[alive]
            out.tokens[rows, step] = tokens[alive]
            out.log_probs[rows, step] = log_probs[alive]
            out.mask[rows, step] = 1
            batch.finished |= (tokens[:, None] == stop_ids).any(-1)
            if history is not None:
                history.record(rows, steps[alive], tokens[alive])
                batch.finished |= history.ended(batch.rows, steps + 1)
            num_finished = int(batch.finished.sum())
            if num_finished == len(tokens) or step + 1 == sampling.max_new_tokens:
                return
            if num_finished >= DROP_SHARE * len(tokens):
                tokens = tokens[batch.drop_finished()]
            mask, positions = batch.next_column()
            logits = self._forward(tokens[:, None], mask, positions, batch.kv_cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, kv_cache: Any) -> torch.Tensor:
        """Return the logits (S, V) after the last of ids (S, q), which the cache takes up. mask: (S, cached + q)."""
        # A model with ALiBi takes no positions, an older one computes all logits.
        optional = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in optional.items() if name in self._accepted}
        output = self._model(input_ids=ids, attention_mask=mask, past_key_values=kv_cache, use_cache=True, **options)
        return output.logits[:, -1]


@dataclass
class _Decoding:
    """The sequences that are decoded together.

    rows (S,) int64: their rows in the output. keys (S,) int64. mask (S, P + R) int64: attention, with ones where
    responses will be. lengths (S,) int64: tokens so far, which is the next token's position. width: columns of the mask
    in use.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    kv_cache: Any
    mask: torch.Tensor
    lengths: torch.Tensor
    width: int
    finished: torch.Tensor

    def drop_finished(self) -> torch.Tensor:
        """Keep only the sequences that go on; return their indices."""
        kept = (~self.finished).nonzero().squeeze(-1)
        self.kv_cache.batch_select_indices(kept)
        self.rows, self.keys, self.mask, self.lengths, self.finished = (
            column[kept] for column in (self.rows, self.keys, self.mask, self.lengths, self.finished)
        )
        return kept

    def next_column(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention mask (S, width + 1) and position ids (S, 1) of the token to be computed next."""
        self.width += 1
        positions = self.lengths[:, None]
        self.lengths = self.lengths + 1
        return self.mask[:, : self.width], positions


def _left_padded(
    prompts: list[list[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask (len(prompts), longest) int64 with the padding on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(tokens)) + tokens for tokens in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in prompts], device=device)
    return ids, mask


def _build_model(setup: RolloutSetup) -> torch.nn.Module:
    """Return the model on its device, ready to generate; random weights leave the global random state as it was."""
    from transformers import AutoModelForCausalLM

    config = load_hf_config(setup)
    options = {"dtype": setup.dtype, "trust_remote_code": setup.trust_remote_code}
    if setup.load_format == "auto":
        model = AutoModelForCausalLM.from_pretrained(setup.model_path, config=config, **options)
    else:
        with _seeded(setup.seed):
            model = AutoModelForCausalLM.from_config(config, **options)
    return model.to(setup.device).eval().requires_grad_(False)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _new_cache(config: Any) -> Any:
    """Return an empty cache with the layer kinds of the model; full-attention layers grow in place."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    kv_cache = DynamicCache(config=config)
    kv_cache.layers = [_growing_layer_class()() if type(layer) is DynamicLayer else layer for layer in kv_cache.layers]
    return kv_cache


@cache
def _growing_layer_class() -> type:
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        """A cache layer with spare places behind the used ones.

        `DynamicLayer` copies every key and value at every token, into new memory (measured at 256 sequences: up to 10
        times the time of the model, in page faults). `keys` and `values` are views of the used part, so everything else
        is inherited.
        """

        _stores: tuple[torch.Tensor, torch.Tensor] | None = None

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
            if not self.is_initialized:  # the prompts: `batch_select_indices` comes next and makes the stores
                return super().update(key_states, value_states, *args, **kwargs)
            used = self.keys.shape[-2]
            end = used + key_states.shape[-2]
            if self._stores is None or end > self._stores[0].shape[-2]:
                self._make_stores(end + CACHE_GROWTH_TOKENS)
            key_store, value_store = self._stores
            key_store[:, :, used:end] = key_states
            value_store[:, :, used:end] = value_states
            self.keys, self.values = key_store[:, :, :end], value_store[:, :, :end]
            return self.keys, self.values

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            super().batch_select_indices(indices)
            self._make_stores(self.keys.shape[-2] + CACHE_GROWTH_TOKENS)

        def _make_stores(self, capacity: int) -> None:
            self._stores = _roomy_copy(self.keys, capacity), _roomy_copy(self.values, capacity)

    return GrowingLayer


def _roomy_copy(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return (S, heads, capacity, dim) that begins with states (S, heads, used, dim)."""
    store = states.new_empty(*states.shape[:2], capacity, states.shape[-1])
    store[:, :, : states.shape[-2]] = states
    return store
