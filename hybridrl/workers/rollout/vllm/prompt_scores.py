"""Log-probs of given tokens, computed from vLLM's hidden states.

vLLM's own log-probs of prompts are Python objects per token, have the most likely tokens and no chosen ones, and fail
with adapters once several requests are in a step. `PromptScorer` takes vLLM's place for requests that name themselves
in `extra_args["scored"]`: each step that computes a part of such a prompt adds its part of the scores.

Imported inside vLLM's worker, by `worker_extension`.
"""

from typing import Any

import torch

from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores, joined, score_logits
from hybridrl.workers.rollout.vllm.weights.adapters import HeldAdapters

ROWS = 256  # whose logits are in memory together


class PromptScorer:
    """See above.

    Args:
        model_runner: vLLM's.
        adapters: None: the engine has none.
    """

    def __init__(self, model_runner: Any, adapters: HeldAdapters | None):
        self._runner, self._adapters = model_runner, adapters
        self._prompts: dict[str, tuple[ScoreRequest, list[TokenScores]]] = {}
        model_runner._get_prompt_logprobs_dict = self._score_step

    def expect(self, name: str, wanted: ScoreRequest) -> None:
        """Score the prompt of a request that will be added: all tokens but the last."""
        self._prompts[name] = (wanted, [])

    def scores(self, name: str) -> TokenScores | None:
        """Return a prompt's scores and forget it; None if they are not complete."""
        wanted, parts = self._prompts.pop(name)
        is_complete = sum(len(part.log_probs) for part in parts) == len(wanted.tokens) - 1
        return joined(parts) if is_complete else None

    def _score_step(self, hidden_states: torch.Tensor, num_scheduled: dict[str, int]) -> dict[str, Any]:
        """Score the tokens that a step has computed, in place of vLLM's method."""
        runner = self._runner
        for name in [name for name in runner.num_prompt_logprobs if name in num_scheduled]:
            request, index = runner.requests[name], runner.input_batch.req_id_to_index[name]
            first, start = request.num_computed_tokens, runner.query_start_loc.np[index].item()
            num = min(num_scheduled[name], len(request.prompt_token_ids) - first)
            if found := self._prompts.get(request.sampling_params.extra_args["scored"]):
                wanted, parts = found
                for row in range(0, num, ROWS):
                    rows = hidden_states[start + row : start + min(row + ROWS, num)]
                    parts.append(score_logits(self._logits(rows, wanted.adapter), wanted, first=first + row))
            if first + num >= len(request.prompt_token_ids):
                del runner.num_prompt_logprobs[name]
        return {}

    def _logits(self, hidden_ND: torch.Tensor, adapter: int) -> torch.Tensor:
        if self._adapters is not None:
            self._adapters.use_for_rows(adapter, len(hidden_ND))
        return self._runner.model.compute_logits(hidden_ND)
