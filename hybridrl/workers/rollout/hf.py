"""The `hf` rollout: batched generation with a Hugging Face causal LM.

In the calling process, on any device.

Prompts are prefilled once and expanded to n samples. The key-value cache grows in place. Finished sequences are dropped
from the batch, so the cost follows the number of tokens and not the longest response. Dropping moves only the last
rows, into the places of the finished ones, in the memory that the cache has.

It does not batch continuously: a batch of at most max_num_seqs sequences is filled once, and no sequence joins it
    later.

Shapes: S sequences decoded together, P width of their prompts, R maximum new tokens, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from typing import Any

import torch

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.config.capabilities import SAMPLING, RolloutCapabilities
from hybridrl.config.introspection import value_text
from hybridrl.config.schema.rollout import QUANTIZATION, RolloutConfig
from hybridrl.errors import ConfigError, model_errors
from hybridrl.single_controller.monitoring.work_done import report_work
from hybridrl.workers import engine, rollout
from hybridrl.workers.engine.attention import layer_kinds
from hybridrl.workers.engine.hf_model import IMAGE_MODELS, auto_class, reads_images
from hybridrl.workers.rollout.base import ROLLOUT_KEY, RolloutSetup, held_dtypes, load_hf_config
from hybridrl.workers.rollout.responses import GeneratedTokens, prompt_columns
from hybridrl.workers.rollout.sampling.sampler import (
    SamplingParams,
    draw_tokens,
    needs_history,
    uniforms,
    without_tokens,
)
from hybridrl.workers.rollout.versioned import VersionedRollout
from hybridrl.workers.weight_transfer import fingerprint

# Finished rows are dropped when they reach this share of the batch. A higher share computes finished rows for nothing.
# A lower one moves rows of the cache too often, and each move is some 20 small operations.
DROP_SHARE = 1 / 16

# Free token slots that a full cache gets. Larger wastes memory; smaller copies the cache more often (once in so many
# steps).
CACHE_GROWTH_TOKENS = 64

GROUPED = "hybridrl_grouped_queries"
"""Name of `_grouped_attention` in transformers."""


class HFRollout(VersionedRollout):
    """Generates with its own copy of the model, in the rollout's dtype."""

    engine_name = "hf"
    capabilities = RolloutCapabilities(
        keyed_sampling=True,
        log_probs=True,
        reads_own_weights=True,
        partial=True,
        requests=True,
        adapters=True,
        routes=True,
        float32_weights=True,
        images=frozenset(IMAGE_MODELS),
        quantization=frozenset(QUANTIZATION),
        sampling=frozenset(SAMPLING),
    )

    @classmethod
    def setting_problems(cls, settings: RolloutConfig, *, max_length: int) -> Iterator[str]:
        if settings.engine_kwargs:
            yield (
                f"{ROLLOUT_KEY}.engine_kwargs={value_text(settings.engine_kwargs)}: has no effect with "
                f"{ROLLOUT_KEY}.name={settings.name}; leave it out"
            )

    def __init__(self, setup: RolloutSetup):
        self._model: torch.nn.Module = _build_model(setup, held_dtypes(setup, self.capabilities))
        self._device = torch.device(setup.device)
        self._accepted = frozenset(signature(self._model.forward).parameters)
        self._routes = rollout.RouteLog(self._model) if setup.config.enable_rollout_routing_replay else None
        self._reads_images = reads_images(self._model.config)
        self._hashes: dict[str, int] = {}  # of the tensors by name, as they were when they were read last
        self._never = engine.placeholder_ids(self._model.config) if self._reads_images else ()
        if (name := layer_kinds.cache_argument(self._model)) in (None, "cache_params"):
            raise ConfigError(
                f"{ROLLOUT_KEY}.name=hf: {type(self._model).__name__} of {setup.model_path!r} does not take a cache of "
                "keys and states, so that every token would be drawn without those before it; use "
                "rollout.name=vllm"
            )
        self._cache_argument: str = name
        super().__init__(setup, names=fingerprint.WeightNames.of(self._model))
        self._use_weights_on_disk()

    def request_engine(self) -> "rollout.BatchedRequestEngine":
        return rollout.BatchedRequestEngine(self)

    @torch.no_grad()
    def replace_weights(self, weights: Iterable[fingerprint.NamedTensor]) -> None:
        targets = self._model.state_dict()
        for name, tensor in weights:
            if targets[name].shape != tensor.shape:
                raise ValueError(
                    f"hf rollout: weight {name!r} is {tuple(tensor.shape)}, the model needs "
                    f"{tuple(targets[name].shape)}"
                )
            targets[name].copy_(tensor)

    def _engine_fingerprint(self, changed: Set[str] | None = None) -> int:
        own = dict(fingerprint.distinct_tensors(self._model.state_dict().items()))
        if changed is None or not changed <= self._hashes.keys():
            changed = own.keys()
        for name in changed:
            self._hashes[name] = fingerprint.tensor_hash(own[name], fingerprint.pushed_dtype(name, self.held))
        return sum(self._hashes.values()) % (1 << 64)

    def _used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def _release_memory(self) -> int:
        num_bytes = sum(
            tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()) if tensor.is_cuda
        )
        self._model.to("cpu")
        torch.cuda.empty_cache()
        return num_bytes

    def _reclaim_memory(self) -> None:
        self._model.to(self._device)

    @torch.inference_mode()
    def _generate(
        self,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        *,
        num_done: int = 0,
        images: Sequence[RowImages | None] | None = None,
    ) -> GeneratedTokens:
        history, stop = None, self.stop_condition(sampling)
        if needs_history(sampling, stop):
            history = rollout.TokenHistory(prompts, sampling, stop, num_done=num_done, device=self._device)
        keys = keys.to(self._device)
        out = GeneratedTokens.empty(
            len(keys), sampling.max_new_tokens, pad_token_id=self.setup.pad_token_id, device=self._device
        )
        if self._routes is not None:
            self._routes.start(len(keys))
        for rows in torch.arange(len(keys), device=self._device).split(self.setup.config.max_num_seqs):
            batch, logits = self._prefill(prompts, rows, keys[rows], sampling, images or [None] * len(prompts))
            self._decode(batch, logits, sampling, out, history)
        if self._routes is not None:
            lengths = [len(prompt) for prompt in prompts for _ in range(sampling.n)]
            out.routes = self._routes.entries(out.mask.sum(-1), lengths)
        return out.to("cpu")

    def _prefill(
        self,
        prompts: list[list[int]],
        rows: torch.Tensor,
        keys: torch.Tensor,
        sampling: SamplingParams,
        images: Sequence[RowImages | None],
    ) -> tuple["_DecodeBatch", torch.Tensor]:
        """Compute each prompt of these sequences once; return the batch to decode and its first logits (S, V)."""
        prompt_rows = rows // sampling.n
        first, last = int(prompt_rows[0]), int(prompt_rows[-1]) + 1
        given = prompt_columns(prompts[first:last], pad_token_id=self.setup.pad_token_id, device=self._device)
        ids, mask, positions = given.values()
        more: dict[str, torch.Tensor] = {}
        offsets = torch.zeros_like(prompt_rows)
        if self._reads_images:
            positions, offsets, more = engine.prefill_inputs(positions, mask, images[first:last])
        kv_cache = _new_cache(self._model.config, max_tokens=ids.shape[1] + sampling.max_new_tokens)
        logits = self._forward(ids, mask, positions, kv_cache, **more)
        prompt_rows -= first
        if self._routes is not None:
            self._routes.add_prompts(rows, mask, prompt_rows)
        for layer in kv_cache.layers:
            _select_rows(layer, prompt_rows)
        response_mask = mask.new_ones(len(rows), sampling.max_new_tokens)
        batch = _DecodeBatch(
            rows=rows,
            keys=keys,
            kv_cache=kv_cache,
            mask=torch.cat([mask[prompt_rows], response_mask], dim=1),
            lengths=mask.sum(-1)[prompt_rows],
            width=ids.shape[1],
            finished=torch.zeros_like(rows, dtype=torch.bool),
            offsets=offsets[prompt_rows] if self._reads_images else None,
        )
        return batch, logits[prompt_rows]

    def _decode(
        self,
        batch: "_DecodeBatch",
        logits: torch.Tensor,
        sampling: SamplingParams,
        out: GeneratedTokens,
        history: "rollout.TokenHistory | None",
    ) -> None:
        """Draw tokens into `out` until every sequence has stopped or reached max_new_tokens."""
        stop_ids = torch.tensor(self.stop_condition(sampling).ids, dtype=torch.int64, device=self._device)
        for step in range(sampling.max_new_tokens):
            steps = torch.full_like(batch.rows, step)
            process = None if history is None else history.processor(logits, batch.rows, steps)
            if self._never:
                process = without_tokens(self._never_ids, logits, process)
            tokens, log_probs = draw_tokens(logits, uniforms(batch.keys, step), sampling, process=process)
            unfinished = ~batch.finished
            rows = batch.rows[unfinished]
            out.tokens[rows, step] = tokens[unfinished]
            out.log_probs[rows, step] = log_probs[unfinished]
            out.mask[rows, step] = 1
            batch.finished |= (tokens[:, None] == stop_ids).any(-1)
            if history is not None:
                history.record(rows, steps[unfinished], tokens[unfinished])
                batch.finished |= history.stopped_before(batch.rows, steps + 1)
            report_work(int(out.mask.sum()), out.mask.numel(), "tokens")
            num_finished = int(batch.finished.sum())
            if num_finished == len(tokens) or step + 1 == sampling.max_new_tokens:
                return
            if num_finished >= DROP_SHARE * len(tokens):
                tokens = tokens[batch.drop_finished()]
            mask, positions = batch.next_column()
            logits = self._forward(tokens[:, None], mask, positions, batch.kv_cache)
            if self._routes is not None:
                self._routes.add_tokens(batch.rows)

    @cached_property
    def _never_ids(self) -> torch.Tensor:
        return torch.tensor(self._never, device=self._device)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, kv_cache: Any, **images: torch.Tensor
    ) -> torch.Tensor:
        """Append ids (S, q) to the cache and return the logits (S, V) after the last. mask: (S, cached + q)."""
        # A model with ALiBi accepts no positions, and an older model always computes all logits.
        optional = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in optional.items() if name in self._accepted}
        options[self._cache_argument] = kv_cache
        output = self._model(input_ids=ids, attention_mask=mask, use_cache=True, **options, **images)
        return output.logits[:, -1]


