"""Programs that `reward_score.code` sends to a sandbox as text: they run there, and import only each other."""
