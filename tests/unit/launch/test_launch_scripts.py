"""Laws of launch/: what the scripts export, ask a scheduler for, and start where, with every program replaced by a stub."""

import argparse
import json
import re
import subprocess
import sys

import pytest

from megatron_rl.commands.serve import add_arguments as serve_arguments
from megatron_rl.system.gpu.gpu_environment import nccl_values
from tests.unit.examples.test_examples import ROOT

SCRIPTS = sorted(path.name for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch"))
NVIDIA_SMI = "#!/bin/sh\nfor i in $(seq 0 7); do echo \"GPU $i: NVIDIA H100 (UUID: GPU-$i)\"; done\necho '  MIG 1g.10gb'\n"
SCONTROL = '#!/bin/sh\n[ "$1" = show ] && printf "n%s\\n" 1 2 3 4 || echo "$@" >>requeued\n'
NOTE = f"""#!{sys.executable}
import json, os, sys
names = ("NODE_RANK", "NUM_NODES", "MASTER_ADDR", "SGLANG_KEY", "MEGATRON_RL_REQUIRE_GPU", "NCCL_CUMEM_ENABLE", "CUDA_VISIBLE_DEVICES")
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], {{name: os.environ.get(name) for name in names}}]) + "\\n")
"""
SERVE = (
    NOTE
    + """
import signal, time
if sys.argv[1] == "serve":
    if os.environ.get("SERVERS_FAIL"):
        sys.exit(1)
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(0))
    time.sleep(0.3)
    node = os.environ["SLURMD_NODENAME"]
    if "--url-file" in sys.argv:
        path = sys.argv[sys.argv.index("--url-file") + 1]
        with open(path + ".part", "w") as file:
            file.write(f"http://{node}:30000\\nhttp://{node}:30001\\n")
        os.rename(path + ".part", path)
    time.sleep(30)
    sys.exit("nobody stopped the servers")
"""
)
TRAIN = NOTE + "sys.exit(int(os.environ.get('TRAIN_STATUS', 0)))\n"
# As srun: one process per node of --nodelist, numbered from 0; HUP and TERM go to all of them.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
words = sys.argv[1:]
options = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word and words.index(word) < words.index("bash"))
nodes = options["--nodelist"].split(",")
assert ("--overlap" in words) == (os.environ.get("ROLLOUT_NODES") == "all")
assert len(nodes) == int(options["--nodes"]) == int(options["--ntasks"]) and options["--cpu-bind"] == "none"
command = words[words.index("bash"):]
tasks = [subprocess.Popen(command, env={{**os.environ, "SLURM_NODEID": str(i), "SLURMD_NODENAME": node}}) for i, node in enumerate(nodes)]
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def site(tmp_path):
    """A folder that is a checkout for the scripts, and the environment of a SLURM job of four nodes."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    for name, text in (("megatron-rl", SERVE), ("python", TRAIN)):
        program(tmp_path / ".venv" / "bin" / name, text)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "nvidia-smi": NVIDIA_SMI}.items():
        program(tmp_path / "bin" / name, text)
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "n[1-4]",
    }
    return tmp_path, environment


def run(site, *command, **environment):
    folder, base = site
    # As SLURM does: it runs a copy of the script from a folder of its own.
    done = subprocess.run(["bash", *command], cwd=folder, env={**base, **environment}, capture_output=True, text=True, timeout=60)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done, [json.loads(line) for line in calls]


TRAINING = ("launch/slurm.sbatch", "train", "--config", "recipe.yaml", "run.output_dir=/shared/one")


def test_rollout_nodes_serve_the_recipe_and_the_others_train_with_their_addresses(site):
    done, calls = run(site, *TRAINING, ROLLOUT_NODES="2")
    assert done.returncode == 0, done.stderr
    serving = [(words, env) for name, words, env in calls if name == "megatron-rl"]
    training = [(words, env) for name, words, env in calls if name == "python"]
    assert len(serving) == len(training) == 2
    keys = {env["SGLANG_KEY"] for _, env in serving + training}
    assert len(keys) == 1 and re.fullmatch("[0-9a-f]{64}", keys.pop())
    for words, _ in serving:
        assert words[0] == "serve" and words[-3:] == ["--config", "recipe.yaml", "run.output_dir=/shared/one"]
        assert words[words.index("--trainer") + 1] == "n1"
    for words, env in training:
        assert words[-2:] == [
            "rollout.urls=[http://n3:30000,http://n3:30001,http://n4:30000,http://n4:30001]",
            "rollout.api_key_env=SGLANG_KEY",
        ]
        assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--nproc-per-node") + 1] == "8"
        assert words[words.index("--master-addr") + 1] == env["MASTER_ADDR"] == "n1"
        assert env["MEGATRON_RL_REQUIRE_GPU"] == "1"
    assert sorted(words[words.index("--node-rank") + 1] for words, _ in training) == ["0", "1"]


def test_colocated_servers_run_on_all_nodes_and_are_listed_in_the_order_of_the_ranks(site):
    program(site[0] / "bin" / "scontrol", '#!/bin/sh\nprintf "n%s\\n" $(seq 11)\n')
    done, calls = run(site, *TRAINING, ROLLOUT_NODES="all")
    assert done.returncode == 0, done.stderr
    serving, training = ([words for name, words, _ in calls if name == one] for one in ("megatron-rl", "python"))
    assert len(serving) == len(training) == 11
    urls = [f"http://n{node + 1}:{port}" for node in range(11) for port in (30000, 30001)]
    for words in training:
        assert words[-2] == f"rollout.urls=[{','.join(urls)}]" and words[words.index("--nnodes") + 1] == "11"


def test_a_server_over_two_nodes_is_started_on_both_and_has_one_address(site):
    done, calls = run(site, *TRAINING, ROLLOUT_NODES="2", SERVER_NODES="2")
    assert done.returncode == 0, done.stderr
    serving = sorted([words for name, words, _ in calls if name == "megatron-rl"], key=lambda words: words[words.index("--node-rank") + 1])
    for rank, words in enumerate(serving):
        at = words.index("--num-nodes")
        assert words[at : at + 6] == ["--num-nodes", "2", "--node-rank", str(rank), "--first-node", "n3"]
        assert ("--url-file" in words) == (rank == 0)
    (urls,) = {words[-2] for name, words, _ in calls if name == "python"}
    assert urls.count("http://n3") and "http://n4" not in urls
    done, _ = run(site, *TRAINING, ROLLOUT_NODES="3", SERVER_NODES="2")
    assert done.returncode == 2 and "ROLLOUT_NODES=3 do not make whole servers of SERVER_NODES=2" in done.stderr


def test_the_words_of_the_script_are_words_of_serve(site):
    _, calls = run(site, *TRAINING, ROLLOUT_NODES="1")
    parser = argparse.ArgumentParser()
    serve_arguments(parser)
    (words,) = [words for name, words, _ in calls if name == "megatron-rl"]
    assert parser.parse_args(words[1:]).words == ["run.output_dir=/shared/one"]


def test_without_rollout_nodes_all_nodes_train(site):
    done, calls = run(site, *TRAINING)
    assert done.returncode == 0 and len(calls) == 4 and not any("rollout.urls" in str(words) for _, words, _ in calls)


@pytest.mark.parametrize("number", ["4", "5", "-1"])
def test_a_job_without_a_node_to_train_on_is_refused(site, number):
    done, calls = run(site, *TRAINING, ROLLOUT_NODES=number)
    assert done.returncode == 2 and f"ROLLOUT_NODES={number} of 4 nodes" in done.stderr and not calls


def test_servers_that_do_not_come_up_end_the_job_before_anything_trains(site):
    done, calls = run(site, *TRAINING, ROLLOUT_NODES="1", SERVERS_FAIL="1")
    assert done.returncode == 2 and "ended before they were ready" in done.stderr
    assert [name for name, _, _ in calls] == ["megatron-rl"]


def test_a_run_that_was_stopped_is_queued_again_and_goes_on(site):
    done, calls = run(site, *TRAINING, ROLLOUT_NODES="1", TRAIN_STATUS="75", SLURM_RESTART_COUNT="1")
    assert done.returncode == 75 and (site[0] / "requeued").read_text() == "requeue 12\n"
    assert all(words[-2:] == ["run.resume=auto", "run.overwrite=false"] for name, words, _ in calls if name == "python")
    done, _ = run(site, *TRAINING, TRAIN_STATUS="1")
    assert done.returncode == 1 and (site[0] / "requeued").read_text() == "requeue 12\n"


def test_a_node_without_gpus_ends_the_job_in_words_unless_cpus_are_wanted(site):
    (site[0] / "bin" / "nvidia-smi").unlink()
    done, calls = run(site, *TRAINING)
    assert done.returncode == 2 and not calls
    assert "MEGATRON_RL_REQUIRE_GPU=1, but nvidia-smi lists no GPU" in done.stderr and "--gpus-per-node" in done.stderr
    done, calls = run(site, *TRAINING, MEGATRON_RL_REQUIRE_GPU="0")
    assert done.returncode == 0 and len(calls) == 4
    assert all(words[words.index("--nproc-per-node") + 1] == "1" for _, words, _ in calls)


def test_the_job_asks_for_gpus_cpus_memory_and_to_be_queued_again():
    asked = re.findall(r"^#SBATCH (\S+)$", (ROOT / "launch" / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--gpus-per-node=8", "--exclusive", "--mem=0", "--requeue", "--open-mode=append", "--signal=TERM@120"} <= set(asked)


@pytest.mark.parametrize(
    ("visible", "number"), [(None, "8"), ("0,1", "2"), ("GPU-3", "1"), ("", "0"), ("-1", "0"), ("NoDevFiles", "0"), ("0, 1", "2")]
)
def test_ranks_are_as_many_as_visible_gpus(site, visible, number):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done, _ = run(site, "-c", "source launch/env.sh; echo $NUM_GPUS $DEFAULT_RANKS_PER_NODE", **environment)
    assert done.stdout.split() == [number, str(max(int(number), 1))]


@pytest.mark.parametrize(
    "given", [{}, {"NCCL_CUMEM_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}]
)
def test_launch_scripts_set_nccls_variables_as_the_trainer_does(site, given):
    done, _ = run(site, "-c", "source launch/env.sh; env", **given)
    assert {f"{name}={value}" for name, value in nccl_values(given).items()} <= set(done.stdout.splitlines())


@pytest.mark.parametrize("address", ["", "127.0.0.1", "localhost"])
def test_several_nodes_do_not_meet_at_loopback(site, address):
    done, calls = run(site, "launch/torchrun.sh", "train", NUM_NODES="2", MASTER_ADDR=address)
    assert done.returncode == 2 and "needs MASTER_ADDR" in done.stderr and not calls


@pytest.mark.parametrize(("words", "visible"), [([], ""), (["tests/unit"], ""), (["-m", "not gpu"], ""), (["-m", "gpu"], None)])
def test_tests_see_gpus_only_where_they_are_meant_for_them(site, words, visible):
    program(site[0] / "fake" / "launch" / "setup.sh", "#!/bin/sh\n")
    text = (ROOT / "launch" / "test.sh").read_text().replace("bash launch/setup.sh", "true")
    program(site[0] / "fake" / "launch" / "test.sh", text)
    program(site[0] / "fake" / "launch" / "bytecode.sh", "")
    (site[0] / "fake" / ".venv").symlink_to(site[0] / ".venv")
    _, calls = run(site, "fake/launch/test.sh", *words)
    assert calls[0][2]["CUDA_VISIBLE_DEVICES"] == visible


def test_the_suite_on_the_torch_of_gpu_machines_has_an_environment_of_its_own(site):
    copy = site[0] / "fake"
    program(copy / "launch" / "setup.sh", "echo set up $FLAVOR $TRANSFORMER_ENGINE $VENV\n")
    for path in ("launch/test.sh", "launch/bytecode.sh", ".ci/gpu_torch"):
        program(copy / path, (ROOT / path).read_text())
    (copy / ".venv-gpu-torch").symlink_to(site[0] / ".venv")
    done, calls = run(site, "fake/.ci/gpu_torch", "tests/unit")
    assert done.stdout == "set up gpu no .venv-gpu-torch\n", done.stderr
    assert calls[0][1][-1] == "tests/unit" and calls[0][2]["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("problem", "status"),
    [("", 0), ("no Python 3.12 found on PATH, in pyenv or in uv", 0), ("4000 MiB free in /ci, about 6000 needed", 0), ("hash mismatch", 1)],
)
def test_ci_tests_megatrons_other_release_or_says_what_the_machine_lacks_for_it(site, problem, status):
    copy = site[0] / "fake"
    program(copy / "launch" / "setup.sh", f'test -z "${{PYTHON:-}}" -o -z "{problem}" || {{ echo "error: {problem}" >&2; exit 1; }}\n')
    for path in ("launch/test.sh", "launch/bytecode.sh", ".ci/run", ".ci/python312"):
        program(copy / path, (ROOT / path).read_text())
    for name in (".venv", ".venv-3.12"):
        (copy / name).symlink_to(site[0] / ".venv")
    done, calls = run(site, "fake/.ci/run")
    assert done.returncode == status and problem in done.stdout + done.stderr, done.stderr
    assert ["tests/integration/test_layouts.py" in words for _, words, _ in calls] == ([False] if problem else [False, True])
    assert ("NOT RUN: Python 3.12" in done.stdout) == (problem != "" and status == 0)


def test_the_quickstart_computes_on_the_cpu_and_says_so():
    lines = (ROOT / "launch" / "quickstart.sh").read_text().splitlines()
    exported = next(i for i, line in enumerate(lines) if line.startswith("export CUDA_VISIBLE_DEVICES= "))
    assert exported < next(i for i, line in enumerate(lines) if "warm_start.sh" in line)
    assert "MEGATRON_RL_REQUIRE_GPU=0" in lines[exported] and "examples/gpu" in lines[exported + 1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash(name):
    subprocess.run(["bash", "-n", ROOT / "launch" / name], check=True)


def test_commands_in_comments_name_scripts_that_exist():
    for name in SCRIPTS:
        for found in re.findall(r"launch/[\w.]+\w", (ROOT / "launch" / name).read_text()):
            assert (ROOT / found).exists(), (name, found)
