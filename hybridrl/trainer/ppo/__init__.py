"""PPO, GRPO and relatives: trainer, stages, and what a step is made of."""
