"""Log-probs of given tokens: what is asked, the answer, and how logits become one.

The training service asks, and rollouts and trainers answer.

Shapes: N tokens, k most likely ones, K targets of a position, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens whose log-probs are wanted: each one's after those before it.

    Attributes:
        tokens: N of them.
        temperature: Log-probs are those of softmax(logits / temperature).
        num_top: How many of the most likely tokens at each position, too.
        targets: (N-1,K) int64 token ids whose log-probs are wanted, too; -1 for none.
        adapter: As in `Request`.
    """

    tokens: tuple[int, ...]
    temperature: float = 1.0
    num_top: int = 0
    targets: np.ndarray | None = field(default=None, compare=False)
    adapter: int = 0


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of a prompt's tokens after the first.

    (N-1,) those of the tokens, (N-1,k) ids and log-probs of the k most likely ones, and (N-1,K) those of the targets.
    """

    log_probs: np.ndarray
    top: tuple[np.ndarray, np.ndarray] | None
    targets: np.ndarray | None


def score_logits(logits_NV: torch.Tensor, wanted: ScoreRequest, *, first: int = 0) -> TokenScores:
    """Return the scores of the N tokens after position `first`, on CPU."""
    log_probs_NV = (logits_NV.float() / wanted.temperature).log_softmax(-1)
    end = first + len(logits_NV)
    following = torch.tensor(wanted.tokens[first + 1 : end + 1], device=logits_NV.device)
    top = targets = None
    if wanted.num_top:
        values, ids = log_probs_NV.topk(min(wanted.num_top, log_probs_NV.size(-1)), dim=-1)
        top = ids.cpu().numpy(), values.cpu().numpy()
    if wanted.targets is not None:
        chosen = torch.from_numpy(wanted.targets[first:end]).to(logits_NV.device)
        found = log_probs_NV.gather(-1, chosen.clamp(min=0))
        targets = torch.where(chosen >= 0, found, 0.0).cpu().numpy()
    return TokenScores(log_probs_NV.gather(-1, following[:, None]).squeeze(-1).cpu().numpy(), top, targets)


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """Return the scores of a prompt whose parts were scored apart."""
    tops = [part.top for part in parts if part.top is not None]
    targets = [part.targets for part in parts if part.targets is not None]
    return TokenScores(
        np.concatenate([part.log_probs for part in parts]),
        (np.concatenate([ids for ids, _ in tops]), np.concatenate([values for _, values in tops])) if tops else None,
        np.concatenate(targets) if targets else None,
    )
