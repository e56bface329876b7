"""Tables of low-rank adapters (LoRA, arXiv 2106.09685): which linear layers have one, and its tensors in files of peft.

An adapter adds ``scale * B A x`` to the output of a linear layer, A [rank, in] and B [out, rank]. Megatron fuses
several modules of the files into one layer (q_proj, k_proj, v_proj; gate_proj, up_proj). Each of them has its own A and
B, as in peft: the layer's A holds the modules' A, one below the other, and its B has the rows of the layer's weight.
"""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.errors import ModelError
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.parameters import Entry, entries
from megatron_rl.families.transforms import QKV, ColumnParallel, GatedMLP, Replicated, RowParallel, Stacked

ALL_LINEAR = "all-linear"
"""Target that stands for all linear layers of attention, dense MLPs and shared experts, but not of routed experts."""
PEFT_PREFIX = "base_model.model."
"""Prefix of the names in an adapter's files."""
ADAPTER_FOLDER = "adapter"
"""Subfolder of a saved model (merged) with the adapters."""
SERVED_FAMILIES = ("llama", "qwen2", "qwen3")
"""Families (``model_type``) whose adapters SGLang serves on every device: dense models."""
_ADAPTABLE = (QKV, ColumnParallel, GatedMLP, RowParallel, Replicated)
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_ROUTER = ".mlp.router."


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer of Megatron with an adapter, and the tables of the adapter's two parameters."""

    base: Entry
    is_adapted: tuple[bool, ...]
    """For each module of the files in this layer, whether it has an adapter."""
    a: Entry
    b: Entry

    @property
    def is_expert(self) -> bool:
        return is_expert(self.base)

    def adapted(self, entry: Entry) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of ``a`` or ``b`` that a file has."""
        return {name: shape for (name, shape), has in zip(entry.hf.items(), self.is_adapted, strict=True) if has}

    @property
    def modules(self) -> list[str]:
        """Names of the modules with an adapter."""
        return [_module(name) for name, is_adapted in zip(self.base.hf, self.is_adapted, strict=True) if is_adapted]


def linear_modules(config: ModelConfig) -> list[str]:
    """Names of all modules of the model that can have an adapter."""
    return [_module(name) for entry in entries(config, "critic") if _is_linear(entry) for name in entry.hf]


def served_name(version: int) -> str:
    """Name of the adapter of weight version ``version`` on the servers."""
    return f"policy-{version}"


def is_expert(entry: Entry) -> bool:
    """Return whether the parameter belongs to a routed expert."""
    return _EXPERT.search(entry.megatron) is not None


def adapted_linears(config: ModelConfig, targets: Sequence[str], rank: int) -> list[AdaptedLinear]:
    """The layers of the whole model with an adapter, in the order of the files.

    ``targets``: patterns of a shell for names of modules (``model.layers.0.self_attn.q_proj``) or for their ends
    (``q_proj``, ``mlp.*``), or ``ALL_LINEAR``. Raises ModelError for a target without a match.
    """
    matrices = [entry for entry in entries(config, "critic") if _is_matrix(entry)]
    linears = [entry for entry in matrices if _is_linear(entry)]
    missing = [entry for entry in matrices if not _is_linear(entry) and not is_expert(entry)]
    if ALL_LINEAR in targets and missing:
        raise ModelError(f"{ALL_LINEAR}: {_last_words(missing)} of this model can have no adapter; name the modules that shall have one")
    patterns = {target: re.compile(fnmatch.translate(target)) for target in targets}
    unused, found = set(targets), []
    for entry in linears:
        flags = []
        for name in entry.hf:
            matching = {target for target in targets if _matches(target, patterns[target], _module(name), entry)}
            unused -= matching
            flags.append(bool(matching))
        if any(flags):
            found.append(_adapted(entry, tuple(flags), rank))
    if unused:
        raise ModelError(
            f"{sorted(unused)[0]!r} matches no linear layer that can have an adapter; the model has {_last_words(linears)} "
            f"(and {ALL_LINEAR}); embeddings, heads, norms, routers and stacked experts have none"
        )
    return found


def _is_linear(entry: Entry) -> bool:
    return _is_matrix(entry) and isinstance(entry.transform, _ADAPTABLE)


def _is_matrix(entry: Entry) -> bool:
    return (
        entry.megatron.startswith("decoder.layers.")
        and entry.megatron.endswith(".weight")
        and entry.part is None
        and all(len(shape) == 2 for shape in entry.hf.values())
        and _ROUTER not in entry.megatron
    )


def _last_words(linears: Sequence[Entry]) -> str:
    """Last words of the names of the layers' modules, each once, for a message."""
    return ", ".join(dict.fromkeys(_module(name).rpartition(".")[2] for entry in linears for name in entry.hf))


def _matches(target: str, pattern: re.Pattern[str], module: str, entry: Entry) -> bool:
    if target == ALL_LINEAR:
        return not is_expert(entry)
    # Every end of the name that begins with a whole word.
    ends = (module[position:] for position in (0, *(match.end() for match in re.finditer(r"\.", module))))
    return any(pattern.match(end) for end in ends)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _adapted(base: Entry, flags: tuple[bool, ...], rank: int) -> AdaptedLinear:
    layer = base.megatron.removesuffix("weight")
    by_input = isinstance(base.transform, RowParallel)
    modules: dict[str, tuple[int, ...]] = {PEFT_PREFIX + _module(name): shape for name, shape in base.hf.items()}
    down: dict[str, tuple[int, ...]] = {
        f"{module}.lora_A.weight": (rank, shape[1]) for module, shape in modules.items()
    }
    up: dict[str, tuple[int, ...]] = {f"{module}.lora_B.weight": (shape[0], rank) for module, shape in modules.items()}
    return AdaptedLinear(
        base,
        flags,
        a=Entry(f"{layer}lora.A", down, RowParallel() if by_input else Stacked(len(modules))),
        b=Entry(f"{layer}lora.B", up, Replicated() if by_input else base.transform),
    )
