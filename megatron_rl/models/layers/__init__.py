"""Building blocks of a Megatron model: attention, experts, routing, rotary embeddings, precision, context parallelism."""
