"""`megatron-rl <command>`. Arguments in, exit status out: 0 done, 1 failed, 2 the user's mistake, 130 interrupted."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # Deprecations and notes inside the libraries are their makers' business; ours are errors and log lines.
    warnings.filterwarnings("ignore", module=r"(torch|megatron|sglang|transformers|mlflow)\b")
    try:
        return arguments.run(arguments) or 0
    except (UserError, OSError) as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        if "RANK" not in os.environ:
            _say("interrupted: everything this run started has been stopped")
        return 130
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description="Reinforcement learning with Megatron Core and SGLang."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text in (
        ("train", "train a policy with reinforcement learning (see: megatron-rl presets)"),
        ("sft", "supervised warm start on reference responses"),
        ("critic-pretrain", "regress the critic onto returns of the frozen policy"),
        ("reward-train", "train a reward model on preferences or line labels"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        _add_recipe(command)
        command.set_defaults(run=_train_command, command=name)
    _add_serve(commands)
    _add_score(commands)
    _add_select_prompts(commands)
    _add_label_lines(commands)
    _add_doctor(commands)
    _add_convert(commands)
    command = commands.add_parser("report", help="write report.html of a run", description="write report.html of a run")
    command.add_argument("output_dir")
    command.set_defaults(run=_report)
    command = commands.add_parser("presets", help="list the presets", description="list the presets")
    command.set_defaults(run=_presets)
    return parser


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", required=True, action="append", help="YAML recipe; a later one overrides")
    command.add_argument("--dry-run", action="store_true", help="print what would be done and exit")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")


def _train_command(arguments: argparse.Namespace) -> int:
    from megatron_rl.config.checks import check_config
    from megatron_rl.config.load import load_config

    config = load_config(arguments.config, arguments.overrides)
    launched = "RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if launched else None
    check_config(config, command=arguments.command, world_size=world_size)
    if os.environ.get("RANK", "0") == "0":
        _check_inputs(config, arguments.command)
    if arguments.dry_run:
        return _dry_run(config, arguments.command, world_size or config.parallel.num_ranks or 1)
    if arguments.command in ("train", "critic-pretrain"):
        from megatron_rl.run.output import check_output_dir

        check_output_dir(config)
    if not launched and config.parallel.num_ranks > 1:
        from megatron_rl.system.torchrun import run_under_torchrun

        return run_under_torchrun(
            config.parallel.num_ranks,
            [arguments.command, *(f"--config={path}" for path in arguments.config), *arguments.overrides],
        )
    if arguments.command == "reward-train":
        from megatron_rl.commands.reward_train import reward_train

        reward_train(config)
        return 0
    from megatron_rl.commands import train as run

    {"train": run.train, "sft": run.sft, "critic-pretrain": run.critic_pretrain}[arguments.command](config)
    return 0


def _check_inputs(config: "Config", command: str) -> None:
    """Everything outside the configuration that a run would trip over later: data rows, the reward and its options."""
    from megatron_rl.config.derived import model_has_vision
    from megatron_rl.data.prompts import check_files
    from megatron_rl.data.sampler import check_mixtures
    from megatron_rl.environments import registry as environments
    from megatron_rl.rewards.router import check_types, routes_of

    data = config.data
    takes_images = model_has_vision(config)
    if command == "reward-train":
        from megatron_rl.data.preferences import check_reward_files

        check_reward_files(config)
    elif command == "sft":
        check_files(config.sft.train_files or data.train_files, data, with_response=True, takes_images=takes_images)
    else:
        routes_of(config.reward)
        if config.environment.name:
            environments.build(config.environment.name, config.environment.options)
        num_by_type = check_files(data.train_files, data, with_response=False, takes_images=takes_images)
        check_mixtures(data.mixture, data.curriculum, num_by_type)
        check_types(config.reward, num_by_type)
        if data.eval_files:
            num_by_type = check_files(data.eval_files, data, with_response=False, takes_images=takes_images)
            check_types(config.reward, num_by_type)


def _dry_run(config: "Config", command: str, world_size: int) -> int:
    from megatron_rl.commands.dry_run import print_plan

    print_plan(config, command=command, world_size=world_size)
    return 0


def _add_serve(commands) -> None:
    text = "start one SGLang server in the foreground"
    command = commands.add_parser("serve", help=text, description=text)
    command.add_argument("--model-path", required=True, help="Hugging Face model folder")
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, default=30000)
    command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    command.add_argument("--tensor-parallel-size", type=int, default=1)
    command.add_argument("--log", default="sglang.log", help="file that receives the server's log")
    command.add_argument("server_args", nargs="*", metavar="flag=value", help="more SGLang options, without dashes")
    command.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from omegaconf import OmegaConf

    from megatron_rl.rollout.sglang.server import ServerOptions, detect_device, serve

    options = ServerOptions(
        model_path=arguments.model_path,
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        deterministic=True,
        tokenizer=True,
        device=detect_device(),
        server_args=OmegaConf.to_container(OmegaConf.from_dotlist(arguments.server_args)),
    )
    return serve(options, Path(arguments.log))


def _add_score(commands) -> None:
    text = "grade the responses of a JSONL file"
    command = commands.add_parser("score", help=text, description=text)
    command.add_argument("--reward", required=True, help="a registered reward, or package.module:function")
    command.add_argument("--input", required=True, help="JSONL with the fields response and answer")
    command.add_argument("--output", required=True, help="JSONL that receives score, detail and error beside them")
    command.add_argument("--num-workers", type=int, default=os.cpu_count() or 1)
    command.add_argument("--max-concurrency", type=int, default=256, help="rows under way at a server that is asked")
    command.add_argument("--timeout-s", type=float, default=5.0)
    command.add_argument("options", nargs="*", metavar="key=value", help="options of the reward")
    command.set_defaults(run=_score)


def _score(arguments: argparse.Namespace) -> int:
    from omegaconf import OmegaConf
    from rich.console import Console

    from megatron_rl.commands.score import score_file

    options = OmegaConf.to_container(OmegaConf.from_dotlist(arguments.options))
    summary = score_file(
        arguments.reward,
        arguments.input,
        arguments.output,
        num_workers=arguments.num_workers,
        max_concurrency=arguments.max_concurrency,
        timeout_s=arguments.timeout_s,
        options=options,
    )
    Console().print(summary.table())
    return 0


def _add_select_prompts(commands) -> None:
    text = "keep the prompts that are worth training on"
    command = commands.add_parser("select-prompts", help=text, description=text)
    _add_recipe(command)
    command.set_defaults(run=_select_prompts)


def _select_prompts(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_rl.commands.select_prompts import check_inputs, check_selection, plan_table, select_prompts
    from megatron_rl.config.checks import check_config
    from megatron_rl.config.load import load_config

    config = load_config(arguments.config, arguments.overrides)
    check_config(config, command="select-prompts")
    check_selection(config)
    candidates = check_inputs(config)
    if arguments.dry_run:
        Console().print(plan_table(config, candidates))
        return 0
    for table in select_prompts(config, candidates, note=_say).tables():
        Console().print(table)
    _say(f"kept prompts: {config.select_prompts.output_path}")
    return 0


def _add_label_lines(commands) -> None:
    text = "label the lines of programs that can still be completed to a right one"
    command = commands.add_parser("label-lines", help=text, description=text)
    _add_recipe(command)
    command.set_defaults(run=_label_lines)


def _label_lines(arguments: argparse.Namespace) -> int:
    from megatron_rl.commands.label_lines import label_lines
    from megatron_rl.config.checks import check_config
    from megatron_rl.config.load import load_config

    config = load_config(arguments.config, arguments.overrides)
    check_config(config, command="label-lines")
    label_lines(config, dry_run=arguments.dry_run, note=_say)
    return 0


def _add_doctor(commands) -> None:
    text = "check that parallel layouts compute the same on this machine"
    command = commands.add_parser("doctor", help=text, description=text)
    command.add_argument("--invariance", action="store_true", required=True, help="compare one update in each layout")
    command.add_argument("--model", required=True, help="Hugging Face model folder")
    command.add_argument("--layouts", required=True, help='such as "tp2,pp2,ep2,cp2,tp2+sp+pp2,pp2+vpp2,dp2"')
    command.add_argument("--reference", default="tp1", help="the layout that the others are compared with")
    command.add_argument("--role", default="policy", choices=("policy", "critic"))
    command.add_argument("--max-tokens-per-microbatch", type=int, default=64)
    command.add_argument("--tolerance", type=float, default=1e-5, help="relative, for loss, gradient norm and weights")
    command.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_rl.commands.doctor import check_invariance, findings_table, reasons

    findings = check_invariance(
        arguments.model,
        arguments.layouts.split(","),
        reference=arguments.reference,
        role=arguments.role,
        max_tokens_per_microbatch=arguments.max_tokens_per_microbatch,
        tolerance=arguments.tolerance,
    )
    Console().print(findings_table(findings))
    for reason in reasons(findings):
        print(reason)
    return 1 if any(finding.is_bad for finding in findings) else 0


def _add_convert(commands) -> None:
    text = "convert a model between a Hugging Face folder and Megatron's distributed checkpoint"
    command = commands.add_parser("convert", help=text, description=text)
    command.add_argument("--input", required=True, help="folder with the model")
    command.add_argument("--output", required=True, help="folder to make; it must not exist")
    command.add_argument("--to", required=True, choices=("megatron", "hf"))
    command.add_argument("--config-from", help="folder with config.json and tokenizer, if not the input")
    command.add_argument("--max-shard-size", type=_bytes, default="2GB", help="of a safetensors file, as 500MB or 2GB")
    command.add_argument("--mtp", choices=("keep", "drop"), help="what becomes of multi-token-prediction layers")
    command.add_argument("--tensor-parallel-size", type=int, default=1, help="check that the model splits so")
    command.add_argument("--pipeline-parallel-size", type=int, default=1, help="check that the model splits so")
    command.set_defaults(run=_convert)


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = text[:-2], text[-2:].upper()
    if unit not in units or not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GB, got {text!r}")
    return int(number) * units[unit]


def _convert(arguments: argparse.Namespace) -> int:
    # Nothing is computed; models are only described, which the layers for GPUs cannot do without memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_rl.config.schema import Mtp, ParallelConfig
    from megatron_rl.models.hf.conversion import convert

    done = convert(
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
    _say(f"{arguments.output}: {done.num_tensors} tensors, {done.num_bytes / 1e9:.3f} GB")
    if done.left_out:
        _say(f"left out {len(done.left_out)} tensors of the input: {', '.join(done.left_out[:5])}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from megatron_rl.tracking.report import write_report

    print(write_report(arguments.output_dir))
    return 0


def _presets(arguments: argparse.Namespace) -> int:
    from megatron_rl.config.load import PRESETS, preset_names

    for name in preset_names():
        first_line = (PRESETS / f"{name}.yaml").read_text().splitlines()[0]
        print(f"{name:16} {first_line.lstrip('# ')}")
    return 0


def _say(text: str) -> None:
    rank = os.environ.get("RANK", "0")
    print(text if rank == "0" else f"rank {rank}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
