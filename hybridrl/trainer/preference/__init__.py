"""Learning from preferences: a policy (`main_dpo`), or a reward model (`main_rm`)."""
