"""Writes a configuration as a recipe: the keys that differ from its preset and the schema's defaults."""

from typing import Any

import yaml

from megatron_rl.config.load import load_config, to_yaml_values
from megatron_rl.desk.plan.plan_tables import PlanReport, start_command


def recipe_text(planned: PlanReport) -> str:
    """Return YAML that ``load_config`` reads back to the chosen plan's configuration; its header has the prediction."""
    config, one = planned.chosen.config, planned.chosen
    head = [
        f"By `megatron-rl plan`: {planned.title}.",
        f"Predicted: {one.response_s:.3g} s a finished response, {one.outcome.step_s:.4g} s a step; binds: {one.bottleneck}.",
        f"start: {start_command(planned, 'RECIPE.yaml')}",
    ]
    base = to_yaml_values(load_config(None, [f"preset={config.preset}"] if config.preset else []))
    values = {"preset": config.preset} if config.preset else {}
    values |= {name: part for name, part in _beyond(to_yaml_values(config), base).items() if name != "preset"}
    return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(values, sort_keys=False, width=120)


def _beyond(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if name in base and base[name] == value:
            continue
        found[name] = _beyond(value, base[name]) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return found
