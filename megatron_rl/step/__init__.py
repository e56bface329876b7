"""The training step: the loop, its stages, and the components that stages share."""
