"""`megatron-rl serve`: run SGLang servers in the foreground, for a trainer that attaches to them.

    megatron-rl serve --model-path MODEL --num-servers 8 --dtype bfloat16 mem-fraction-static=0.8
    megatron-rl serve --config recipe.yaml --trainer node0 --api-key-env SGLANG_KEY rollout.tensor_parallel_size=2
    megatron-rl serve --config recipe.yaml --num-nodes 2 --node-rank 1 --first-node node4 rollout.tensor_parallel_size=16

The last example is one server over two nodes: run the same command on each node, with its own --node-rank.
Requests go to node 0.

With a recipe these are the servers that the run itself would start, on all GPUs of this node; the trainer sends
their weights.
"""

import argparse
from pathlib import Path

from megatron_rl.system.command_line.terminal import positive_int, positive_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-path", help="Hugging Face model folder")
    model.add_argument("--config", action="append", help="the trainer's YAML recipe, which defines model and options of the servers")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s); any other address needs a key")
    parser.add_argument("--trainer", metavar="NODE", help="instead of --host: listen on this machine's address that NODE can reach")
    parser.add_argument("--port", type=int, default=30000, help="of the first server (default: %(default)s); others use the next ports")
    parser.add_argument(
        "--num-servers", type=positive_int, help="default: 1; with --config as many as fit the GPUs (on a CPU rollout.num_servers)"
    )
    parser.add_argument("--num-nodes", type=positive_int, default=1, help="nodes of one server that needs more GPUs than a node has")
    parser.add_argument("--node-rank", type=int, default=0, help="index of this node, from 0 (default: %(default)s); requests go to node 0")
    parser.add_argument("--first-node", metavar="NODE", default="", help="name or address of node 0 for the other nodes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights (default: float32)")
    parser.add_argument("--tensor-parallel-size", type=positive_int, help="GPUs (on a CPU: processes) per server (default: 1)")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="honor per-request seeds (default: only on a CPU, where it is free; on GPUs it costs a quarter to a half of the speed)",
    )
    parser.add_argument("--start-timeout-s", type=positive_number, default=1800.0, help="time limit for the start (default: %(default)s)")
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        default="",
        help="environment variable with the API key that every request must send (the trainer's rollout.api_key_env)",
    )
    parser.add_argument("--without-api-key", action="store_true", help="accept requests without an API key from any host")
    parser.add_argument("--log", default="sglang.log", help="log file (default: %(default)s); several servers write sglang-0.log and so on")
    parser.add_argument("--url-file", type=Path, help="file to write the servers' URLs to, one per line, once all servers are up")
    parser.add_argument(
        "words", nargs="*", metavar="name=value", help="additional SGLang options, without dashes; with --config: keys of the recipe"
    )


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.rollout.foreground_servers import resolve_servers, serve

    options, num_servers = resolve_servers(arguments)
    return serve(
        options,
        num_servers,
        Path(arguments.log),
        start_timeout_s=arguments.start_timeout_s,
        url_file=arguments.url_file,
        say=lambda text: print(text, flush=True),
    )
