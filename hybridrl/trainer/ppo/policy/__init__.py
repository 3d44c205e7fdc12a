"""The policy of a run behind one interface.

Who generates, how far ahead, and how weights reach the rollout.
"""
