"""The roles: actor, rollout and reward, in the style of DLRover's first generation.

A method with `@trainer_invocation` is called by the trainer as `self.RG_<ROLE>.method(...)`. If all arguments are lists
with one entry per process, entry i goes to process i.
"""

from typing import Any

import torch
import torch.distributed as dist

from examples.workload_sdk.policy import NUM_DIGITS, DigitPolicy
from hybridrl.algos import agg_loss, get_policy_loss, log_probs_and_entropy
from hybridrl.sdk import BaseWorkload, trainer_invocation


class Actor(BaseWorkload):
    """One process of the policy that is trained. Gradients are summed over the processes."""

    policy: DigitPolicy  # from `init_model` on: the constructor only stores

    def __init__(self, master_handle: Any, config: Any):
        super().__init__(master_handle, config)

    @trainer_invocation(is_async=True, timeout=120)
    def init_model(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(self.config.seed)
        self.policy = DigitPolicy(self.config.prompt_len)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.config.learning_rate, weight_decay=0.0)
        address = f"tcp://{self.torch_master_addr}:{self.torch_master_port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.world_size)

    @trainer_invocation(is_async=True, timeout=60)
    def update(self, rows: dict[str, torch.Tensor]) -> float:
        """Take the optimizer steps of one batch, of which this process has `rows`; return the last gradient's norm."""
        prompts_BP, answers_BP, mask_BP = rows["prompts"], rows["answers"], torch.ones(rows["answers"].shape)
        with torch.no_grad():
            old_log_probs_BP = self._log_probs(prompts_BP, answers_BP)
        num_tokens = mask_BP.numel() * self.world_size
        for _ in range(self.config.num_epochs):
            log_probs_BP = self._log_probs(prompts_BP, answers_BP)
            loss = get_policy_loss("vanilla")(
                log_probs_BP, old_log_probs_BP, rows["advantages"], mask_BP, clip_low=0.2, clip_high=0.28, clip_c=3.0
            )
            self.optimizer.zero_grad()
            agg_loss(loss.losses_BT, mask_BP, "token-mean", num_tokens=num_tokens, num_seqs=len(mask_BP)).backward()
            for parameter in self.policy.parameters():
                dist.all_reduce(parameter.grad)
            norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), max_norm=1.0)
            self.optimizer.step()
        return float(norm)

    def _log_probs(self, prompts_BP: torch.Tensor, answers_BP: torch.Tensor) -> torch.Tensor:
        logits_BPV = self.policy(prompts_BP)
        log_probs_N, _ = log_probs_and_entropy(logits_BPV.flatten(0, 1), answers_BP.flatten())
        return log_probs_N.view(answers_BP.shape)

    @trainer_invocation(target="RANK0")
    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of rank 0, which are those of all: to the trainer as a list of one."""
        return self.policy.state_dict()


def joined(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A post_func: the outputs of all processes as one batch."""
    return torch.cat(outputs)


class Rollout(BaseWorkload):
    """One process that answers prompts with a copy of the policy."""

    policy: DigitPolicy  # from `init_model` on

    def __init__(self, master_handle: Any, config: Any):
        super().__init__(master_handle, config)

    @trainer_invocation(is_async=True, timeout=120)
    def init_model(self) -> None:
        torch.set_num_threads(1)
        self.policy = DigitPolicy(self.config.prompt_len)

    @trainer_invocation()
    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.policy.load_state_dict(weights)

    @trainer_invocation(post_func=joined)
    @torch.no_grad()
    def generate(self, prompts_BP: torch.Tensor, seed: int) -> torch.Tensor:
        """Return `samples_per_prompt` adjacent answers to each prompt."""
        probs_BPV = self.policy(prompts_BP.repeat_interleave(self.config.samples_per_prompt, dim=0)).softmax(-1)
        random = torch.Generator().manual_seed(seed)
        answers_N = torch.multinomial(probs_BPV.flatten(0, 1), 1, generator=random)
        return answers_N.view(probs_BPV.shape[:2])


class Reward(BaseWorkload):
    """Scores answers: the right answer has the prompt's digits in ascending order."""

    def __init__(self, master_handle: Any, config: Any):
        super().__init__(master_handle, config)

    def score(self, prompts_BP: torch.Tensor, answers_BP: torch.Tensor) -> torch.Tensor:
        """Return the share of right digits (B,). Without a decorator, the defaults of `trainer_invocation` hold."""
        assert int(answers_BP.max()) < NUM_DIGITS
        return (answers_BP == prompts_BP.sort(dim=1).values).float().mean(1)
