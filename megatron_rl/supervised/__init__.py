"""Training on given texts: supervised fine-tuning and reward models."""
