from .base import Engine as Engine
from .base import EngineSetup as EngineSetup
from .base import LossFn as LossFn
from .base import MeshPosition as MeshPosition
from .base import MicroBatching as MicroBatching
from .base import StateTensors as StateTensors
from .model_files import check_model as check_model
