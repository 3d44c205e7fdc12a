"""From prompts to rows of training data: generate, score, compare, and compute advantages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from examples.openrlhf_ppo import common, remote_call
from examples.openrlhf_ppo.remote_call import Experience, RequestOutput
from hybridrl.algos import apply_kl_penalty, get_adv_estimator
from hybridrl.workers.rollout.sampling.sampler import SamplingParams


class SamplesGenerator:
    """Lets the rollout answer the prompts of a step."""

    def __init__(self, args: Mapping[str, Any]):
        self.args = args

    def generate_samples(self, prompts: Sequence[list[int]], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sequences (B, T) and the mask of the generated tokens (B, R).

        The rollout holds the weights of the step before.
        """
        params = SamplingParams(max_new_tokens=self.args["prompt_len"], temperature=1.0)
        first_seed = (self.args["seed"] * common.SEED_STRIDE + step) * len(prompts)
        seeds = list(range(first_seed, first_seed + len(prompts)))
        with remote_call.vllm_running(self.args["vllm_enable_sleep"]):
            outputs = list(remote_call.vllm_generate(prompts, seeds, params, step - 1))
        return self._padded(prompts, outputs)

    def _padded(
        self, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.args["prompt_len"]
        lengths_B1 = torch.tensor([[len(output.token_ids)] for output in outputs])
        rows = [
            prompt + output.token_ids + [common.PAD] * (width - len(output.token_ids))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        return torch.tensor(rows), (torch.arange(width) < lengths_B1).float()


class ExperienceMaker:
    """Turns prompts into rows that actor and critic train on."""

    def __init__(self, args: Mapping[str, Any]):
        self.args, self.generator = args, SamplesGenerator(args)

    def make_experience(self, step: int) -> tuple[list[Experience], dict[str, float]]:
        """Return the rows of a step and its metrics."""
        prompts = common.make_prompts(self.args, step)
        sequences_BT, mask_BR = self.generator.generate_samples(prompts, step)
        attention_mask_BT = torch.cat([torch.ones(len(prompts), self.args["prompt_len"]), mask_BR], dim=1)
        rows = list(sequences_BT), list(mask_BR), list(attention_mask_BT)
        scores, log_probs, values, ref_log_probs = remote_call.wait_for(  # four roles at the same time
            remote_call.reward_forward(*rows[:2]),
            remote_call.actor_forward(*rows),
            remote_call.critic_forward(*rows),
            remote_call.reference_forward(*rows),
        )
        scores_BR, log_probs_BR, values_BR = map(common.stack, (scores, log_probs, values))
        ref_log_probs_BR = log_probs_BR if ref_log_probs[0] is None else common.stack(ref_log_probs)
        rewards_BR, kl = apply_kl_penalty(
            scores_BR, log_probs_BR, ref_log_probs_BR, mask_BR, coef=self.args["init_kl_coef"], kind="k1"
        )
        advantages_BR, returns_BR = get_adv_estimator("gae")(
            rewards_BR, mask_BR, values_BT=values_BR, gamma=self.args["gamma"], lam=self.args["lambd"]
        )
        table = (sequences_BT, attention_mask_BT, mask_BR, log_probs_BR, values_BR, advantages_BR, returns_BR)
        experiences = [Experience(*row) for row in zip(*table, strict=True)]
        return experiences, {"score": float(scores_BR.sum(1).mean()), "kl": kl}
