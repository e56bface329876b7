"""`megatron-rl serve`: one SGLang server in the foreground, for a trainer that attaches to it."""

import argparse
import os
from pathlib import Path

from megatron_rl.config.checks.servers import LOOPBACK
from megatron_rl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, help="Hugging Face model folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than 127.0.0.1 need a key")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        default="",
        help="environment variable with the key that every request must carry (rollout.api_key_env of the trainer)",
    )
    parser.add_argument("--without-api-key", action="store_true", help="let everybody in who reaches the address")
    parser.add_argument("--log", default="sglang.log", help="file that receives the server's log")
    parser.add_argument("server_args", nargs="*", metavar="flag=value", help="more SGLang options, without dashes")


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.commands.recipe import options_of
    from megatron_rl.rollout.sglang.options import ServerOptions
    from megatron_rl.rollout.sglang.server import detect_device, serve

    api_key = _api_key(arguments)
    options = ServerOptions(
        model_path=arguments.model_path,
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        deterministic=True,
        tokenizer=True,
        device=detect_device(),
        api_key=api_key,
        server_args=options_of(arguments.server_args),
    )
    return serve(options, Path(arguments.log))


def _api_key(arguments: argparse.Namespace) -> str:
    """Raises UserError where a key is missing, or cannot travel in a header."""
    name = arguments.api_key_env
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        raise UserError(f"--api-key-env {name}: this environment variable is not set; export it with the key")
    if key.startswith("-") or not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"--api-key-env {name}: the key must be ASCII without spaces, and not begin with a dash")
    if not key and arguments.host not in LOOPBACK and not arguments.without_api_key:
        raise UserError(
            f"--host {arguments.host}: whoever reaches this server could change its weights. Export a key (openssl rand -hex "
            "32) on this machine and the trainer's, and name its variable: --api-key-env here, rollout.api_key_env there. "
            "In a network that is the job's alone, --without-api-key"
        )
    return key
