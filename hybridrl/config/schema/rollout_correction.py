"""Settings of the rollout correction, its named presets, and what both mean together: `CorrectionPlan`.

Names and values of the presets are verl's. A preset is data: settings that it fixes, and thresholds that the user may
still change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hybridrl.config.fields import setting
from hybridrl.errors import ConfigError

KEY = "algorithm.rollout_correction"
DEFAULT_THRESHOLD = 2.0
REJECTION_KINDS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
BOUNDS_HINT = "write one number, or two as lo_hi with a decimal point in both: '0.5_5.0' (0.5_5 would be read as 0.55)"

_TOKEN, _SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO = {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": ["0.999_1.001"]}
_K3 = {"rollout_rs": ["seq_mean_k3"], "rollout_rs_threshold": [0.01]}
_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": {**_SEQUENCE, "rollout_rs": ["seq_sum_k1"], "rollout_rs_threshold": ["0.5_2.0"]},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_GEO, **_SEQUENCE},
    "decoupled_geo_rs_token_tis": {**_GEO, **_TOKEN},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_K3, **_SEQUENCE},
    "decoupled_k3_rs_token_tis": {**_K3, **_TOKEN},
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": {**_CLIP, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_CLIP, **_K3},
    "bypass_pg_is": {**_REINFORCE, **_SEQUENCE},
    "bypass_pg_token_icepop": {**_REINFORCE, **_ICEPOP},
    "bypass_pg_geo_rs": {**_REINFORCE, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_REINFORCE, **_GEO, **_SEQUENCE},
    "bypass_pg_geo_rs_token_tis": {**_REINFORCE, **_GEO, **_TOKEN},
}
"""verl's `RolloutCorrectionConfig.<name>()`: the settings that each one fixes."""
THRESHOLDS = ("rollout_is_threshold", "rollout_rs_threshold")


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    preset: str | None = setting(
        None,
        "Named choice of all settings below; thresholds and batch_normalize may be given beside it.",
        choices=tuple(PRESETS),
    )
    rollout_is: str | None = setting(
        None,
        "Importance weights of the loss: trainer's over rollout's probability, per token or sequence; null means none.",
        choices=("token", "sequence"),
    )
    rollout_is_threshold: float | str | None = setting(
        None, "Largest weight (null: 2), or text lo_hi: weights outside of both become 0, as in '0.5_5.0'."
    )
    rollout_is_batch_normalize: bool = setting(False, "Divide the weights by their mean over the step's batch.")
    rollout_rs: list[str] | None = setting(
        None, f"Leave tokens or sequences out of the loss by their divergence: some of {', '.join(REJECTION_KINDS)}."
    )
    rollout_rs_threshold: list[float | str] | None = setting(
        None, "Largest divergence, one or one for each rollout_rs; for k1 bounds lo_hi of its exponential, or 1/hi_hi."
    )
    bypass_mode: bool | None = setting(
        None, "Take the rollout's log-probs for old_log_probs, without a forward pass, and the loss bypass_mode."
    )
    loss_type: str | None = setting(
        None, "Loss of bypass_mode; null means ppo_clip.", choices=("ppo_clip", "reinforce")
    )


class RejectionBounds(NamedTuple):
    """A kind of `REJECTION_KINDS` with its bounds; kinds of k1 have a lower one too."""

    kind: str
    upper: float
    lower: float | None = None


@dataclass(frozen=True)
class CorrectionPlan:
    """What a rollout correction does, with presets resolved and thresholds read.

    Attributes:
        rollout_is: "token", "sequence", or None for no weights.
        is_threshold: Largest weight, or upper bound.
        is_lower: Lower bound, below which a weight becomes 0. None: weights are truncated.
        batch_normalize: Whether weights are divided by their mean.
        rejections: What is left out of the loss.
        bypass_mode: Whether the rollout's log-probs are the old ones.
        loss_type: Loss of bypass mode.
    """

    rollout_is: str | None
    is_threshold: float
    is_lower: float | None
    batch_normalize: bool
    rejections: tuple[RejectionBounds, ...]
    bypass_mode: bool
    loss_type: str

    @property
    def weighs(self) -> bool:
        """Whether the driver computes weights. In bypass mode the loss does."""
        return self.rollout_is is not None and not self.bypass_mode

    @property
    def rejects(self) -> bool:
        """Whether the driver rejects tokens. In bypass mode the loss does."""
        return bool(self.rejections) and not self.bypass_mode


