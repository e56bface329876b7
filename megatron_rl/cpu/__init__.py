"""What exists because a laptop has no GPU; nothing here runs where CUDA is available."""
