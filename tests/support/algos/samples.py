"""Small batches from a seed, the same for the stored numbers of other implementations and for ours.

Shape letters: B rows in groups of three, T response tokens, N pairs, C tokens, V vocabulary. Everything is float64.
"""

import torch

F64 = torch.float64
LENGTHS = (5, 3, 1, 4, 5, 2)
GROUP_SIZE = 3


def samples(seed: int, *, holes: bool = False) -> dict[str, torch.Tensor]:
    """Return the columns of a batch of B = 6 rows and T = 5 tokens, 0 off the mask.

    Args:
        seed: Of the values; the lengths are always the same.
        holes: An environment wrote the second token of the rows that have a third one.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    lengths_B1 = torch.tensor(LENGTHS)[:, None]
    mask_BT = torch.arange(max(LENGTHS)) < lengths_B1
    if holes:
        mask_BT[:, 1] &= lengths_B1[:, 0] < 3
    shape = tuple(mask_BT.shape)
    mask_BT = mask_BT.to(F64)
    old_BT = -normal(*shape).abs() - 0.05
    columns = {
        "rewards": (normal(*shape) * 8).round() / 8,
        "values": normal(*shape),
        "old": old_BT,
        "new": old_BT + 0.4 * normal(*shape),
        "ref": old_BT + 0.4 * normal(*shape),
        "advantages": normal(*shape),
        "sum_pi_squared": normal(*shape).abs().clamp(max=1),
        "is_weights": normal(*shape).abs().clamp(0.1, 2),
    }
    columns["sum_pi_squared"] = torch.maximum(columns["sum_pi_squared"], (2 * old_BT).exp())
    masked = {name: column * mask_BT for name, column in columns.items()}
    return masked | {
        "mask": mask_BT,
        "group": torch.arange(len(LENGTHS)) // GROUP_SIZE,
        "row_advantages": normal(len(LENGTHS), 1).expand(shape) * mask_BT,
        "baseline": normal(len(LENGTHS)),
        "components": (normal(len(LENGTHS), 2) * 8).round() / 8,
    }


def pairs(seed: int) -> dict[str, torch.Tensor]:
    """Return scores (N,) of N = 5 pairs: log-ratios to a reference, mean log-probs below 0, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    chosen_N, rejected_N = 3 * torch.randn(2, 5, generator=generator, dtype=F64)
    means = -torch.rand(2, 5, generator=generator, dtype=F64) * 2 - 0.01
    lengths = torch.randint(1, 6, (2, 5), generator=generator)
    return {
        "chosen": chosen_N,
        "rejected": rejected_N,
        "chosen_mean": means[0],
        "rejected_mean": means[1],
        "chosen_lengths": lengths[0],
        "rejected_lengths": lengths[1],
    }


def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits (C, V) of a student and of its teacher."""
    generator = torch.Generator().manual_seed(seed)
    student_CV, teacher_CV = 2 * torch.randn(2, 4, 7, generator=generator, dtype=F64)
    return student_CV, teacher_CV
