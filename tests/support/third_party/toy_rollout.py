"""A rollout outside the package, in one file: a plain decoding loop around a Hugging Face model, row by row.

python -m hybridrl.main_ppo actor_rollout_ref.rollout.name=path/to/toy_rollout.py:ToyRollout ...
"""

from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM

from hybridrl.workers.rollout import GeneratedTokens, Rollout, RolloutCapabilities, RolloutSetup, SamplingParams


class ToyRollout(Rollout):
    """Draws with torch's generator, and declares no more than that."""

    capabilities = RolloutCapabilities(
        log_probs=True, sampling=frozenset({"temperature", "stop_token_ids", "ignore_eos"})
    )

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup)
        # The files have some weights of this model; the first push brings the right ones.
        self.model = AutoModelForCausalLM.from_pretrained(setup.model_path, dtype=setup.dtype).eval()

    @torch.no_grad()
    def replace_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        for name, tensor in weights:
            own[name].copy_(tensor)

    @torch.no_grad()
    def generate_tokens(
        self, prompts: list[list[int]], keys: torch.Tensor, sampling: SamplingParams, *, num_done: int = 0
    ) -> GeneratedTokens:
        out = GeneratedTokens.empty(len(keys), sampling.max_new_tokens, pad_token_id=self.setup.pad_token_id)
        stops = self.stop_condition(sampling).ids
        for row, key in enumerate(keys.tolist()):
            tokens, random = list(prompts[row // sampling.n]), torch.Generator().manual_seed(key)
            for step in range(sampling.max_new_tokens):
                logits = self.model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
                log_probs = (logits / (sampling.temperature if sampling.do_sample else 1)).log_softmax(-1)
                drawn = (
                    torch.multinomial(log_probs.exp(), 1, generator=random) if sampling.do_sample else logits.argmax()
                )
                tokens.append(int(drawn))
                out.tokens[row, step], out.mask[row, step], out.log_probs[row, step] = drawn, 1, log_probs[drawn]
                if tokens[-1] in stops:
                    break
        return out
