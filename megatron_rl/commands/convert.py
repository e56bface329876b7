"""`megatron-rl convert`: convert a model between a Hugging Face folder and Megatron's distributed checkpoint; push it to the Hub."""

import argparse
import os
import re
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.system.command_line.terminal import positive_int, say

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, help="folder with the model")
    parser.add_argument("--output", help="folder to make; it must not exist")
    parser.add_argument("--to", choices=("megatron", "hf"), help="form of the output")
    parser.add_argument("--config-from", help="folder with config.json and tokenizer, if not the input")
    parser.add_argument("--max-shard-size", type=_bytes, default="2GB", help="limit per safetensors file (default: %(default)s)")
    parser.add_argument("--mtp", choices=("keep", "drop"), help="keep or drop multi-token-prediction layers")
    parser.add_argument("--tensor-parallel-size", type=positive_int, default=1, help="check that the model can be sharded like this")
    parser.add_argument("--pipeline-parallel-size", type=positive_int, default=1, help="check that the model can be sharded like this")
    parser.add_argument("--push", type=_repository, metavar="OWNER/NAME", help="upload the output, or without one the input, to the Hub")
    parser.add_argument("--private", action="store_true", help="--push: a repository that it creates is private")
    parser.add_argument(
        "--run", dest="run_folder", metavar="FOLDER", help="--push: run that the model card describes (default: the run around the input)"
    )
    parser.add_argument("--dry-run", action="store_true", help="--push: print the model card and the files, and upload nothing")


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.output) != bool(arguments.to) or not (arguments.output or arguments.push):
        raise UserError("convert: expected --output FOLDER and --to hf or megatron, or --push OWNER/NAME for a folder as it is; see --help")
    if arguments.push and arguments.to == "megatron":
        raise UserError("--push uploads Hugging Face folders; use --to hf, or leave --output and --to out to push the input")
    if arguments.output and not arguments.dry_run:
        _convert(arguments)
    if arguments.push:
        _push(arguments)
    return 0


def _push(arguments: argparse.Namespace) -> None:
    from megatron_rl.run.summary import find_run, model_card
    from megatron_rl.system.files.hub_cache import CARD, push_folder, pushed_files

    source = Path(arguments.input)
    folder = source if arguments.dry_run else Path(arguments.output or source)
    card = model_card(arguments.push, source, Path(arguments.run_folder) if arguments.run_folder else find_run(source))
    if arguments.dry_run:
        names = ", ".join(path.name for path in pushed_files(folder))
        print(f"{card}\ndry run: would push to {arguments.push}: {names}, {CARD}")
        return
    say(f"pushed: {push_folder(folder, arguments.push, card, private=arguments.private)}")


def _convert(arguments: argparse.Namespace) -> None:
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


def _repository(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a name on the Hub such as owner/name, got {text!r}")
    return text


def _bytes(text: str) -> int:
    number, unit = text[:-2], text[-2:].upper()
    if unit not in _UNITS or not number.isdecimal() or len(number) > 9 or int(number) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GB, got {text!r}")
    return int(number) * _UNITS[unit]
