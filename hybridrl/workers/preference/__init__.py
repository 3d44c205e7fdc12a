"""Workers that learn from preferences: the policy of `main_dpo`, the reward model of `main_rm`."""
