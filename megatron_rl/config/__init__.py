"""Configuration: the dataclass schema, YAML recipes with overrides, and the checks that run before anything starts."""

from megatron_rl.config.schema import Config

__all__ = ["Config"]
