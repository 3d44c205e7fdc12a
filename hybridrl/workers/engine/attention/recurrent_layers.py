"""Recurrent layers over packed rows and prefix trees.

Each sequence starts anew. Each branch of a tree goes on from its parent's end.

A recurrent layer (gated delta rule, Mamba, short convolution) carries a state from token to token. transformers'
kernels separate packed sequences only where a package of CUDA kernels is installed; the torch code ignores where they
begin. Here the layer's own forward runs on one segment after the other. It reads and writes its state where generation
does, in a cache. A segment with a subtree keeps its last state. Its children start from that state, and their
gradients add up in it, as those of separate rows do.

Segments without a subtree that have the same parent run as one padded batch: nothing reads a state behind padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hybridrl.workers.engine.attention.layer_kinds import CACHES, recurrent_modules
from hybridrl.workers.engine.attention.spans import AttentionTree, SequenceSpan

LAYOUT = ("spans", "tree")
States = dict[int, torch.Tensor]


class LayerState:
    """The state of one recurrent layer after a segment, in the place of transformers' cache.

    It answers as a cache, and as each of its layers. Nothing is written in place, so that several segments can start
    from one state and gradients reach it.
    """

    record_past = True  # keeps layers from their one-token convolution, which writes in place

    def __init__(self, conv: States | None = None, recurrent: States | None = None):
        self.conv_states: States = conv or {}
        self.recurrent_states: States = recurrent or {}
        self.layers = self

    def __getitem__(self, layer_idx: int) -> "LayerState":
        return self

    def fork(self, num_rows: int) -> "LayerState":
        """Return this state for `num_rows` segments that start from it."""
        both = (self.conv_states, self.recurrent_states)
        return LayerState(*({n: s.expand(num_rows, *s.shape[1:]) for n, s in states.items()} for states in both))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a segment before this one has left a state."""
        return bool(self.conv_states) if state_idx is None else state_idx in self.conv_states

    # From transformers 5.24 on layers ask by these three, and before by the attributes.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent_states.get(state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def update_conv_state(
        self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> torch.Tensor:
        """Return the inputs (b,channels,n) of a convolution with those before them, and keep the last."""
        before = self.conv_states.get(state_idx)
        whole = states if before is None else torch.cat([before, states], -1)
        self.conv_states[state_idx] = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(
        self, states: torch.Tensor, layer_idx: int | None = None, state_idx: int = 0
    ) -> torch.Tensor:
        """Keep the state after a segment's last token."""
        self.recurrent_states[state_idx] = states
        return states


@dataclass(frozen=True)
class Step:
    """One call of a recurrent layer.

    Attributes:
        tokens: (b*W,) int64, index into the row of each cell's token; padding cells repeat a token.
        width: W.
        cells: (n,) int64, cells whose output is used.
        places: (n,) int64, their tokens.
        parent: Number of the segment whose state the call starts from. None: it starts anew.
        number: Number of the segment whose state is kept. None: no other segment needs it.
    """

    tokens: torch.Tensor
    width: int
    cells: torch.Tensor
    places: torch.Tensor
    parent: int | None = None
    number: int | None = None

    def to(self, device: torch.device) -> "Step":
        """Return the step with its tensors on a device."""
        tensors = (tensor.to(device) for tensor in (self.tokens, self.cells, self.places))
        tokens, cells, places = tensors
        return Step(tokens, self.width, cells, places, self.parent, self.number)


def steps_of_spans(spans: tuple[SequenceSpan, ...]) -> list[Step]:
    """Return the calls for a packed row of separate sequences."""
    return [Step(span.tokens, span.width, span.cells, span.tokens[span.cells]) for span in spans]


def steps_of_tree(tree: AttentionTree) -> list[Step]:
    """Return the calls for a prefix tree: parents before their children, leaves of one parent together.

    A segment of one token with a parent keeps no state: layers compute a single token by code that writes in place. Its
    children compute the token again, from the parent's state.
    """
    steps: list[Step] = []
    leaves: dict[int | None, list[list[int]]] = {}
    starts: dict[int, tuple[int | None, list[int]]] = {}  # where children of a segment start: parent, tokens before
    used: set[int] = set()
    for number, lineage in enumerate(tree.lineages):
        start, stop, end = tree.segments[number]
        parent, before = starts[lineage[-2]] if len(lineage) > 1 else (None, [])
        tokens = [*before, *range(start, stop)]
        if end == stop:
            leaves.setdefault(parent, []).append(tokens)
        elif len(tokens) == 1 and parent is not None:
            starts[number] = parent, tokens
        else:
            steps.append(_batch([tokens], used, parent=parent, number=number))
            starts[number] = number, []
    for parent, members in leaves.items():
        steps += [_batch(group, used, parent=parent) for group in _of_similar_length(members)]
    return steps


