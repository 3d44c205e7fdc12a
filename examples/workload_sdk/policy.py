"""The policy: answers some digits; each answer digit is drawn by itself, given all digits of the prompt."""

import torch

NUM_DIGITS, HIDDEN_SIZE = 10, 128


class DigitPolicy(torch.nn.Module):
    """Maps prompts (B, P) int64 to logits of the P answer digits (B, P, 10)."""

    def __init__(self, prompt_len: int):
        super().__init__()
        size = prompt_len * NUM_DIGITS
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(size, HIDDEN_SIZE), torch.nn.Tanh(), torch.nn.Linear(HIDDEN_SIZE, size)
        )

    def forward(self, prompts_BP: torch.Tensor) -> torch.Tensor:
        one_hot_BN = torch.nn.functional.one_hot(prompts_BP, NUM_DIGITS).float().flatten(1)
        return self.layers(one_hot_BN).view(*prompts_BP.shape, NUM_DIGITS)
