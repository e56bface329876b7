"""`megatron-rl train` and `critic-pretrain`: the loop that each one runs, and the dry run without the desk."""

import argparse
import sys
from contextlib import nullcontext

import pytest

from megatron_rl.commands import critic_pretrain, print_dry_run, train, write_run_report
from megatron_rl.config.schema import Config
from megatron_rl.rollout import server_pool
from megatron_rl.run import launch
from megatron_rl.step import driver


@pytest.mark.parametrize("command", [train, critic_pretrain])
def test_each_command_runs_its_own_loop_with_servers_and_report(command, monkeypatch):
    config, calls = Config(), []
    monkeypatch.setattr(launch, "run_on_ranks", lambda name, arguments, *, work, **_: calls.append(name) or work(config) or 0)
    monkeypatch.setattr(server_pool, "spawned_servers", lambda config: nullcontext("servers"))
    for name in ("train", "critic_pretrain"):
        monkeypatch.setattr(driver, name, lambda *arguments, name=name: calls.append((name, *arguments)))
    assert command.run(argparse.Namespace()) == 0
    name = command.__name__.rpartition(".")[2]
    assert calls == [name.replace("_", "-"), (name, config, "servers", write_run_report)]


def test_dry_run_without_the_desk_prints_the_configuration_and_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "megatron_rl.desk.plan.dry_run", None)
    print_dry_run(Config(), "train", world_size=1)
    printed = capsys.readouterr().out
    assert "window_tokens:" in printed and "nothing was started" in printed
    assert "lacks megatron_rl/desk" in printed and printed.endswith("install the whole package\n")
