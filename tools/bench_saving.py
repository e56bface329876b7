"""Measure time and host memory of saving a model: as a Hugging Face folder, as a checkpoint that training waits for, and as a
checkpoint written in the background (the wait of training only).

A random dense model is distributed over trainer ranks and saved by each method, alternating, several times. Peaks are the
increase of one rank's resident memory.

    python tools/bench_saving.py --layout tp2+dp2 --hidden 1024 --layers 12
"""

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_weight_sync import make_model

RANK = "_rank"
"""First argument of the ranks that this program starts."""


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        run_rank(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp2", help="short name of a parallel layout, such as tp2+pp2")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default="", help="output folder (default: a temporary one)")
    arguments = vars(parser.parse_args())
    from megatron_rl.config.layout import parse_layout, ranks_needed

    with tempfile.TemporaryDirectory(dir=arguments["folder"] or None) as folder:
        arguments["folder"] = folder
        num_ranks = ranks_needed(*parse_layout(arguments["layout"]))
        make_model(Path(folder), arguments)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        subprocess.run([sys.executable, *launcher, __file__, RANK, json.dumps(arguments)], check=True)


def run_rank(arguments: dict) -> None:
    import torch

    from megatron_rl.config.layout import parse_layout
    from megatron_rl.config.schema import Dtype, Init, OptimizerConfig
    from megatron_rl.parallel import collectives
    from megatron_rl.parallel import topology as topologies
    from megatron_rl.system.processes.host_memory import pop_host_peak_gib
    from megatron_rl.training.engine import Engine

    folder, parallel = Path(arguments["folder"]), parse_layout(arguments["layout"])[0]
    topology = topologies.initialize(parallel, seed=1)
    engine = Engine(
        "policy", folder, parallel=parallel, topology=topology, optimizer=OptimizerConfig(), init=Init.random,
        dtype=Dtype.bfloat16,
    )  # fmt: skip
    acts: dict[str, Callable[[], None]] = {
        "folder": lambda: engine.save_hf(folder / "hf"),
        "checkpoint": lambda: engine.save_state(folder / "state"),
    }
    if hasattr(engine, "start_save"):  # so that an older commit can be measured beside this one
        acts["background"] = lambda: engine.start_save(folder / "state", in_background=True)
        acts["finish"] = engine.finish_save
    seconds: dict[str, list[float]] = {way: [] for way in acts}
    peaks: dict[str, list[float]] = {way: [] for way in acts}
    for repeat in range(arguments["repeats"] + 1):
        for way, act in acts.items():
            gc.collect()
            collectives.barrier()
            pop_host_peak_gib()
            before_gib = pop_host_peak_gib()
            started_s = time.perf_counter()
            act()
            collectives.barrier()
            took_s, peak_gib = time.perf_counter() - started_s, pop_host_peak_gib() - before_gib
            found = collectives.gather_objects(peak_gib)
            if repeat and found:  # the first one imports and makes groups
                seconds[way].append(took_s)
                peaks[way].append(max(found))
    size = sum(p.numel() for p in torch.nn.ModuleList(engine.chunks).parameters())
    if topology.rank == 0:
        print(f"{arguments['layout']}, {size / 1e6:.0f} million parameters on rank 0, bfloat16 weights")
        for way in acts:
            print(
                f"  {way:10}: median {statistics.median(seconds[way]):6.2f} s ({', '.join(f'{s:.2f}' for s in seconds[way])}), "
                f"peak of a rank +{statistics.median(peaks[way]):.2f} GiB"
            )
    topologies.destroy()
    shutil.rmtree(folder / "hf", ignore_errors=True)


if __name__ == "__main__":
    main()
