"""Two pictures of ``draw_pictures.py``: processes and their machines, and the use of GPUs over time."""

from collections.abc import Sequence

from canvas import MUTED, arrow, box, canvas, rectangle, text
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_rl.desk.report.charts import LIGHT


def processes() -> Figure:
    figure, axes = canvas(1060, 640)
    text(axes, (24, 28), "Processes and threads of a disaggregated run", size=12, bold=True)
    _trainer_node(axes)
    _other_nodes(axes)
    arrow(axes, (350, 140), (742, 140), "HTTP: prompts out, token ids and log-probs back", color="blue", both=True)
    arrow(axes, (350, 222), (742, 222), "process groups (NCCL, gloo): weights, from the", color="orange", at=(546, 200))
    text(axes, (546, 213), "first rank of each pipeline stage to every worker", size=8.5, color=LIGHT["orange"], ha="center")
    arrow(axes, (350, 372), (742, 372), "Megatron's groups (NCCL, gloo);", color="green", both=True, at=(546, 350))
    text(axes, (546, 363), "the driver's calls over gloo", size=8.5, color=LIGHT["green"], ha="center")
    return figure


def _trainer_node(axes: Axes) -> None:
    rectangle(axes, (20, 50, 690, 572), fill="none", edge=MUTED, dashed=True, radius=8)
    text(axes, (34, 66), "trainer node 0", color=MUTED, bold=True)
    box(
        axes,
        (40, 84, 310, 234),
        "rank 0: the driver",
        "main thread: trainer stages and publish\n"
        "thread rollout: asyncio; generate, score, evaluate\nthreads host: advantages, record\n"
        "threads reward-*: reward workers, async rewards\nthreads mlflow, report: no stage waits for them",
        color="green",
    )
    rectangle(axes, (52, 202, 286, 92), fill=LIGHT["green"] + "22")
    text(axes, (62, 218), "Megatron engines on this rank's GPU", size=9, bold=True)
    text(
        axes,
        (62, 232),
        "policy, critic, reference, process reward:\neach in its own layout, taking turns;\n"
        "log-probs, values, updates, weight export",
        size=8.5,
        color=MUTED,
        va="top",
    )
    box(axes, (96, 338, 254, 68), "ranks 1 to 7", "the same engines; they execute\nthe driver's calls", color="green")
    arrow(axes, (66, 318), (66, 452), color="violet")
    text(axes, (78, 430), "one per plain reward", size=8.5, color=LIGHT["violet"])
    box(axes, (40, 452, 158, 56), "fork server", "loads a reward once", color="violet")
    box(axes, (226, 452, 166, 56), "reward workers", "deadline, memory limit", color="violet")
    box(
        axes,
        (424, 418, 272, 188),
        "sandbox of a worker",
        "namespaces or Landlock; its supervisor\nconfines, watches and kills",
        color="red",
    )
    box(axes, (438, 500, 116, 44), "program", color="red")
    box(axes, (566, 500, 116, 44), "tests", color="red")
    text(axes, (496, 566), "untrusted\nprocess", size=8.5, color=MUTED, ha="center")
    text(axes, (624, 566), "trusted\nprocess", size=8.5, color=MUTED, ha="center")
    arrow(axes, (198, 480), (226, 480), color="violet")
    arrow(axes, (392, 480), (424, 480), color="red")
    arrow(axes, (553, 522), (567, 522), color="red", both=True)
    text(
        axes,
        (40, 532),
        "JSON frames over sockets, nothing pickled: a response\nmay have written a worker's reply.\n"
        "Servers, workers and sandboxes end with the driver.",
        size=8.5,
        color=MUTED,
        va="top",
    )


