__version__: str

from .algos.advantages import register_adv_est as register_adv_est
from .algos.policy_losses import register_policy_loss as register_policy_loss
from .algos.preference_losses import register_preference_loss as register_preference_loss
from .config import DPOConfig as DPOConfig
from .config import PPOConfig as PPOConfig
from .config import RMConfig as RMConfig
from .config import SFTConfig as SFTConfig
from .config import load_config as load_config
from .data_plane.batch import DataProto as DataProto
from .data_plane.futures import DataProtoFuture as DataProtoFuture
from .data_plane.rows import DataProtoItem as DataProtoItem
from .errors import ConfigError as ConfigError
from .errors import HybridRLError as HybridRLError
from .grpo_trainer import GRPOTrainer as GRPOTrainer
from .master.jobs.builder import DLJobBuilder as DLJobBuilder
from .master.jobs.builder import RLJobBuilder as RLJobBuilder
from .rewards.manager import RewardManager as RewardManager
from .serving.agent_loop.base import register_agent_loop as register_agent_loop
from .serving.agent_loop.manager import AgentLoopManager as AgentLoopManager
from .single_controller.dispatch import Dispatch as Dispatch
from .single_controller.dispatch import Execute as Execute
from .single_controller.dispatch import register as register
from .single_controller.placement.resource_pool import RayResourcePool as RayResourcePool
from .single_controller.ray_worker_group import (
    RayWorkerGroup as RayWorkerGroup,
)
from .single_controller.worker import Worker as Worker
from .single_controller.worker_group import RayClassWithInitArgs as RayClassWithInitArgs
from .trainer.ppo.trainer import RayPPOTrainer as RayPPOTrainer
from .trainer.roles import ResourcePoolManager as ResourcePoolManager
from .trainer.roles import Role as Role
from .trainer.supervised.preference import DPOTrainer as DPOTrainer
from .trainer.supervised.preference import RMTrainer as RMTrainer
from .trainer.supervised.sft import SFTTrainer as SFTTrainer
from .training_service.client import training_client as training_client
from .workers.actor_rollout_ref import ActorRolloutRefWorker as ActorRolloutRefWorker
from .workers.critic import CriticWorker as CriticWorker
from .workers.reward_model import RewardModelWorker as RewardModelWorker
from .workers.rollout.base import register_rollout as register_rollout
