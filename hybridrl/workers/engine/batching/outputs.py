"""Read a model's outputs for a micro-batch: log-probs, entropy, values, scores.

Used by the FSDP engine. How the model is parallel is not its concern.

The vocabulary is large, so logits are avoided: `head.TokenStatsHead` computes log-probs without them. Where it cannot,
and for outputs that need all log-probs, the head of a language model only receives the states whose logits are needed.
A hook on the output embedding selects them. This works for any Hugging Face causal model, also sharded and with tied
embeddings, because the model's own forward still runs, including soft caps and scales on the logits.

Shapes: b rows of a micro-batch, R response width, N response tokens, H hidden size, V vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hybridrl.algos import token_stats
from hybridrl.algos.token_stats.from_states import TokenStats
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import TokenTerm
from hybridrl.workers.engine.batching.head import TokenStatsHead
from hybridrl.workers.engine.batching.layout import TokenLayout

OUTPUTS = {"causal_lm": ("log_probs", "entropy", "sum_pi_squared"), "value": ("values",), "score": ("scores",)}


def check_outputs(outputs: tuple[str, ...], *, kind: str, terms: Collection[str] = ()) -> None:
    """Raise ValueError for an output that a model of this kind, with these terms, does not have."""
    known = (*OUTPUTS[kind], *terms)
    if not outputs or not {*outputs} <= {*known}:
        raise ValueError(f"outputs={outputs!r}: a model of kind {kind!r} computes {', '.join(known)}")


Columns = Mapping[str, torch.Tensor]


def token_columns(batch: DataProto, rows: list[int], cell: torch.Tensor, terms: Mapping[str, TokenTerm]) -> Columns:
    """Return the entries (N, ...) of the columns that terms read, on the device of `cell`.

    A placeholder, which has no rows, gets zeros.

    Args:
        cell: (N,) int64, the tokens' flat indices in (b,R) of the rows.
    """
    found: dict[str, torch.Tensor] = {}
    for name in {name: None for term in terms.values() for name in term.columns}:
        column = batch.batch[name]
        cells = column[rows].flatten(0, 1)[cell.cpu()] if rows else column.new_zeros(len(cell), *column.shape[2:])
        found[name] = cells.to(cell.device)
    return found


class OutputReader:
    """Run a model on layouts and read its outputs.

    Build it once per model, since it hooks the head.

    Args:
        passed: Fields of a layout that the model's attention needs: "spans" of `packed_attention`, "tree" of
            `tree_attention`, "part" of `sequence_parallel`.
        terms: Further outputs of a causal model.
        whole_logits: Compute log-probs from whole logits.
        chunk: See `TokenStatsHead`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kind: str,
        temperature: float,
        passed: tuple[str, ...] = (),
        terms: Mapping[str, TokenTerm] | None = None,
        whole_logits: bool = False,
        chunk: int | None = None,
    ):
        self.model, self.temperature, self.passed = model, temperature, passed
        self.terms = terms or {}
        self._read = {"causal_lm": self._log_probs, "value": self._values, "score": self._scores}[kind]
        self._wanted_states: torch.Tensor | None = None  # states for the head; the hook consumes them
        self._head_output: torch.Tensor | None = None
        if kind == "causal_lm":
            head = _output_embedding(model)
            head.register_forward_pre_hook(self._select_states)
            self._stats_head = (
                None if whole_logits else TokenStatsHead(model, head, temperature=temperature, chunk=chunk)
            )
        if kind == "score":
            _score_head(model).register_forward_hook(self._store_head_output)

    def __call__(
        self, layout: TokenLayout, *, outputs: tuple[str, ...], columns: Columns | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the named outputs of one micro-batch, float32 on the model's device.

        Shape (b,R), 0 off the response; "scores" (b,); terms (b,R) or (b,R,K).

        Args:
            columns: What terms read, see `token_columns`.
        """
        return self._read(layout, outputs, columns or {})

    def _call(self, layout: TokenLayout) -> Any:
        more = {name: getattr(layout, name) for name in self.passed}
        if layout.pixel_values is not None:
            more |= {"pixel_values": layout.pixel_values, "image_grid_thw": layout.image_grid_thw}
        return self.model(input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False, **more)

    def _run(self, layout: TokenLayout) -> torch.Tensor:
        return self._call(layout).logits

    def _log_probs(self, layout: TokenLayout, outputs: tuple[str, ...], columns: Columns) -> dict[str, torch.Tensor]:
        stats: TokenStats | None = None
        if self._stats_head is not None and not self.terms.keys() & {*outputs}:
            stats = self._stats_head(self._call, layout, outputs=outputs)
        found = stats.by_name() if stats is not None else self._from_logits(layout, outputs, columns)
        return {name: _cells(found[name], layout) for name in outputs}

    def _from_logits(self, layout: TokenLayout, outputs: tuple[str, ...], columns: Columns) -> dict[str, torch.Tensor]:
        """Return the outputs (N, ...) of response tokens, from their logits."""
        self._wanted_states = layout.state
        logits = self._run(layout).flatten(0, -2)
        # The hook did not run: the model does not call its output embedding as a module.
        if self._wanted_states is not None:
            logits, self._wanted_states = logits[layout.state], None
        stats = token_stats.token_stats(
            logits,
            layout.labels,
            temperature=self.temperature,
            with_entropy="entropy" in outputs,
            with_sum_pi_squared="sum_pi_squared" in outputs,
        )
        found = stats.by_name()
        for name in self.terms.keys() & {*outputs}:
            term = self.terms[name]
            found[name] = token_stats.of_log_probs(
                logits, term.fn, [columns[column] for column in term.columns], temperature=self.temperature
            )
        return found

    def _values(self, layout: TokenLayout, outputs: tuple[str, ...], columns: Columns) -> dict[str, torch.Tensor]:
        return {"values": _cells(self._run(layout).flatten()[layout.state], layout)}

    def _scores(self, layout: TokenLayout, outputs: tuple[str, ...], columns: Columns) -> dict[str, torch.Tensor]:
        # transformers finds a row's last token by comparing ids with the pad token. That is wrong where the pad token
        # is also a real one (often EOS). So store the head's output at every token and read it where a row ends.
        pooled = self._run(layout)
        per_token, self._head_output = self._head_output, None
        assert per_token is not None, "the hook of the head ran in the forward pass"
        scores = per_token.flatten()[layout.last].float()
        if layout.last_row is not None:
            scores = scores.new_zeros(layout.shape[0]).index_copy(0, layout.last_row, scores)
        # FSDP gathers the root's parameters for the backward pass when a gradient reaches the root's own output.
        return {"scores": scores + 0.0 * pooled.sum() if pooled.requires_grad else scores}

    def _select_states(self, head: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if self._wanted_states is None:
            return None
        states, self._wanted_states = self._wanted_states, None
        return (args[0].flatten(0, -2)[states][None],)

    def _store_head_output(self, head: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self._head_output = output


def _cells(values_N: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """Scatter values of response tokens to their cells: (N, ...) -> (b, R, ...) float32, 0 elsewhere."""
    b, R = layout.shape
    rest = values_N.shape[1:]
    cells = values_N.new_zeros(b * R, *rest, dtype=torch.float32)
    return cells.index_copy(0, layout.cell, values_N.float()).view(b, R, *rest)


def _output_embedding(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} has no output embedding and hence no log-probs; use a causal language model"
        )
    return head


def _score_head(model: nn.Module) -> nn.Module:
    head = getattr(model, "score", None)
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} has no per-token head named score; set reward_model.model.path to a decoder saved "
            "by AutoModelForSequenceClassification"
        )
    return head
