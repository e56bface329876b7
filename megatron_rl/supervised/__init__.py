"""Training on given texts: the supervised warm start and reward models."""
