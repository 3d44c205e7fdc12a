from .checkpoint.store import CheckpointStore as CheckpointStore
from .data.prompt_dataset import RLHFDataset as RLHFDataset
from .ppo.trainer import RayPPOTrainer as RayPPOTrainer
from .roles import ResourcePoolManager as ResourcePoolManager
from .roles import Role as Role
from .supervised.preference import DPOTrainer as DPOTrainer
from .supervised.preference import RMTrainer as RMTrainer
from .supervised.sft import SFTTrainer as SFTTrainer
