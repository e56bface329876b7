"""All differences between the releases of Megatron Core that the trainer runs on: 0.16 with Python 3.11, 0.19 with Python 3.12.

No other module asks for Megatron's version. A third release is refused before it is imported. To move to one: add it to ``RELEASES``
and requirements/common.txt, run the tests with it, and answer each failure here.
"""

import functools
import logging
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

RELEASES = {"0.16": "3.11", "0.19": "3.12"}
"""Maps a supported release to the Python that launch/setup.sh installs it for."""
_NOT_FOR_USERS = {
    # The trainer's model is a GPTModel on purpose: its checkpoints, layouts and conversions are those of this class.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # A file of this name, which 0.16 needs too (``write_common``).
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
    # The alternative is a package of its own, with a process that would outlive a killed rank.
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    # Megatron computes the same layout itself.
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
}
"""Maps a logger of 0.19 to the start of a warning about the trainer's code, which a user cannot follow."""


@functools.cache
def release() -> str:
    """The installed release, such as "0.19". Raises UserError for an unsupported one."""
    found = version("megatron-core")
    supported = ".".join(found.split(".")[:2])
    if supported not in RELEASES:
        wanted = " or ".join(f"{name} (Python {python})" for name, python in RELEASES.items())
        raise UserError(
            f"megatron-core {found} is installed, expected {wanted}: bash launch/setup.sh installs the tested one. What differs between "
            f"releases is in megatron_rl/system/{Path(__file__).name}: extend it for another one"
        )
    return supported


def prepare_import() -> None:
    """Check the release and silence its warnings about this trainer's code; called before Megatron's first import."""
    if release() == "0.19":
        # A class that is imported, but not used.
        warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")
        for name, start in _NOT_FOR_USERS.items():
            logging.getLogger(name).addFilter(functools.partial(_starts_otherwise, start))


def _starts_otherwise(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)


def mend_layers(*, has_transformer_engine: bool) -> None:
    """Mend layers that Megatron would build or compute differently from the model's specification."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # 0.16 has no such product with Transformer Engine 2.20, and without Transformer Engine not even the name. In 0.19 routers would use
    # it; it rounds float32 to TF32, and the choice of experts would be further from the servers'.
    moe_utils.te_general_gemm = None
    # Both releases add the bias of an expert to its output in place, which autograd refuses after a reduction, also over one rank.
    layers.reduce_from_tensor_model_parallel_region = functools.partial(_reduced, layers.reduce_from_tensor_model_parallel_region)
    if release() == "0.16" and not has_transformer_engine:
        # 0.16.1 sets it wrongly: no latent attention can be built.
        multi_latent_attention.HAVE_TE = False
    if release() == "0.19":
        # 0.19 chooses projections and norms itself: queries without a latent get a norm, or cannot be built.
        multi_latent_attention.MLASelfAttention._resolve_qk_norm_config = lambda attention, submodules: vars(submodules)
        if not has_transformer_engine:
            # 0.19 pads the values of a pack to the width of its keys, for Transformer Engine's kernels.
            multi_latent_attention._prepare_mla_core_attention_value = _without_padding


def _reduced(reduce: Any, rows: Any, group: Any) -> Any:
    return rows if group.size() == 1 else reduce(rows, group=group)


def _without_padding(layer: Any, query: Any, value: Any, params: Any) -> tuple[Any, bool, None, None]:
    return value, False, None, None


def linear_attention_problem() -> str:
    """Reason why Gated DeltaNet cannot run over packs here, with the remedy; empty if it can."""
    if release() == "0.16":
        return f"Megatron Core 0.16 has none for packed sequences; install 0.19 with Python {RELEASES['0.19']} (bash launch/setup.sh)"
    from megatron.core.ssm import gated_delta_net

    # On a CPU, ``cpu/delta_rule.py`` stands in for its kernels.
    return "" if gated_delta_net.HAVE_FLA else "its kernels are missing on this GPU: pip install 'flash-linear-attention~=0.4.0'"


LINEAR_KERNELS = "megatron.core.ssm.gated_delta_net.common"
"""Module of 0.19 that takes the kernels of Gated DeltaNet from flash-linear-attention, if it is installed."""


def experts_sorted() -> AbstractContextManager[Any]:
    """Context in which Megatron sorts a token's experts by score. 0.19 does so only where autograd records: sums over them would differ."""
    import torch

    return torch.enable_grad() if release() == "0.19" else nullcontext()


def config_fields() -> dict[str, Any]:
    """Fields of TransformerConfig for the value that the trainer needs: no CUDA graphs, and no warning about the default."""
    return {"cuda_graph_scope" if release() == "0.16" else "cuda_graph_modules": []}


def set_rotary_factor(model: Any, factor: float) -> None:
    """Set the factor on cosine and sine in a GPTModel that has not run yet."""
    if release() == "0.16":
        # Attention computes the factor in each pass, from these fields only, as 1 + mscale * log(scale) / 10 (YaRN).
        model.config.yarn_rotary_scaling_factor = math.e
        model.config.yarn_mscale = 10 * (factor - 1)
        model.config.yarn_mscale_all_dim = 0.0
        return
    for layer in model.decoder.layers:
        layer.self_attention._yarn_concentration_factor = factor


def save_options() -> dict[str, Any]:
    """Arguments of dist_checkpointing.save with which Megatron plans a save and leaves the writing to its caller."""
    return {"async_sharded_save": True} | ({} if release() == "0.16" else {"async_strategy": "mcore"})


def write_common(state: dict[str, Any], folder: Path) -> None:
    """Write the common state (all that is no tensor of the model) of a checkpoint into the file in which both releases look for it.

    0.16 writes and needs this file. 0.19 stores the state among the tensors, and reads the file if there is one.
    """
    import torch

    torch.save(state, folder / "common.pt")