def _other_nodes(axes: Axes) -> None:
    rectangle(axes, (730, 50, 310, 250), fill="none", edge=MUTED, dashed=True, radius=8)
    text(axes, (744, 66), "rollout nodes", color=MUTED, bold=True)
    box(
        axes,
        (742, 84, 286, 204),
        "SGLang servers",
        "stock processes, started by the run or\nattached to (rollout.urls)",
        color="blue",
    )
    for place, name in enumerate(("HTTP, scheduler", "worker of TP rank 0", "worker of TP rank 1, ...")):
        box(axes, (758, 156 + 42 * place, 254, 34), name, color="blue")
    rectangle(axes, (730, 314, 310, 148), fill="none", edge=MUTED, dashed=True, radius=8)
    text(axes, (744, 330), "trainer nodes 1, 2, ...", color=MUTED, bold=True)
    box(axes, (742, 348, 286, 60), "ranks 8, 9, ...", "the same engines; they execute calls", color="green")
    text(axes, (744, 434), "torchrun or srun starts all ranks. A rank\nends when its driver ends.", size=8.5, color=MUTED)
    rectangle(axes, (730, 476, 310, 146), fill="none", edge=MUTED, dashed=True, radius=8)
    text(axes, (744, 492), "anywhere", color=MUTED, bold=True)
    box(
        axes,
        (742, 510, 286, 98),
        "judges, reward services, MLflow",
        "the driver's async rewards query judges and\nservices over HTTP, each item with a\ndeadline; MLflow may be down",
        color="violet",
    )


def placements() -> Figure:
    figure, axes = canvas(1060, 452)
    text(axes, (24, 28), "Two placements of the servers, one stage graph", size=12, bold=True)
    text(axes, (24, 62), "disaggregated: servers have their own GPUs; weights are broadcast", bold=True, size=10)
    turns = (
        ("update\ncritic 1", 0, 90, "pink"),
        ("old log-probs,\nvalues 2", 330, 120, "teal"),
        ("update\npolicy 2", 450, 90, "green"),
        ("publish\n2", 540, 62, "orange"),
        ("update\ncritic 2", 602, 90, "pink"),
    )
    _lane(axes, 82, "trainer GPUs", turns)
    turns = (("generate window 2", 0, 330, "blue"), ("load\n2", 540, 62, "orange"), ("generate window 3", 602, 304, "blue"))
    _lane(axes, 136, "server GPUs", turns)
    arrow(axes, (130 + 571, 82 + 39), (130 + 571, 139), color="orange")
    text(
        axes,
        (130, 194),
        "The critic trains while the next window is generated. No step waits for the longest response.",
        color=MUTED,
        size=9.5,
    )
    text(
        axes,
        (24, 234),
        "colocated: servers and trainer share the GPUs and take turns; weights are copied from memory to memory (CUDA IPC)",
        bold=True,
        size=10,
    )
    turns = (
        ("generate window 2", 0, 200, "blue"),
        ("sleep", 200, 54, "grey"),
        ("old log-probs,\nvalues 2", 254, 120, "teal"),
        ("update\npolicy 2", 374, 90, "green"),
        ("update\ncritic 2", 464, 90, "pink"),
        ("checkpoint", 554, 86, "red"),
        ("wake,\npublish 2", 640, 80, "orange"),
        ("generate window 3", 720, 186, "blue"),
    )
    _lane(axes, 254, "shared GPUs", turns)
    text(
        axes,
        (130, 318),
        "The servers release weights, KV cache and CUDA graphs while the trainer works: nothing overlaps, but all GPUs\n"
        "generate. Each server worker reads the memory of the trainer rank on its own device.",
        color=MUTED,
        size=9.5,
    )
    text(axes, (24, 358), "Which one?", bold=True, size=10)
    text(
        axes,
        (24, 398),
        "rollout.placement=disaggregated (default): enough GPUs for both, or attached servers (rollout.urls).\n"
        "rollout.placement=colocated: one set of GPUs; trainer ranks = rollout.num_servers x rollout.tensor_parallel_size.\n"
        "Numbers are steps; lengths are not to scale. --dry-run prints the graph of a recipe.",
        size=9.5,
        color=MUTED,
    )
    return figure


def _lane(axes: Axes, y: float, name: str, turns: Sequence[tuple[str, float, float, str]]) -> None:
    text(axes, (120, y + 20), name, ha="right", size=9.5, bold=True)
    rectangle(axes, (130, y, 906, 40), fill="#eeeeec", radius=2)
    for words, start, width, color in turns:
        rectangle(axes, (131 + start, y + 1, width - 2, 38), fill=LIGHT[color], radius=2)
        text(axes, (130 + start + width / 2, y + 20), words, color="#ffffff", ha="center", size=8.5, bold=True)
