"""Replay of the experts that a mixture of experts has chosen.

It has the column of routes, and hooks on routers.

Loaded only by runs with `actor_rollout_ref.actor.router_replay.mode=R2` or `R3`.
"""
