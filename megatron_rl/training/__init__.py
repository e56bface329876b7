"""Training of one Megatron model: micro-batches, losses, optimizer, checkpoints, and the engine that runs them."""
