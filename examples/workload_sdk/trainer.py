"""Role trainer: GRPO (arXiv:2402.03300) over the role groups that `BaseTrainer` provides."""

from typing import Any

import torch

from examples.workload_sdk.policy import NUM_DIGITS
from hybridrl.algos import get_adv_estimator
from hybridrl.sdk import BaseTrainer


class GRPOTrainer(BaseTrainer):
    def __init__(self, actor_handles: Any, actor_classes: Any, config: Any):
        super().__init__(actor_handles, actor_classes, config)  # only definitions here; the work is in init

    def init(self) -> None:
        torch.set_num_threads(1)
        self.RG_ACTOR.init_model()
        self.RG_ROLLOUT.init_model()
        print(f"roles: {', '.join(self.get_role_groups())}", flush=True)

    def fit(self) -> None:
        for step in range(1, self.config.num_steps + 1):
            self.job.report_step(step)
            self.RG_ROLLOUT.load_weights(self.RG_ACTOR.weights()[0])
            prompts_BP, answers_BP, scores_B = self.sample(step)
            norms = self.RG_ACTOR.update(self.shards(prompts_BP, answers_BP, scores_B))
            print(f"step {step:3d}  score {float(scores_B.mean()):.3f}  grad norm {norms[0]:.3f}", flush=True)

    def sample(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return prompts and answers (B, P), and their scores (B,); the answers to one prompt are adjacent."""
        random = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        unique_GP = torch.randint(NUM_DIGITS, (self.config.num_prompts, self.config.prompt_len), generator=random)
        count = len(self.rollouts)
        seeds = [step * count + rank for rank in range(count)]
        answers_BP = self.RG_ROLLOUT.generate(list(unique_GP.tensor_split(count)), seeds)  # entry i to process i
        prompts_BP = unique_GP.repeat_interleave(self.config.samples_per_prompt, dim=0)
        [scores_B] = self.RG_REWARD.score(prompts_BP, answers_BP)
        return prompts_BP, answers_BP, scores_B

    def shards(
        self, prompts_BP: torch.Tensor, answers_BP: torch.Tensor, scores_B: torch.Tensor
    ) -> list[dict[str, torch.Tensor]]:
        """Return the rows of each actor process, with their advantages."""
        mask_BP = torch.ones(answers_BP.shape)
        rewards_BP = torch.zeros(answers_BP.shape)
        rewards_BP[:, -1] = scores_B  # a score belongs to the whole answer
        group_B = torch.arange(len(scores_B)) // self.config.samples_per_prompt
        advantages_BP, _ = get_adv_estimator("grpo")(rewards_BP, mask_BP, group_B=group_B)
        parts = (column.tensor_split(len(self.actors)) for column in (prompts_BP, answers_BP, advantages_BP))
        return [dict(zip(("prompts", "answers", "advantages"), part, strict=True)) for part in zip(*parts, strict=True)]