def correction_plan(config: RolloutCorrectionConfig) -> CorrectionPlan:
    """Return what these settings mean.

    Raises:
        ConfigError: A threshold or a kind cannot be read; the message has the key, the value and what to write.
    """
    values = resolved_settings(config)
    if values["rollout_is_threshold"] is None:
        values["rollout_is_threshold"] = DEFAULT_THRESHOLD
    lower, upper = read_bounds(values["rollout_is_threshold"], key=f"{KEY}.rollout_is_threshold")
    if lower is None and upper < 1:
        raise ConfigError(
            f"{KEY}.rollout_is_threshold={upper:g}: is below 1, the weight of a sample on policy; {BOUNDS_HINT}"
        )
    return CorrectionPlan(
        rollout_is=values["rollout_is"],
        is_threshold=upper,
        is_lower=lower,
        batch_normalize=config.rollout_is_batch_normalize,
        rejections=tuple(_rejections(values["rollout_rs"], values["rollout_rs_threshold"])),
        bypass_mode=bool(values["bypass_mode"]),
        loss_type=values["loss_type"] or "ppo_clip",
    )


def resolved_settings(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Return the settings with the preset's in place of those that are not given."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return given | {name: value for name, value in PRESETS[config.preset or "disabled"].items() if given[name] is None}


def read_bounds(value: float | str, *, key: str) -> tuple[float | None, float]:
    """Return (lower, upper) of a number or of text `lo_hi`; lower is None for a single number.

    Raises:
        ConfigError: The text cannot be read, a bound is not above 0, or lower is above upper.
    """
    try:
        bounds = [value] if isinstance(value, float | int) else [float(part) for part in value.strip().split("_")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not all(0 < bound < float("inf") for bound in bounds):
        raise ConfigError(f"{key}={value}: must be one or two numbers above 0; {BOUNDS_HINT}")
    if bounds[0] > bounds[-1]:
        raise ConfigError(f"{key}={value}: the lower bound is above the upper one; write lo_hi")
    return (float(bounds[0]) if len(bounds) == 2 else None), float(bounds[-1])


def split_list(values: list[Any] | None) -> list[Any]:
    """Return the entries of a list whose texts may have several, separated by commas.

    verl's command lines write them so.
    """
    entries: list[Any] = []
    for value in values or []:
        entries += [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else [value]
    return entries


def _rejections(kinds: list[str] | None, thresholds: list[float | str] | None) -> Iterator[RejectionBounds]:
    names, limits = split_list(kinds), split_list(thresholds)
    if unknown := [name for name in names if name not in REJECTION_KINDS]:
        raise ConfigError(f"{KEY}.rollout_rs={unknown[0]}: is not known; known are {', '.join(REJECTION_KINDS)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{KEY}.rollout_rs={','.join(names)}: names a kind twice; leave one out")
    if not names and not limits:
        return
    if not names:
        raise ConfigError(f"{KEY}.rollout_rs_threshold={thresholds}: has no effect without {KEY}.rollout_rs")
    if len(limits) not in (1, len(names)):
        raise ConfigError(
            f"{KEY}.rollout_rs_threshold={'null' if not limits else thresholds}: {KEY}.rollout_rs has {len(names)} "
            f"kinds; give one threshold, or one for each"
        )
    for name, limit in zip(names, limits * len(names) if len(limits) == 1 else limits, strict=True):
        lower, upper = read_bounds(limit, key=f"{KEY}.rollout_rs_threshold")
        if lower is not None and not name.endswith("k1"):
            raise ConfigError(
                f"{KEY}.rollout_rs_threshold={limit}: {name} is never negative and has an upper bound only; give "
                f"one number"
            )
        yield RejectionBounds(name, upper, 1 / upper if lower is None and name.endswith("k1") else lower)
