from .agent_loop.base import AgentLoop as AgentLoop
from .agent_loop.base import register_agent_loop as register_agent_loop
from .agent_loop.manager import AgentLoopManager as AgentLoopManager
from .router import ReplicaRouter as ReplicaRouter
