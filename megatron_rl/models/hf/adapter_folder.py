"""Adapter folders as peft writes them: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.config.schema import LoraConfig
from megatron_rl.families.adapters import AdaptedLinear, adapted_linears, linear_modules
from megatron_rl.models.hf.tensor_sources import WeightsError

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_GIVE = "give a folder that peft or this trainer has written"


def adapter_config(hf_config: PretrainedConfig, lora: LoraConfig, base: str) -> dict[str, Any]:
    """Content of adapter_config.json; ``base``: the folder or name of the base model."""
    linears = adapted_linears(hf_config, lora.targets, lora.rank)
    as_weights = _adapted_weights(linears, hf_config)
    adapted = [module for linear in linears for module in linear.modules if f"{module}.weight" not in as_weights]
    left_out = {_end(module) for module in set(linear_modules(hf_config)) - set(adapted) if f"{module}.weight" not in as_weights}
    # The last word of a name stands for all modules with this end; else peft gets whole names.
    targets = sorted({module if (end := _end(module)) in left_out else end for module in adapted})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0 if as_weights else lora.dropout,  # peft has no dropout for target_parameters
        "use_rslora": lora.rslora,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    } | ({"target_parameters": as_weights} if as_weights else {})


def _adapted_weights(linears: Sequence[AdaptedLinear], hf_config: PretrainedConfig) -> list[str]:
    """Weights that peft must adapt by their own names, as target_parameters: those of dense MLPs and shared experts beside routed experts.

    Transformers 5 stores routed experts as stacked tensors, so peft takes every target_module that is called like an expert's
    (gate_proj, also at the end of a whole name) for these.
    """
    of_experts = {_end(module) for module in linear_modules(hf_config) if ".experts." in module}
    dense = (module for linear in linears if not linear.is_expert for module in linear.modules)
    return [f"{module}.weight" for module in dense if _end(module) in of_experts]


def _end(module: str) -> str:
    return module.rpartition(".")[2]


def targets_of(settings: Mapping[str, Any]) -> list[str]:
    """The ``lora.targets`` of an adapter_config.json."""
    return [*settings["target_modules"], *(name.removesuffix(".weight") for name in settings.get("target_parameters") or ())]


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files into ``folder``, which is made. Raises OSError."""
    folder.mkdir(exist_ok=True)
    write_adapter_config(folder, config)
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    try:
        save_file(copies, folder / TENSORS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder} could not be written: {error}") from error


def write_adapter_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the file that marks ``folder`` as one of adapters. Raises OSError."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(folder: str | Path, hf_config: PretrainedConfig, lora: LoraConfig) -> dict[str, Tensor]:
    """The tensors of an adapter for ``lora`` and this model. Raises WeightsError if the folder is of other adapters."""
    settings = read_adapter_config(folder)
    expected = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
    actual = {name: settings.get(name) or type(value)() for name, value in expected.items()}
    if actual != expected:
        raise WeightsError(
            f"{folder}: {CONFIG_FILE} has {actual}, the recipe {expected}; set the recipe's rank, alpha and rslora to these"
        )
    try:
        tensors = load_file(Path(folder) / TENSORS_FILE)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{Path(folder) / TENSORS_FILE} cannot be read: {error}; {_GIVE}") from error
    shapes = adapter_shapes(hf_config, lora.targets, lora.rank)
    for name in sorted(set(tensors) ^ set(shapes)):
        place = "is in the folder, but no target matches it" if name in tensors else "is missing"
        raise WeightsError(
            f"{folder}: {name} {place}; set lora.targets to the folder's {targets_of(settings)}"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            raise WeightsError(
                f"{folder}: {name} has shape {found}, the model requires {shape}; is it of another model?"
            )
    return tensors


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA folder. Raises WeightsError for a folder of another kind, or of features that are not implemented."""
    path = Path(folder) / CONFIG_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}; {_GIVE}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise WeightsError(f"{path} does not describe LoRA adapters (peft_type LORA)")
    if not isinstance(settings.get("target_modules"), list):
        raise WeightsError(f"{path}: target_modules is not a list; list the modules' names, or merge these adapters with peft")
    # Weights of linear layers are the modules that ``adapter_config`` names so.
    stacked = {"target_parameters": [name for name in settings.get("target_parameters") or () if not name.endswith(".weight")]}
    for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "target_parameters"):
        if (settings | stacked).get(name):
            raise WeightsError(
                f"{path}: {name} is not supported; merge these adapters with peft, and start from the merged model"
            )
    if settings.get("bias", "none") != "none":
        raise WeightsError(
            f"{path}: trained biases are not supported; merge these adapters with peft, and start from the merged model"
        )
    return settings


def adapter_shapes(hf_config: PretrainedConfig, targets: Sequence[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Maps the names of all tensors of an adapter's file to their shapes."""
    linears = adapted_linears(hf_config, targets, rank)
    return {
        name: shape
        for linear in linears
        for entry in (linear.a, linear.b)
        for name, shape in linear.adapted(entry).items()
    }
