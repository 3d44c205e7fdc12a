"""Which groups are complete after the fewest tokens, known before the other ones have ended.

A short round of tail batching (RollPacker, arXiv 2509.21009) ends when enough groups are complete. Here "first" counts
tokens and not seconds: a round trains on the groups whose longest response is the shortest. All responses grow together
from limit to limit. An open response is longer than the limit, so its group comes after all groups that are complete at
the limit. As soon as these are enough, the choice is the one that whole responses would give.

Completion by the clock depends on the load of the machines, and a step that runs again would choose other groups. A
choice by tokens depends on seeds and weights alone. Nothing needs to be recorded to repeat it.

Shapes: S rows, n adjacent ones per group, G groups.
"""

from collections.abc import Sequence

from hybridrl.data_plane.chunking import even_bounds

NUM_LIMITS = 16  # a round is at most a sixteenth of the response length longer than it must be
CHOSEN = "chosen_groups"  # in `meta_info` of a short round's responses: places of their prompts in the request


def round_limits(max_tokens: int) -> list[int]:
    """Return the numbers of tokens at which a round looks for complete groups; the last one is `max_tokens`."""
    return [stop for _, stop in even_bounds(max_tokens, min(NUM_LIMITS, max_tokens))]


def shortest_groups(lengths_S: Sequence[int | None], *, n: int, num_groups: int, limit: int) -> list[int] | None:
    """Return the places of the groups whose longest response is the shortest, ascending; None while they are unknown.

    Of equally long groups, the first ones are chosen.

    Args:
        lengths_S: Tokens of the responses that have ended, None for those that may continue beyond the limit.
        n: Responses per group.
        num_groups: How many to choose.
        limit: Tokens up to which all lengths are known.
    """
    longest = []
    for start in range(0, len(lengths_S), n):
        known = [length for length in lengths_S[start : start + n] if length is not None and length <= limit]
        if len(known) == n:
            longest.append((max(known), start // n))
    return sorted(place for _, place in sorted(longest)[:num_groups]) if len(longest) >= num_groups else None
