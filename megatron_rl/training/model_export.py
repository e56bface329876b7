"""One model's weights as whole tensors under the names of files: for servers, for Hugging Face folders, and of its adapters.

All functions are collective over the ranks of the model's layout, which must be the active one.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.config.schema import LoraConfig
from megatron_rl.families.adapters import ADAPTER_FOLDER
from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import Role, entries
from megatron_rl.models.hf.adapter_folder import adapter_config, adapter_shapes, write_adapter
from megatron_rl.models.hf.gather import (
    GatherTarget,
    ShardedParameter,
    adapter_parameters,
    gather,
    named_parameters,
    sharded_parameters,
)
from megatron_rl.models.hf.weights import assemble, export_weights, save_hf
from megatron_rl.models.layers.torch_layers import PackedGPTModel
from megatron_rl.models.lora import MergedParameters, adapter_table


class ModelExport:
    """Exports one model; adapters are merged into the weights."""

    def __init__(
        self,
        chunks: Sequence[PackedGPTModel],
        hf_config: PretrainedConfig,
        role: Role,
        path: Path,
        lora: LoraConfig | None,
    ) -> None:
        self._chunks, self._hf_config, self._role, self._path, self._lora = chunks, hf_config, role, path, lora

    def weights(self, to: GatherTarget, *, merged: bool) -> Iterator[tuple[str, Tensor | None]]:
        """Names and, on the ranks of ``to``, whole tensors (``export_weights``); ``merged``: with the adapters."""
        parameters = self._merged() if merged else None
        return export_weights(
            self._chunks, self._hf_config, role=self._role, to=to, held=self.held, parameters=parameters
        )

    def adapters(self) -> list[tuple[str, Tensor | None]]:
        """The adapters' tensors under the names of peft's files, on rank 0. Raises ValueError for a model without adapters."""
        if self._lora is None:
            raise ValueError(f"this {self._role} has no adapters")
        config, wanted = self._hf_config, adapter_shapes(self._hf_config, self._lora.targets, self._lora.rank)
        parameters = dict(adapter_parameters(self._chunks))
        held = sharded_parameters(parameters, config, adapter_table(config, self._lora))
        whole = assemble(gather(held, parameters, dims(config), GatherTarget.driver))
        return [(name, tensor) for name, tensor in whole if name in wanted]

    @property
    def adapter_config(self) -> dict[str, Any]:
        """Content of adapter_config.json; empty for a model without adapters."""
        return adapter_config(self._hf_config, self._lora, str(self._path)) if self._lora else {}

    def save(self, folder: str | Path, *, keep_mtp: bool, progress: Callable[[str], None]) -> None:
        """Write config.json, safetensors with the adapters merged, and tokenizer; a policy's adapters also in a subfolder of their own."""
        options: dict[str, Any] = {}
        if self._lora and self._role == "policy":
            tensors = {name: tensor for name, tensor in self.adapters() if tensor is not None}
            options["also"] = lambda saved: write_adapter(saved / ADAPTER_FOLDER, self.adapter_config, tensors)
        save_hf(
            self._chunks, self._hf_config, self._path, folder, role=self._role, keep_mtp=keep_mtp, progress=progress,
            merged=self._merged(), **options,
        )  # fmt: skip

    @functools.cached_property
    def held(self) -> list[ShardedParameter]:
        """Owners of all parameters; cached, because for a large model the names take longer than a publish should."""
        return sharded_parameters(
            dict(named_parameters(self._chunks)), self._hf_config, entries(self._hf_config, self._role)
        )

    def _merged(self) -> Mapping[str, Tensor] | None:
        return MergedParameters(self._chunks) if self._lora else None
