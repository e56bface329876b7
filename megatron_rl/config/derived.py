"""What follows from a configuration and the model folder it names."""

import json
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError


def read_model_json(path: Path) -> dict[str, Any]:
    """config.json of a model folder; ConfigError when it is not a JSON object.

    What a vision-language model says of its language model (``text_config``) stands beside the rest.
    """
    model = read_json(path)
    text = model.get("text_config")
    return {**model, **text, "model_type": model.get("model_type")} if isinstance(text, dict) else model


def model_vocab_size(config: Config) -> int:
    """Of the policy's folder; a vision-language model's is that of its language model."""
    model = read_model_json(Path(config.policy.path) / "config.json")
    return model.get("text_config", model)["vocab_size"]


def model_has_vision(config: Config) -> bool | None:
    """Whether the policy's folder is that of a vision-language model; None where there is no config.json."""
    path = Path(config.policy.path) / "config.json"
    return isinstance(read_model_json(path).get("vision_config"), dict) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    try:
        model = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy.path: {path} is not valid JSON: {error}") from error
    if not isinstance(model, dict):
        raise ConfigError(f"policy.path: {path}: expected a JSON object, got {type(model).__name__}")
    return model


def effective_window_tokens(config: Config) -> int:
    """New tokens a response may grow by in one step."""
    return config.batch.window_tokens or config.batch.max_response_tokens
