"""Environments: programs that answer the policy and say its reward, each in a process of its own.

A run loads this room for the agent loops `environment_agent` and `verifiers_agent`. A user's environment imports only
`TextEnvironment` and `register_environment` from here, which load nothing else.
"""

from hybridrl.serving.environments.environment import Answer, TextEnvironment, register_environment

__all__ = ["Answer", "TextEnvironment", "register_environment"]
