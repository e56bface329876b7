"""Code that is needed only because a laptop has no GPU; none of it runs where CUDA is available."""
