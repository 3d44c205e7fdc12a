from .agent_loop.base import AgentLoop as AgentLoop
from .agent_loop.base import register_agent_loop as register_agent_loop
from .agent_loop.manager import AgentLoopManager as AgentLoopManager
from .hybrid import HybridRollout as HybridRollout
from .hybrid import HybridScheduler as HybridScheduler
from .router import ReplicaRouter as ReplicaRouter
from .service import PolicyService as PolicyService
