"""Trainers of one model on fixed data: supervised fine-tuning, preference learning, reward models."""
