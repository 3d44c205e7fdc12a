"""What the roles share: the task, tiny models, and one data-parallel optimizer step.

The task needs no data and no tokenizer. A prompt is a few digits, and the answer is the same digits. A response scores
the share of its tokens that are right, so a random policy scores 0.1 and a perfect one 1.

Shape letters: B rows, P prompt tokens, R response tokens, T = P + R, V vocabulary.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.algos import log_probs_and_entropy

NUM_DIGITS = 10
PAD, END = 10, 11  # token ids; a digit is its own token
SEED_STRIDE = 1_000_003  # a prime, so that the seeds of two runs do not meet


def model_config(args: Mapping[str, Any]) -> Any:
    """Return the config of policy, reference and critic body: a two-layer Qwen2."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=NUM_DIGITS + 2,
        hidden_size=args["hidden_size"],
        intermediate_size=2 * args["hidden_size"],
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype="float32",
    )


def write_model_config(args: Mapping[str, Any]) -> str:
    """Write the model's config.json, which the rollout engine reads, and return its directory."""
    directory = os.path.join(args["save_path"], "model")
    model_config(args).save_pretrained(directory)
    return directory


def make_policy(args: Mapping[str, Any]) -> torch.nn.Module:
    """Return the untrained policy; the reference is the same model."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(args["seed"])
    return Qwen2ForCausalLM(model_config(args)).eval()  # without dropout, training needs no other mode


class Critic(torch.nn.Module):
    """A body like the policy's and one value per token."""

    def __init__(self, args: Mapping[str, Any]):
        from transformers import Qwen2Model

        super().__init__()
        torch.manual_seed(args["seed"] + 1)
        self.body = Qwen2Model(model_config(args)).eval()
        self.head = torch.nn.Linear(args["hidden_size"], 1)

    def forward(self, sequences_BT: torch.Tensor, attention_mask_BT: torch.Tensor) -> torch.Tensor:
        """Return the value of the state after each token (B, T)."""
        hidden = self.body(input_ids=sequences_BT, attention_mask=attention_mask_BT).last_hidden_state
        return self.head(hidden).squeeze(-1)


def make_prompts(args: Mapping[str, Any], step: int) -> list[list[int]]:
    """Return the prompts of a step, which depend on the seed and the step alone."""
    random = torch.Generator().manual_seed(args["seed"] * SEED_STRIDE + step)
    return torch.randint(NUM_DIGITS, (args["rollout_batch_size"], args["prompt_len"]), generator=random).tolist()


def stack(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows of one length as one batch."""
    return torch.stack(list(rows))


def mini_batches(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return consecutive parts of `size` rows; the last one may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def columns(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return rows, which are dataclasses of tensors, as one batch per field."""
    return {field.name: stack([getattr(row, field.name) for row in rows]) for field in fields(rows[0])}


def response_log_probs(
    model: torch.nn.Module, sequences_BT: torch.Tensor, attention_mask_BT: torch.Tensor, num_response_tokens: int
) -> torch.Tensor:
    """Return the log-probs of the response tokens (B, R)."""
    logits = model(input_ids=sequences_BT, attention_mask=attention_mask_BT).logits
    logits_BRV = logits[:, -num_response_tokens - 1 : -1]
    labels_BR = sequences_BT[:, -num_response_tokens:]
    log_probs_N, _ = log_probs_and_entropy(logits_BRV.flatten(0, 1), labels_BR.flatten())
    return log_probs_N.view(labels_BR.shape)


def init_torch() -> None:
    """Let torch use one thread: the roles share the machine, and sums have one order."""
    torch.set_num_threads(1)


def init_process_group() -> None:
    """Join the role's process group. The job has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


class Learner:
    """A model with its optimizer, copied to every rank: gradients are summed over ranks.

    Attributes:
        num_updates: Optimizer steps so far.
    """

    def __init__(self, model: torch.nn.Module, *, lr: float):
        self.model, self.num_updates = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def update(self, loss: Callable[[], torch.Tensor]) -> float:
        """Apply one optimizer step and return the gradient's norm. The losses of all ranks add up to the whole."""
        self.optimizer.zero_grad()
        loss().backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        sum_over_ranks(gradients)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.num_updates += 1
        return float(norm)

    def save(self, directory: str) -> None:
        """Write model and optimizer from rank 0, for `load` on every rank."""
        os.makedirs(directory, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_updates": self.num_updates,
        }
        if rank() == 0:
            torch.save(state, os.path.join(directory, "rank_0.pt"))

    def load(self, directory: str) -> None:
        state = torch.load(os.path.join(directory, "rank_0.pt"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the ranks of the role. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def token_count(mask_BR: torch.Tensor) -> float:
    """Return the number of tokens on the masks of all ranks. Collective."""
    count = mask_BR.sum().double()
    sum_over_ranks([count])
    return float(count)
