"""The model of `effective_time.py`: which share of its time a job computes what it keeps. Pure.

Effective training time ratio (ETTR): productive time of a run over its wall-clock time (Kokolis et al. 2024,
arXiv:2410.21680). Detection, restart, repeated work, snapshots and checkpoints are not productive. MegaScale's
effective training time rate is the same: iterations times the time of an iteration, over the total time
(arXiv:2402.15627).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SECONDS_PER_HOUR = 3600.0
GPUS_PER_NODE = 8
MAX_LOST = 0.3  # share of the time: beyond, `expected_ratio` is not what happens


@dataclass(frozen=True)
class Failure:
    """What one failure costs, in seconds.

    Attributes:
        lost_work_s: Work since the state that the run goes back to.
        detection_s: From the failure until the trainer knows.
        restart_s: From then on until the step runs again.
    """

    lost_work_s: float
    detection_s: float
    restart_s: float

    @property
    def cost_s(self) -> float:
        return self.lost_work_s + self.detection_s + self.restart_s


@dataclass(frozen=True)
class Recovery:
    """How a job comes back from one kind of failure.

    Attributes:
        detection_s: From the failure until the trainer knows. Does not depend on the model.
        start_s: Start of processes and connections. Does not depend on the model.
        state_bytes: That each device loads, in parallel.
        bytes_per_s: Of one device.
        period_s: Between two states to which the run can go back. Half of it is lost on average.
    """

    detection_s: float
    start_s: float
    state_bytes: float
    bytes_per_s: float
    period_s: float

    def failure(self) -> Failure:
        """Return the expected cost of a failure at a random time."""
        return Failure(self.period_s / 2, self.detection_s, self.start_s + self.state_bytes / self.bytes_per_s)


def ratio_of_run(useful_s: float, failures: Sequence[Failure]) -> float:
    """Return the ETTR of a run with these failures: U / (U + sum of costs).

    Args:
        useful_s: Time of the steps that count, with their snapshots.
        failures: All of the run.
    """
    return useful_s / (useful_s + sum(failure.cost_s for failure in failures))


def expected_ratio(failures_per_hour: Mapping[Failure, float], *, overhead: float = 0.0) -> float:
    """Return the ETTR of a long run: (1 - sum(rate * cost)) / (1 + overhead), at least 0.

    The closed form of Kokolis et al. 2024 with several kinds of failures. Failures during a recovery cost as much as
    others, which holds while the sum is small.

    Args:
        failures_per_hour: Failure -> how many of its kind an hour of wall-clock time has.
        overhead: Time for snapshots and checkpoints per time of steps.
    """
    lost = sum(rate * failure.cost_s for failure, rate in failures_per_hour.items()) / SECONDS_PER_HOUR
    return max(0.0, 1.0 - lost) / (1.0 + overhead)


def failures_per_hour(rate_per_gpu_hour: float, num_gpus: int) -> float:
    """Return the failures of a job per hour: one device or its machine stops all of them."""
    return rate_per_gpu_hour * num_gpus


@dataclass(frozen=True)
class Job:
    """A job of an assumed size. What does not depend on the model is measured; the rest is assumed.

    Attributes:
        bytes_per_gpu: Assumed: trained state of one device. It stays the same when a job gets more devices.
        memory_bytes_per_s: Assumed: of one device, to and from the snapshot in its machine's memory.
        storage_bytes_per_s: Assumed: of one device, to and from storage, while all do the same.
        step_s: Assumed: duration of a training step.
        save_freq: Steps between two checkpoints. A snapshot is taken in every step.
        detection_s: Measured: of a lost process.
        process_start_s: Measured: the processes of a role, up to the retried step, with a tiny model.
        engine_start_s: Assumed: what a large engine adds (device context, communicators, compiled graphs).
        machine_detection_s: Measured: a machine that went without a word.
        job_start_s: Measured: a new job, up to its first step, with a tiny model.
        replacement_s: Assumed: until another machine is there.
        machine_share: Share of the failures that take a machine, and with it the snapshots in its memory.
    """

    bytes_per_gpu: float
    memory_bytes_per_s: float
    storage_bytes_per_s: float
    step_s: float
    save_freq: int
    detection_s: float
    process_start_s: float
    engine_start_s: float
    machine_detection_s: float
    job_start_s: float
    replacement_s: float
    machine_share: float

    def process(self) -> Failure:
        """Return a lost process: its role is rebuilt, and all go back to the snapshot of the last step."""
        return Recovery(
            detection_s=self.detection_s,
            start_s=self.process_start_s + self.engine_start_s,
            state_bytes=self.bytes_per_gpu,
            bytes_per_s=self.memory_bytes_per_s,
            period_s=self.step_s,
        ).failure()

    def machine(self) -> Failure:
        """Return a lost machine: a new job goes back to the last checkpoint."""
        return Recovery(
            detection_s=self.machine_detection_s,
            start_s=self.replacement_s + self.job_start_s + self.engine_start_s,
            state_bytes=self.bytes_per_gpu,
            bytes_per_s=self.storage_bytes_per_s,
            period_s=self.step_s * self.save_freq,
        ).failure()

    def overhead(self) -> float:
        """Return the time for snapshots and checkpoints per time of steps; nothing of it is hidden."""
        snapshot_s, save_s = (self.bytes_per_gpu / rate for rate in (self.memory_bytes_per_s, self.storage_bytes_per_s))
        return (snapshot_s + save_s / self.save_freq) / self.step_s

    def ratio(self, rate_per_gpu_hour: float, num_gpus: int) -> float | None:
        """Return the expected ETTR; None where so much is lost that failures during recoveries count."""
        rate = failures_per_hour(rate_per_gpu_hour, num_gpus)
        rates = {self.process(): rate * (1 - self.machine_share), self.machine(): rate * self.machine_share}
        if expected_ratio(rates) < 1 - MAX_LOST:
            return None
        return expected_ratio(rates, overhead=self.overhead())
