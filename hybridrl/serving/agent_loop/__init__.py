"""Agent loops: how a response is generated in one or several turns, with tool answers in between."""

from hybridrl.serving.agent_loop.base import AgentLoop, AgentLoopOutput, SingleTurnAgentLoop, register_agent_loop
from hybridrl.serving.agent_loop.programs.http_agent import AgentTask, HTTPAgentLoop
from hybridrl.serving.agent_loop.programs.session_agent import OutsideAgentLoop
from hybridrl.serving.agent_loop.tools.function_tools import function_tool
from hybridrl.serving.agent_loop.tools.tool_agent import ToolAgentLoop, ToolCall
from hybridrl.serving.continuation import PolicyClient

__all__ = [
    "AgentLoop",
    "AgentLoopOutput",
    "AgentTask",
    "HTTPAgentLoop",
    "OutsideAgentLoop",
    "PolicyClient",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "ToolCall",
    "function_tool",
    "register_agent_loop",
]
