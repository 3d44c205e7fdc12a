"""Down-sampling: a step generates and scores n samples of each prompt, and trains on k of them.

The trainer's stage `select_samples` calls it, before anything is computed by actor, critic or reference. So only k
samples cost a forward and a backward pass, and advantages compare the chosen ones, as in PODS. Lives in the driver.
"""

import numpy as np
import torch

from hybridrl.algos.sample_selection import SELECTIONS
from hybridrl.config.schema.ppo import SelectSamplesConfig
from hybridrl.protocol import DataProto


def choose_samples(
    batch: DataProto, config: SelectSamplesConfig, *, n: int, seed: int
) -> tuple[DataProto, dict[str, float]]:
    """Return the chosen rows in their order, k adjacent ones per prompt, and metrics.

    Args:
        batch: Scored samples, n adjacent rows per prompt.
        config: Settings `algorithm.select_samples`, with a k.
        n: Samples per prompt.
        seed: Seed of `method=random`.
    """
    assert config.k is not None, "the stage runs only with a k"
    scores_GN = batch.batch["token_level_scores"].double().sum(-1).reshape(-1, n).numpy()
    valid_GN = batch.batch["reward_valid"].bool().reshape(-1, n).numpy()
    places_Gk = SELECTIONS[config.method](scores_GN, valid_GN, k=config.k, seed=seed)
    rows = (np.arange(len(places_Gk))[:, None] * n + places_Gk).reshape(-1)
    scores = scores_GN[valid_GN]
    metrics = {
        "training/select_samples/seq_reward_mean": float(scores.mean()) if len(scores) else float("nan"),
        "training/select_samples/left_out_samples": float(len(batch) - len(rows)),
    }
    return batch.select_idxs(torch.from_numpy(rows)), metrics
