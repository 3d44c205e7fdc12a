"""What the trainers of one model on fixed data share: supervised fine-tuning, preference learning, reward models."""
