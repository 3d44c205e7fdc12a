"""From a micro-batch's layout to what the worker asked for: log-probs, entropy, values, scores. Not how the model is
parallel.

A vocabulary is large, so the head of a language model is only shown the states whose logits are needed: a hook on the
output embedding selects them. That works for any Hugging Face causal model, also sharded and with tied embeddings,
because the model's own forward still runs as its authors wrote it (soft caps and scales on the logits included).

Shapes: b rows of a micro-batch, R response width, N response tokens, H hidden size, V vocabulary.
"""

import torch
from torch import nn

from hybridrl.algos.token_stats import log_probs_and_entropy
from hybridrl.errors import ConfigError
from hybridrl.workers.engine.batching.layout import Layout

OUTPUTS = {"causal_lm": ("log_probs", "entropy"), "value": ("values",), "score": ("scores",)}


def check_outputs(outputs: tuple[str, ...], *, kind: str) -> None:
    """Raise ValueError for an output that a model of this kind does not have."""
    unknown = [name for name in outputs if name not in OUTPUTS[kind]]
    if unknown or not outputs:
        raise ValueError(f"outputs={outputs!r}: a model of kind {kind!r} computes {', '.join(OUTPUTS[kind])}")


class Reader:
    """Runs a model on layouts and reads the results. Made once per model: it hooks the head.

    pass_runs: the model's attention is `packed_attention`, which needs a layout's runs.
    """

    def __init__(self, model: nn.Module, *, kind: str, temperature: float, pass_runs: bool = False):
        self.model, self.temperature, self.pass_runs = model, temperature, pass_runs
        self._read = {"causal_lm": self._log_probs, "value": self._values, "score": self._scores}[kind]
        self._wanted: torch.Tensor | None = None  # states the head is to be shown; taken by the hook
        self._head_output: torch.Tensor | None = None
        if kind == "causal_lm":
            _output_embedding(model).register_forward_pre_hook(self._select)
        if kind == "score":
            _score_head(model).register_forward_hook(self._keep)

    def __call__(self, layout: Layout, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the named outputs of one micro-batch, float32 on the model's device: (b,R), 0 off the response;
        "scores" (b,).
        """
        return self._read(layout, outputs)

    def _run(self, layout: Layout) -> torch.Tensor:
        more = {"runs": layout.runs} if self.pass_runs else {}
        return self.model(input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False, **more).logits

    def _log_probs(self, layout: Layout, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        self._wanted = layout.state
        logits = self._run(layout).flatten(0, -2)
        if self._wanted is not None:  # a model that does not call its output embedding as a module
            logits, self._wanted = logits[layout.state], None
        log_probs, entropy = log_probs_and_entropy(
            logits, layout.labels, temperature=self.temperature, with_entropy="entropy" in outputs
        )
        found = {"log_probs": log_probs, "entropy": entropy}
        return {name: _cells(found[name], layout) for name in outputs}

    def _values(self, layout: Layout, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return {"values": _cells(self._run(layout).flatten()[layout.state], layout)}

    def _scores(self, layout: Layout, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        # transformers finds a row's last token by comparing ids with the pad token, which is wrong where the pad token
        # is also a real one (often EOS). So its choice is ignored: the head's output at every token is kept, and read
        # where a row ends.
        self._run(layout)
        per_token, self._head_output = self._head_output, None
        return {"scores": per_token.flatten()[layout.last].float()}

    def _select(self, head: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if self._wanted is None:
            return None
        states, self._wanted = self._wanted, None
        return (args[0].flatten(0, -2)[states][None],)

    def _keep(self, head: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self._head_output = output


def _cells(values_N: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Put values of response tokens where they belong: (N,) -> (b,R) float32, 0 elsewhere."""
    b, R = layout.shape
    return values_N.new_zeros(b * R, dtype=torch.float32).index_copy(0, layout.cell, values_N.float()).view(b, R)


def _output_embedding(model: nn.Module) -> nn.Module:
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} has no output embedding, so it cannot give log-probs; use a causal language model"
        )
    return head


def _score_head(model: nn.Module) -> nn.Module:
    head = getattr(model, "score", None)
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} has no per-token head named score; use a decoder's "
            "AutoModelForSequenceClassification as reward model"
        )
    return head
