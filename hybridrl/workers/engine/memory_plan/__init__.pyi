from .choice import MemoryChoice as MemoryChoice
from .choice import choose as choose
from .choice import chunk_for as chunk_for
from .prediction import EngineMemory as EngineMemory
from .prediction import EngineSizes as EngineSizes
from .prediction import MemoryParts as MemoryParts
