"""The schemas of `python -m hybridrl.main_dpo` and `python -m hybridrl.main_rm`."""

from dataclasses import dataclass

from hybridrl.config.fields import section, setting
from hybridrl.config.schema.sft import SupervisedConfig, SupervisedDataConfig
from hybridrl.config.schema.workers import RefFSDPConfig

ANSWER = "text, the assistant's messages, or the whole conversation"


@dataclass(frozen=True)
class PairDataConfig(SupervisedDataConfig):
    prompt_key: str = setting("prompt", "Column with the prompt: text, or a list of {role, content}.")
    chosen_key: str = setting("chosen", f"Column with the preferred response: {ANSWER}.")
    rejected_key: str = setting("rejected", f"Column with the other response: {ANSWER}.")
    truncation: str = setting(
        "error", "Rows with a sequence over max_length: stop, or leave them out.", choices=("error", "filter")
    )


@dataclass(frozen=True)
class DPODataConfig(PairDataConfig):
    completion_key: str = setting("completion", f"Column with the response that a label judges (kto): {ANSWER}.")
    label_key: str = setting("label", "Column with the label, true for a desirable response (kto).")


@dataclass(frozen=True)
class RMDataConfig(PairDataConfig):
    margin_key: str | None = setting(
        None, "Column with the margin by which the scores of a pair should differ; null means none."
    )


@dataclass(frozen=True)
class PreferenceLossConfig:
    loss_type: str = setting(
        "dpo", "Preference loss by its registered name: dpo, ipo, kto, orpo or simpo, or one of your own."
    )
    beta: float = setting(0.1, "Strength of the tie to the reference policy; orpo: weight of its odds ratio.", gt=0)
    label_smoothing: float = setting(0.0, "Assumed share of swapped pairs (dpo).", ge=0, lt=0.5)
    simpo_gamma: float = setting(0.5, "Target margin of the rewards (simpo).", ge=0)
    desirable_weight: float = setting(1.0, "Weight of desirable responses (kto).", gt=0)
    undesirable_weight: float = setting(1.0, "Weight of undesirable responses (kto).", gt=0)


@dataclass(frozen=True)
class PreferenceRefConfig:
    fsdp_config: RefFSDPConfig = section(
        RefFSDPConfig, "Offload of the reference policy; all other settings are the trained model's."
    )


@dataclass(frozen=True)
class DPOConfig(SupervisedConfig):
    data: DPODataConfig = section(DPODataConfig, "Preferences.")
    loss: PreferenceLossConfig = section(PreferenceLossConfig, "The preference loss.")
    ref: PreferenceRefConfig = section(PreferenceRefConfig, "The reference policy: the model at the start.")


@dataclass(frozen=True)
class RMConfig(SupervisedConfig):
    data: RMDataConfig = section(RMDataConfig, "Preferences.")
