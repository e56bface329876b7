"""`megatron-rl serve`: one SGLang server in the foreground, for a trainer that attaches to it."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, help="Hugging Face model folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--log", default="sglang.log", help="file that receives the server's log")
    parser.add_argument("server_args", nargs="*", metavar="flag=value", help="more SGLang options, without dashes")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.commands.recipe import options_of
    from megatron_rl.rollout.sglang.options import ServerOptions
    from megatron_rl.rollout.sglang.server import detect_device, serve

    options = ServerOptions(
        model_path=arguments.model_path,
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        deterministic=True,
        tokenizer=True,
        device=detect_device(),
        server_args=options_of(arguments.server_args),
    )
    return serve(options, Path(arguments.log))
