"""Curriculum by difficulty: a sampler that puts prompts first which the policy solves about half of the time.

    data.sampler.class_path=hybridrl.trainer.data.curriculum data.sampler.class_name=SuccessRateSampler

A prompt that is always or never solved teaches little: with success rate p, the variance of its reward is p (1 - p).
Every prompt is still used once per epoch. So the order changes from the second epoch on, when the rates are known.
Lives in the driver, in the `PromptLoader`; the trainer's stage `update_sampler` calls `update`.
"""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridrl.errors import CheckpointError
from hybridrl.trainer.data.prompt_loader import ROW

NEWEST_SHARE = 0.5  # of the newest group in a prompt's running success rate
UNKNOWN_RATE = 0.5  # of a prompt that no group was generated for: it comes early
MIN_WEIGHT = 0.05  # of a prompt that is always or never solved, relative to one that is solved half of the time


class SuccessRateSampler:
    """The rows of an epoch, drawn without replacement, with weights 4 p (1 - p).

    Row i has the key e_i / w_i with e_i from an exponential distribution; the smallest key of the rows that are left is
    next. This is weighted sampling without replacement (Efraimidis and Spirakis, 2006). e depends on seed and epoch
    only. So the order depends on nothing but the rates, and a resumed run draws the same rows.

    Args:
        data_source: The training data.
        data_config: Settings `data`; `data.seed` is read.
    """

    def __init__(self, data_source: Any, data_config: Any):
        self.seed, self.epoch = data_config.seed, 0
        self.rates = np.full(len(data_source), np.nan)  # running success rate of each row, nan if unknown
        self._is_left = np.ones(len(data_source), dtype=bool)  # in this epoch
        self._order: list[int] | None = None  # of the rows that are left, last one first; None: to be computed

    def __len__(self) -> int:
        return len(self.rates)

    def __iter__(self) -> Iterator[int]:
        while self._is_left.any():
            if self._order is None:
                self._order = self._sorted_rows()
            row = self._order.pop()
            self._is_left[row] = False
            yield row

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: all rows are left."""
        self.epoch, self._order = epoch, None
        self._is_left[:] = True

    def weights(self) -> np.ndarray:
        """Return the weight of each row, (rows,) float64, from `MIN_WEIGHT` to 1."""
        rates = np.nan_to_num(self.rates, nan=UNKNOWN_RATE)
        return np.maximum(4 * rates * (1 - rates), MIN_WEIGHT)

    def update(self, batch: Any) -> None:
        """Add the results of a generation batch to the rates of its prompts.

        The result of a sample is the column `acc` if the reward function returns it, else its reward, cut to 0..1.
        Samples without a valid reward do not count.
        """
        columns = batch.non_tensor_batch
        rewards = batch.batch["token_level_scores"].sum(-1).double().numpy()
        results = np.array(columns["acc"], dtype=np.float64) if "acc" in columns else rewards
        valid = batch.batch["reward_valid"].bool().numpy() & np.isfinite(results)
        rows = columns[ROW].astype(np.int64)
        for row in np.unique(rows[valid]):
            newest = float(np.clip(results[valid & (rows == row)], 0, 1).mean())
            before = newest if np.isnan(self.rates[row]) else self.rates[row]
            self.rates[row] = before + NEWEST_SHARE * (newest - before)
        self._order = None

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, rows that are left and rates as JSON-able values."""
        return {"epoch": self.epoch, "left": _packed(np.packbits(self._is_left)), "rates": _packed(self.rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the position of a `state_dict`.

        Raises:
            CheckpointError: The state is of another number of rows.
        """
        rates = np.frombuffer(_unpacked(state["rates"]), dtype=np.float64)
        if len(rates) != len(self.rates):
            raise CheckpointError(f"the success rates are of {len(rates)} rows, and the training data has {len(self)}")
        left = np.unpackbits(np.frombuffer(_unpacked(state["left"]), dtype=np.uint8), count=len(rates))
        self.epoch, self.rates, self._is_left, self._order = state["epoch"], rates.copy(), left.astype(bool), None

    def _sorted_rows(self) -> list[int]:
        exponential = np.random.default_rng([self.seed, self.epoch]).exponential(size=len(self.rates))
        order = np.argsort(exponential / self.weights(), kind="stable")
        return order[self._is_left[order]][::-1].tolist()


def _packed(array: np.ndarray) -> str:
    return b64encode(zlib.compress(array.tobytes())).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(b64decode(text))
