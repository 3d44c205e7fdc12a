"""Durations of work on devices: a roofline of the model and the device, or measured times of a decoding step.

A decoding step of b sequences reads the weights and the keys and values of all their tokens, and computes b tokens: the
slower of the two counts. Training computes 6 N operations per token and a forward pass 2 N, at a share of the peak;
N are the parameters that compute a token. Times are estimates: they leave out preemption for lack of memory and
everything that `Costs` does not name. `stage_seconds` adds them up to a step, with one length for all responses. It
leaves out rewards, waits for the longest response, and the driver. The schedule with lengths that differ is
`benchmarks/simulation`.

Sources: 2 N and 6 N are of Kaplan et al. (arXiv 2001.08361, 2.1); the roofline of decoding is of Pope et al. (arXiv
2211.05102, 2.1). Peaks and bandwidths are of the makers' data sheets, dense bfloat16.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.config import PPOConfig


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        peak_flops: Dense bfloat16 operations per second.
        bandwidth: Bytes per second of its memory.
        link: Bytes per second to other machines.
    """

    peak_flops: float
    bandwidth: float
    link: float = 25e9


@dataclass(frozen=True)
class Model:
    """A transformer; `kv_width` is key heads times their size, `value_bytes` is 2 in bfloat16.

    `inactive_params` are of experts that do not compute a token.
    """

    params: float
    layers: int
    hidden: int
    kv_width: int
    value_bytes: int = 2
    inactive_params: float = 0.0

    @property
    def token_flops(self) -> float:
        """Operations of a forward pass of one token, without attention."""
        return 2 * (self.params - self.inactive_params)

    @property
    def weight_bytes(self) -> float:
        return self.value_bytes * self.params

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values of one token."""
        return 2 * self.value_bytes * self.layers * self.kv_width

    def attention_flops(self, tokens: Any) -> Any:
        """Return operations of attention of one new token to this many tokens, a number or an array."""
        return 4 * self.layers * self.hidden * tokens


DEVICES = {
    "h20": Device(148e12, 4.0e12),
    "h100": Device(989e12, 3.35e12, link=50e9),
    "h800": Device(989e12, 3.35e12),
    "h200": Device(989e12, 4.8e12, link=50e9),
    "a100": Device(312e12, 2.04e12),
}


@dataclass(frozen=True)
class Costs:
    """Seconds of a model's work on a device.

    Attributes:
        decode_efficiency: Share of peak and bandwidth that decoding reaches.
        step_overhead_s: Of every decoding step: launches, sampling, scheduler.
        train_efficiency: Share of the peak that training and scoring reach.
        update_overhead_s: Of every optimizer step: optimizer, gathering of weights that computation does not hide.
        call_overhead_s: Of every scoring call.
        push_overhead_s: Of every push of weights, besides the bytes.
        max_num_seqs: Sequences that one replica decodes at once.
        prompt_tokens: Of every prompt.
        samples: Of every prompt; generation computes it once for all of them.
        shared_rows: Rows of one prompt for which a training or scoring pass computes it once.
        train_ranks: Devices that share the sequences of one data-parallel rank.
        decode_table: Measured seconds of a decoding step by number of sequences, ascending, instead of the roofline.
    """

    device: Device
    model: Model
    decode_efficiency: float = 0.7
    step_overhead_s: float = 0.004
    train_efficiency: float = 0.35
    update_overhead_s: float = 0.5
    call_overhead_s: float = 0.5
    push_overhead_s: float = 0.5
    max_num_seqs: int = 256
    prompt_tokens: int = 200
    samples: int = 1
    shared_rows: int = 1
    train_ranks: int = 1
    decode_table: tuple[tuple[float, float], ...] = ()

    def decode_step_s(self, sequences: float, tokens: float, *, devices: int = 1) -> float:
        """Return the seconds of one decoding step of sequences that have this many tokens together."""
        if self.decode_table:
            sizes, seconds = zip(*self.decode_table, strict=True)
            return float(np.interp(sequences, sizes, seconds))
        share = self.decode_efficiency * devices
        memory = (self.model.weight_bytes + self.model.kv_bytes * tokens) / (self.device.bandwidth * share)
        flops = self.model.token_flops * sequences + self.model.attention_flops(tokens)
        return max(memory, flops / (self.device.peak_flops * share)) + self.step_overhead_s

    def generate_s(self, lengths: Sequence[int], *, done: int = 0, devices: int = 1) -> float:
        """Return the seconds in which one replica generates responses, with continuous batching.

        Args:
            lengths: Tokens to generate.
            done: Tokens that every response has already; they are read again first.
            devices: Devices of the replica.
        """
        waiting = list(reversed(lengths))
        context = self.prompt_tokens + done
        seconds = self._forward_s(len(waiting) * (self.prompt_tokens / self.samples + done)) / devices
        open_rows: list[tuple[int, int]] = []  # number of the last and of the first decoding step
        step, open_tokens = 0, 0.0
        while waiting or open_rows:
            while waiting and len(open_rows) < self.max_num_seqs:
                heapq.heappush(open_rows, (step + waiting.pop(), step))
                open_tokens += context
            steps = open_rows[0][0] - step
            middle = open_tokens + len(open_rows) * steps / 2
            seconds += steps * self.decode_step_s(len(open_rows), middle, devices=devices)
            step, open_tokens = open_rows[0][0], open_tokens + len(open_rows) * steps
            while open_rows and open_rows[0][0] == step:
                open_tokens -= context + step - heapq.heappop(open_rows)[1]
        return seconds

    def _forward_s(self, tokens: float) -> float:
        return self.model.token_flops * tokens / (self.device.peak_flops * self.train_efficiency)

    def score_s(self, lengths: np.ndarray) -> float:
        """Return the seconds in which one rank computes log-probs of responses (rows,) of these lengths."""
        return self._pass_s(lengths) / self.train_ranks

    def update_s(self, lengths: np.ndarray) -> float:
        """Return the seconds in which one rank trains on these responses.

        A backward pass costs two forward ones.
        """
        return 3 * self._pass_s(lengths) / self.train_ranks

    def _pass_s(self, lengths: np.ndarray) -> float:
        tokens: Any = lengths.astype(np.float64) + self.prompt_tokens / self.shared_rows
        flops = self.model.token_flops * tokens + self.model.attention_flops(tokens / 2) * tokens
        return float(flops.sum()) / (self.device.peak_flops * self.train_efficiency)

    def push_s(self) -> float:
        """Return the seconds of sending, or of receiving, all weights."""
        return self.push_overhead_s + self.model.weight_bytes / self.device.link


SCORES, UPDATES = ("old_log_prob", "ref", "values"), ("update_critic", "update_actor")


def stage_seconds(config: PPOConfig, costs: Costs, *, tokens: int, stages: Collection[str]) -> dict[str, float]:
    """Return stage -> seconds, in the order of the step.

    Args:
        config: The job. A critic and a reference count as models of the actor's size.
        costs: Of the actor's model on one device.
        tokens: Mean tokens of a response.
        stages: Those of `SCORES` and `UPDATES` that the job has.
    """
    policy, trainer = config.actor_rollout_ref, config.trainer
    rows = config.data.train_batch_size * policy.rollout.n
    trains = trainer.n_gpus_per_node * trainer.nnodes
    generates = policy.rollout.n_gpus_per_node * policy.rollout.nnodes or trains
    replica = policy.rollout.tensor_model_parallel_size
    own = np.full(-(-rows // trains), tokens)
    steps = -(-config.data.train_batch_size // policy.actor.ppo_mini_batch_size) * policy.actor.ppo_epochs
    shares = [tokens] * -(-rows * replica // generates)
    seconds = {"gen": costs.generate_s(shares, devices=replica)}
    seconds |= {name: costs.score_s(own) + costs.call_overhead_s for name in SCORES if name in stages}
    update_s = policy.actor.ppo_epochs * costs.update_s(own) + steps * costs.update_overhead_s
    return seconds | {name: update_s for name in UPDATES if name in stages} | {"update_weights": costs.push_s()}


def step_seconds(config: PPOConfig, seconds: dict[str, float]) -> float:
    """Return the seconds of a step: generation runs beside the rest with `trainer.lag` and a pool of its own."""
    rest = sum(seconds.values()) - seconds["gen"]
    ahead = config.trainer.rollout_lag > 0 and config.actor_rollout_ref.rollout.n_gpus_per_node > 0
    return max(seconds["gen"], rest) if ahead else seconds["gen"] + rest
