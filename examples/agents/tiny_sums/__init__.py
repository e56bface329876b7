from tiny_sums.taskset import TinySumsTaskset

__all__ = ["TinySumsTaskset"]