def _of_similar_length(members: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yield groups in which no member is longer than twice the shortest."""
    group: list[list[int]] = []
    for member in sorted(members, key=len):
        if group and len(member) > 2 * len(group[0]):
            yield group
            group = []
        group.append(member)
    yield group


def _batch(members: list[list[int]], used: set[int], *, parent: int | None, number: int | None = None) -> Step:
    """Return the call for segments as a padded batch. Tokens in `used` have an output already."""
    width = max(map(len, members))
    width = max(width, 2) if parent is not None else width  # see `steps_of_tree`
    cells, places = [], []
    for row, member in enumerate(members):
        for column, token in enumerate(member):
            if token not in used:
                used.add(token)
                cells.append(row * width + column)
                places.append(token)
    tokens = [token for member in members for token in member + member[-1:] * (width - len(member))]
    return Step(torch.tensor(tokens), width, torch.tensor(cells), torch.tensor(places), parent, number)


class RecurrentLayers:
    """Let a model's recurrent layers compute packed rows segment by segment.

    The model gets "spans" or "tree" of a layout as a keyword argument. A backward pass that recomputes activations
    belongs to the last forward pass.

    Args:
        model: The model, sharded if it is to be.
        is_passed_on: Whether the attention needs the layout, too.
    """

    def __init__(self, model: nn.Module, *, is_passed_on: bool):
        self._is_passed_on = is_passed_on
        self._steps: list[Step] = []
        self._order = torch.empty(0, dtype=torch.int64)
        model.register_forward_pre_hook(self._read_layout, with_kwargs=True)
        for module, cache in recurrent_modules(model):
            module.forward = partial(self._forward, module.forward, cache)

    def _read_layout(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        spans, tree = (kwargs.get(name) for name in LAYOUT)
        steps = steps_of_tree(tree) if tree is not None else steps_of_spans(spans or ())
        device = kwargs["input_ids"].device
        self._steps = [step.to(device) for step in steps]
        self._order = torch.cat([step.places for step in self._steps]).argsort()
        return args, kwargs if self._is_passed_on else {k: v for k, v in kwargs.items() if k not in LAYOUT}

    def _forward(
        self, forward: Callable[..., torch.Tensor], cache: str, /, hidden_states: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return a layer's output (1,T,H) for a packed row."""
        kwargs = {name: value for name, value in kwargs.items() if name not in (*LAYOUT, *CACHES, "attention_mask")}
        states: dict[int, LayerState] = {}
        parts = []
        for step in self._steps:
            rows = hidden_states[0].index_select(0, step.tokens).unflatten(0, (-1, step.width))
            state = None if step.number is None else LayerState()
            if step.parent is not None:
                state = states[step.parent].fork(len(rows))
            parts.append(forward(rows, **{cache: state}, **kwargs).flatten(0, 1).index_select(0, step.cells))
            if step.number is not None and state is not None:
                states[step.number] = state
        return torch.cat(parts).index_select(0, self._order)[None]


@torch.no_grad()
def state_obstacle(model: Any) -> str | None:
    """Return why segments of this model cannot start from a state, or None.

    It tries new layers of the model's classes: some ignore a state that more than one token follows.
    """
    config, device = model.config.get_text_config(), next(model.parameters()).device  # kernels may need the model's
    modules = {type(module): (module, cache) for module, cache in recurrent_modules(model)}
    for layer, (module, cache) in modules.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            run, states = layer(config, module.layer_idx).float().eval(), torch.randn(1, 12, config.hidden_size)
        run, states = run.to(device), states.to(device)
        for name, buffer in module.named_buffers(recurse=False):  # some are set by the model
            run.register_buffer(name, buffer.to(device).float())
        kept = LayerState()
        run(states[:, :8], **{cache: kept})
        found, expected = run(states[:, 8:], **{cache: kept.fork(1)}), run(states)[:, 8:]
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()):
            return f"has recurrent layers that do not continue from a state ({layer.__name__})"
    return None
