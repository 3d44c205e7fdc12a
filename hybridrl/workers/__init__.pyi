from .actor_rollout_ref import ActorRolloutRefWorker as ActorRolloutRefWorker
from .critic import CriticWorker as CriticWorker
from .preference.policy import PreferenceWorker as PreferenceWorker
from .preference.reward import RewardTrainingWorker as RewardTrainingWorker
from .replica import ReplicaWorker as ReplicaWorker
from .reward_model import RewardModelWorker as RewardModelWorker
from .sft import SFTWorker as SFTWorker