@dataclass
class _DecodeBatch:
    """The sequences that are decoded together.

    rows: (S,) int64, rows in the output.
    keys: (S,) int64, of the random streams.
    mask: (S, P + R) int64, attention, with ones where responses will be.
    lengths: (S,) int64, tokens so far, which is the next token's position.
    width: columns of the mask in use.
    offsets: (S,) int64, what images add to positions, see `prefill_inputs`; None: the model reads text only.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    kv_cache: Any
    mask: torch.Tensor
    lengths: torch.Tensor
    width: int
    finished: torch.Tensor
    offsets: torch.Tensor | None

    def drop_finished(self) -> torch.Tensor:
        """Keep only the unfinished sequences; return their former places in the batch."""
        kept = places_after_drop(self.finished)
        for layer in self.kv_cache.layers:
            if hasattr(layer, "keep_rows"):
                layer.keep_rows(kept)
            else:
                _select_rows(layer, kept)
        self.rows, self.keys, self.mask, self.lengths, self.finished = (
            column[kept] for column in (self.rows, self.keys, self.mask, self.lengths, self.finished)
        )
        if self.offsets is not None:
            self.offsets = self.offsets[kept]
        return kept

    def next_column(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention mask and positions of the next token.

        They are (S, width + 1), and (S, 1) or (4, S, 1).
        """
        self.width += 1
        positions = self.lengths[:, None]
        if self.offsets is not None:
            positions = torch.stack([positions, *[positions + self.offsets[:, None]] * 3])
        self.lengths = self.lengths + 1
        return self.mask[:, : self.width], positions


