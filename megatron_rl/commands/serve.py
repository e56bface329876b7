"""`megatron-rl serve`: SGLang servers in the foreground, for a trainer that attaches to them.

    megatron-rl serve --model-path MODEL --num-servers 8 --dtype bfloat16 mem-fraction-static=0.8
    megatron-rl serve --config recipe.yaml --trainer node0 --api-key-env SGLANG_KEY rollout.tensor_parallel_size=2
    megatron-rl serve --config recipe.yaml --num-nodes 2 --node-rank 1 --first-node node4 rollout.tensor_parallel_size=16

The last is one server over two nodes: the same command on each, with its own --node-rank. The first one has the address.

With a recipe they are the servers that the run itself would start, with weights that the trainer sends, on all GPUs of this node.
"""

import argparse
from pathlib import Path

from megatron_rl.system.command_line.cli_types import positive_int, positive_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-path", help="Hugging Face model folder")
    model.add_argument("--config", action="append", help="the trainer's YAML recipe, for model and settings of the servers")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than 127.0.0.1 need a key")
    parser.add_argument("--trainer", metavar="NODE", help="in the place of --host: this machine's address towards that one")
    parser.add_argument("--port", type=int, default=30000, help="of the first server; the next ones up for the others")
    parser.add_argument(
        "--num-servers", type=positive_int, help="default: 1, with --config as many as the GPUs hold (on a CPU rollout.num_servers)"
    )
    parser.add_argument("--num-nodes", type=positive_int, default=1, help="nodes of one server, where its GPUs are more than a node has")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this node among them, from 0; requests go to node 0")
    parser.add_argument("--first-node", metavar="NODE", default="", help="name or address of node 0, which the others reach it by")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32")
    parser.add_argument("--tensor-parallel-size", type=positive_int, help="GPUs (on a CPU: processes) per server; default: 1")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="heed the seeds of requests; default: on a CPU, where it costs nothing. On GPUs it costs a quarter to a half of the speed",
    )
    parser.add_argument("--start-timeout-s", type=positive_number, default=1800.0, help="longest wait for a server to answer")
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        default="",
        help="environment variable with the key that every request must carry (rollout.api_key_env of the trainer)",
    )
    parser.add_argument("--without-api-key", action="store_true", help="let everybody in who reaches the address")
    parser.add_argument("--log", default="sglang.log", help="file for a server's log; several write sglang-0.log and so on")
    parser.add_argument("--url-file", type=Path, help="file that gets the servers' URLs, a line each, once all of them answer")
    parser.add_argument(
        "words", nargs="*", metavar="name=value", help="more SGLang options, without dashes; with --config: keys of the recipe"
    )


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.rollout.foreground_servers import options_and_number, serve

    options, num_servers = options_and_number(arguments)
    return serve(
        options,
        num_servers,
        Path(arguments.log),
        start_timeout_s=arguments.start_timeout_s,
        url_file=arguments.url_file,
        say=lambda text: print(text, flush=True),
    )
