"""Further rows of an episode: conversations of sub-agents, parallel calls, and what came before a compaction.

An agent loop returns them beside the row of its main conversation. Up to here a step counts samples, n of each prompt;
the trainer's stage `add_branches` then appends the other rows. From there on the batch has a row per conversation, and
`episode` says which rows belong together. Lives in the driver; loaded with the first batch of agent loops.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch

from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import BRANCHES, at_last_token, reward_positions
from hybridrl.trainer.ppo.columns import EPISODE, ROUTED_EXPERTS
from hybridrl.trainer.ppo.sampling.replay_buffer import concat_padded
from hybridrl.workers.rollout.responses import padded, prompt_columns, sequence_columns

Branch = Mapping[str, Any]


def add_branch_rows(batch: DataProto, *, pad_token_id: int) -> DataProto:
    """Return the samples, followed by the other rows of their episodes, and `episode` (rows,) int64.

    A further row has the columns of its sample, except for those of its own tokens. Its score is its own, if the agent
    gave one, or else that of the sample; it is on the last token that the row trains. Episodes without a valid reward
    get no further rows, because they train nothing.

    Args:
        batch: Scored samples, with the column `branches`.
        pad_token_id: Fills prompts and responses.
    """
    samples = batch.select(meta_info_keys=[])
    found = samples.non_tensor_batch.pop(BRANCHES, [()] * len(samples))
    samples.batch[EPISODE] = torch.arange(len(samples))
    valid = samples.batch["reward_valid"].tolist()
    owned = [(row, branch) for row, branches in enumerate(found) if valid[row] for branch in branches]
    if not owned:
        return samples
    rows = samples.select_idxs(torch.tensor([row for row, _ in owned]))
    _set_tokens(rows, [branch for _, branch in owned], pad_token_id=pad_token_id)
    _set_scores(rows, [branch for _, branch in owned])
    return concat_padded([samples, rows], pad_token_id=pad_token_id)


def _set_tokens(rows: DataProto, branches: list[Branch], *, pad_token_id: int) -> None:
    """Replace the columns of tokens by those of the branches, in place."""
    columns = cast(dict[str, torch.Tensor], rows.batch)
    width = columns["responses"].shape[1]
    prompt_width = max(columns["prompts"].shape[1], *(len(branch["prompt_ids"]) for branch in branches))
    prompts = prompt_columns(
        [branch["prompt_ids"] for branch in branches], pad_token_id=pad_token_id, width=prompt_width
    )
    responses = padded([branch["response_ids"] for branch in branches], width, fill=pad_token_id)
    lengths = torch.tensor([len(branch["response_ids"]) for branch in branches])[:, None]
    new = sequence_columns(prompts, responses, torch.arange(width) < lengths) | {
        "response_mask": padded([branch["response_mask"] for branch in branches], width),
        "rollout_log_probs": padded([branch["response_logprobs"] for branch in branches], width, fill=0.0),
        "token_versions": padded([branch["token_versions"] for branch in branches], width, fill=-1),
        "weights_version": torch.tensor([branch["version"] for branch in branches]),
        "num_turns": torch.tensor([branch["num_turns"] for branch in branches]),
    }
    if ROUTED_EXPERTS in rows.non_tensor_batch:
        rows.non_tensor_batch[ROUTED_EXPERTS] = one_object_per_row([branch["routes"] for branch in branches])
    if IMAGE_INPUTS in rows.non_tensor_batch or any(branch.get("images") is not None for branch in branches):
        rows.non_tensor_batch[IMAGE_INPUTS] = one_object_per_row([branch["images"] for branch in branches])
    for name, column in new.items():
        if name in columns.keys():
            columns[name] = column.to(columns[name].dtype)


def _set_scores(rows: DataProto, branches: list[Branch]) -> None:
    """Put each row's score on the last token on its mask, in place."""
    columns = cast(dict[str, torch.Tensor], rows.batch)
    shared = columns["token_level_scores"].sum(-1).tolist()
    own = [branch["reward"] for branch in branches]
    scores = [score if given is None else given for score, given in zip(shared, own, strict=True)]
    scores_B = torch.tensor(scores, dtype=torch.float32)
    width = columns["responses"].shape[1]
    columns["token_level_scores"] = at_last_token(scores_B, reward_positions(rows), width=width)
    if "rm_scores" in columns.keys():
        columns["rm_scores"] = torch.zeros_like(columns["rm_scores"])
