"""Discounted sums over the tokens of responses, without a loop over tokens.

Shape letters: b rows, T response tokens, L tokens of a block, N blocks.
"""

import torch

BLOCK = 64
"""Tokens of a block.

Two levels of 64 cover 4096 tokens; the products need 2 L operations per token.
"""


class TokenOrder:
    """The tokens on a mask (b, T) bool, moved together where others lie between them.

    The tokens of a turn of an environment are skipped without discount: the policy's next token follows its last one.
    """

    def __init__(self, mask_bT: torch.Tensor) -> None:
        self.mask_bT = mask_bT
        after_gap_bT = mask_bT[:, 1:] & ~mask_bT[:, :-1]
        begins_b = torch.count_nonzero(mask_bT[:, :1], dim=1) + torch.count_nonzero(after_gap_bT, dim=1)
        self.has_gaps = bool((begins_b > 1).any())
        if self.has_gaps:
            self._place_bT = mask_bT.long().cumsum(1) - 1

    def close_gaps(self, values_bT: torch.Tensor) -> torch.Tensor:
        """Return the values of the tokens in their order, 0 elsewhere. Values off the mask are not read."""
        if not self.has_gaps:
            return torch.where(self.mask_bT, values_bT, 0)
        num_tokens = values_bT.shape[1]
        closed = values_bT.new_zeros(len(values_bT), num_tokens + 1)  # one more: where values off the mask go
        closed.scatter_(1, torch.where(self.mask_bT, self._place_bT, num_tokens), values_bT)
        return closed[:, :num_tokens]

    def restore(self, closed_bT: torch.Tensor) -> torch.Tensor:
        """Return values in the places of their tokens, 0 off the mask."""
        placed_bT = closed_bT.gather(1, self._place_bT.clamp(min=0)) if self.has_gaps else closed_bT
        return torch.where(self.mask_bT, placed_bT, 0)


def discounted_sum_to_go(terms_bT: torch.Tensor, decay: float | torch.Tensor) -> torch.Tensor:
    """Return S_t = x_t + decay S_{t+1} for every t, (b, T).

        S_t = sum_{s >= t, same block} decay^(s - t) x_s + decay^(start of the next block - t) S_(its start)

    The first term is a product with a triangular matrix (L, L). The sums at the starts of blocks are of the same form,
    with decay^L over N blocks.

    Args:
        decay: A number, or one per row (b,).
    """
    b, T = terms_bT.shape
    L = min(T, BLOCK)
    if b == 0 or T == 0:
        return terms_bT.clone()
    padded_bT = torch.nn.functional.pad(terms_bT, (0, -T % L))
    decay_r11 = torch.as_tensor(decay, dtype=terms_bT.dtype, device=terms_bT.device).reshape(-1, 1, 1)
    steps_L = torch.arange(L, device=terms_bT.device)
    weights_rLL = (decay_r11 ** (steps_L[:, None] - steps_L).clamp(min=0)).tril()  # of x_s (row) in S_t (column)
    blocks_bNL = padded_bT.view(b, -1, L) @ (weights_rLL[0] if len(weights_rLL) == 1 else weights_rLL)
    if blocks_bNL.shape[1] > 1:
        starts_bN = discounted_sum_to_go(blocks_bNL[:, :, 0], (decay_r11**L).flatten())
        carry_r1L = decay_r11 ** (L - steps_L)
        blocks_bNL[:, :-1] += starts_bN[:, 1:, None] * carry_r1L
    return blocks_bNL.view(b, -1)[:, :T]