def places_after_drop(finished: torch.Tensor) -> torch.Tensor:
    """Return for each place of the smaller batch the place whose sequence it gets, (K,) int64.

    Unfinished sequences of the first K places stay. The others fill the places of finished ones, so that at most as
    many rows move as sequences have finished.

    Args:
        finished: (S,) bool, K of them false.
    """
    kept = (~finished).nonzero().squeeze(-1)
    places = torch.arange(len(kept), device=finished.device)
    places[finished[: len(kept)]] = kept[kept >= len(kept)]
    return places


def _select_rows(layer: Any, rows: torch.Tensor) -> None:
    """Make row i of a cache layer that of row rows[i].

    Layers with recurrent states have another name for it.
    """
    select = layer.reorder_cache if hasattr(layer, "recurrent_states") else layer.batch_select_indices
    select(rows)


def _contiguous(head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Give the head's states memory of their own: of a slice, torch would expand the head's matrix once per row."""
    return args[0].contiguous(), *args[1:]


def _build_model(setup: RolloutSetup, held: fingerprint.HeldDtypes) -> torch.nn.Module:
    """Return the model on its device, ready to generate.

    Random weights do not change the global random state.
    """
    config = load_hf_config(setup)
    loader = auto_class(config)
    options = {"dtype": setup.dtype, "trust_remote_code": setup.trust_remote_code}
    model: Any
    if setup.load_format == "auto":
        with model_errors(setup.model_path, "cannot load it"):
            model = loader.from_pretrained(setup.model_path, config=config, **options)
    else:
        with _seeded(setup.seed), model_errors(setup.model_path, "cannot build it"):
            model = loader.from_config(config, **options)
    layer_kinds.use_exact_attention(model, setup.override_config.get("attn_implementation"))
    _group_queries(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if fingerprint.pushed_dtype(name, held) != setup.dtype:
            tensor.data = tensor.data.float()
    model.get_output_embeddings().register_forward_pre_hook(_contiguous)
    return model.to(setup.device).eval().requires_grad_(False)


def _group_queries(model: Any) -> None:
    """Replace transformers' `sdpa` by `_grouped_attention`, where a model's attention can be replaced."""
    from transformers import AttentionMaskInterface, masking_utils

    if model.config.get_text_config()._attn_implementation == "sdpa" and not layer_kinds.obstacle(model):
        AttentionMaskInterface.register(GROUPED, masking_utils.sdpa_mask)
        layer_kinds.set_text_attention(model, GROUPED, _grouped_attention)


def _grouped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Return attention (S,1,heads,d) of one new token per row, and None for its weights.

    Called by transformers: query (S,heads,1,d); key, value (S,fewer heads,T,d). Query heads with the same key are the
    queries of one call. transformers repeats keys and values for each of them at every token, if prompts differ in
    length: on a CPU that takes 2 to 20 times as long. Several new tokens per row are computed by transformers.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.size(2) > 1 or (mask is not None and mask.size(1) > 1) or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    queries, scale = query.squeeze(2).unflatten(1, (key.size(1), -1)), options.get("scaling")
    out = torch.nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)[:, None], None


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _new_cache(config: Any, *, max_tokens: int) -> Any:
    """Return an empty cache with the model's layer types, whose full-attention layers grow in place.

    Args:
        config: The model's.
        max_tokens: Tokens that a sequence can reach.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    kv_cache = DynamicCache(config=config)
    kv_cache.layers = [
        _growing_layer_class()(max_tokens) if type(layer) is DynamicLayer else layer for layer in kv_cache.layers
    ]
    return kv_cache


@cache
def _growing_layer_class() -> type:
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        """A cache layer with spare capacity behind the used tokens.

        `DynamicLayer` copies every key and value into new memory at every token. At 256 sequences the page faults took
        up to 10 times as long as the model. `keys` and `values` are views of the used part, so everything else is
        inherited. The memory of dropped rows is freed when the layer grows.

        Args:
            max_tokens: Tokens that a sequence can reach; no more are reserved.
        """

        def __init__(self, max_tokens: int) -> None:
            super().__init__()
            self._max_tokens = max_tokens

        keys: torch.Tensor  # the base class initialises both before they are read here
        values: torch.Tensor
        _stores: tuple[torch.Tensor, torch.Tensor]  # made by `batch_select_indices`, which comes after a prefill

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
            if not self.is_initialized:
                return super().update(key_states, value_states, *args, **kwargs)
            used = self.keys.shape[-2]
            end = used + key_states.shape[-2]
            if end > self._stores[0].shape[-2]:
                self._make_stores(end)
            self._stores[0][:, :, used:end], self._stores[1][:, :, used:end] = key_states, value_states
            return self._use(end)

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            super().batch_select_indices(indices)
            self._make_stores(self.keys.shape[-2])

        def keep_rows(self, places: torch.Tensor) -> None:
            """Make row i that of row places[i], for the rows of `places_after_drop`. Moves only rows that change."""
            used, size = self.keys.shape[-2], len(places)
            [changed] = (places != torch.arange(size, device=places.device)).nonzero(as_tuple=True)
            for store in self._stores:
                store[changed, :, :used] = store[places[changed], :, :used]
            self._stores = self._stores[0][:size], self._stores[1][:size]
            self._use(used)

        def _use(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys, self.values = self._stores[0][:, :, :end], self._stores[1][:, :, :end]
            return self.keys, self.values

        def _make_stores(self, used: int) -> None:
            """Copy keys and values to new memory with room for some tokens behind the `used` ones."""
            capacity = max(used, min(used + CACHE_GROWTH_TOKENS, self._max_tokens))
            room = (0, 0, 0, capacity - self.keys.shape[-2])
            self._stores = torch.nn.functional.pad(self.keys, room), torch.nn.functional.pad(self.values, room)

    return GrowingLayer
