from .checkpoint.store import CheckpointStore as CheckpointStore
from .data.prompt_dataset import RLHFDataset as RLHFDataset
from .ppo.trainer import RayPPOTrainer as RayPPOTrainer
from .preference.trainer import DPOTrainer as DPOTrainer
from .preference.trainer import RMTrainer as RMTrainer
from .roles import ResourcePoolManager as ResourcePoolManager
from .roles import Role as Role
from .sft.trainer import SFTTrainer as SFTTrainer
