"""The policy of a run behind one interface: who generates, how far ahead, and how weights reach the rollout."""
