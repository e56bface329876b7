"""`megatron-rl convert`: convert a model between a Hugging Face folder and Megatron's distributed checkpoint."""

import argparse
import os
from pathlib import Path

from megatron_rl.system.command_line.cli_types import positive_int
from megatron_rl.system.command_line.terminal import say

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, help="folder with the model")
    parser.add_argument("--output", required=True, help="folder to make; it must not exist")
    parser.add_argument("--to", required=True, choices=("megatron", "hf"), help="form of the output")
    parser.add_argument("--config-from", help="folder with config.json and tokenizer, if not the input")
    parser.add_argument("--max-shard-size", type=_bytes, default="2GB", help="limit per safetensors file (default: %(default)s)")
    parser.add_argument("--mtp", choices=("keep", "drop"), help="keep or drop multi-token-prediction layers")
    parser.add_argument("--tensor-parallel-size", type=positive_int, default=1, help="check that the model can be sharded like this")
    parser.add_argument("--pipeline-parallel-size", type=positive_int, default=1, help="check that the model can be sharded like this")


def run(arguments: argparse.Namespace) -> int:
    # Hide GPUs: models are only described, not computed, and layers for GPUs cannot be described without memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_rl.config.schema import Mtp, ParallelConfig
    from megatron_rl.models.conversion import convert
    from megatron_rl.models.hf.folder import uncopied_files

    num_tensors, num_bytes, left_out = convert(
        arguments.input,
        arguments.output,
        to=arguments.to,
        config_folder=arguments.config_from,
        parallel=ParallelConfig(
            tensor_parallel_size=arguments.tensor_parallel_size,
            pipeline_parallel_size=arguments.pipeline_parallel_size,
            sequence_parallel=arguments.tensor_parallel_size > 1,
        ),
        mtp=Mtp(arguments.mtp) if arguments.mtp else None,
        max_shard_bytes=arguments.max_shard_size,
    )
    say(f"{arguments.output}: {num_tensors} tensors, {num_bytes / 1e9:.3f} GB")
    if left_out:
        say(f"omitted {len(left_out)} tensors of the input: {', '.join(left_out[:5])}")
    uncopied = uncopied_files(Path(arguments.config_from or arguments.input))
    if uncopied:
        say(f"not copied: {', '.join(uncopied)}")
    return 0


def _bytes(text: str) -> int:
    number, unit = text[:-2], text[-2:].upper()
    if unit not in _UNITS or not number.isdecimal() or len(number) > 9 or int(number) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GB, got {text!r}")
    return int(number) * _UNITS[unit]
