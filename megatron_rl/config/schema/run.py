"""The run itself: its folder and length, how much one step does, its schedule, evaluation and tracking."""

from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.config.schema.bounds import at_least, bounded, items_at_least, num_likeliest, positive_share, share


@dataclass
class RunConfig:
    """The run: its folder, its length, its checkpoints."""

    output_dir: str = bounded("a folder", bool, default="outputs/run")
    """Everything the run writes lies under this folder."""
    num_steps: int = at_least(1, default=100)
    """Steps of the training loop in all (a resumed run continues up to this number)."""
    stop_after_s: float = at_least(0, default=0.0)
    """The step whose policy update ends so many seconds after the first step began, or later, is the last one (start-up
    does not count; of a run that was resumed, the time before does); 0 means never."""
    seed: int = at_least(0, default=1)
    """Of everything random: fresh weights, the order of prompts and mini-batches, samples."""
    resume: bool | str = bounded("true, false or auto", lambda value: value in (True, False, "auto"), default=False)
    """Continue from the newest checkpoint under output_dir; auto: from the newest whole one, or start where there is none."""
    overwrite: bool = False
    """Allow a run to start over in a folder that already holds one."""
    save_every_steps: int = at_least(0, default=20)
    """Write a checkpoint every so many steps; 0 means only at the end and when a signal stops the run."""
    async_save: bool | None = None
    """Write checkpoints while training goes on, from a copy in host memory (each rank of its own share; where that has no
    room, training waits). Until it is complete a kill leaves the one before. null: on GPUs yes; on a CPU, whose cores
    would write and train at once, no."""
    keep_last: int = at_least(1, default=2)
    """Newest checkpoints that stay on disk. The newest one of healthy training stays, too, whatever its age."""
    keep_every_steps: int = at_least(0, default=0)
    """Checkpoints of steps that this number divides stay, too; 0 means none."""
    keep_best: int = at_least(0, default=0)
    """So many checkpoints of the highest eval/accuracy stay, too (of steps that were evaluated)."""
    keep_policy_every_s: float = at_least(0, default=0.0)
    """Whenever so many more seconds of training have passed, keep the policy as a Hugging Face folder under policies/, for
    `megatron-rl evaluate`; 0 means never."""
    stop_grace_s: float = at_least(0, default=90.0)
    """On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C the run has this long to end its step and to save, and 20 s more to leave."""


@dataclass
class BatchConfig:
    """How much one step generates and trains: prompts, samples and tokens, over all ranks."""

    num_prompts_per_step: int = at_least(1, default=512)
    """Prompts whose responses are generated at the same time; times num_samples_per_prompt: the slots of a step."""
    num_samples_per_prompt: int = at_least(1, default=16)
    """Responses per prompt; advantages that compare responses need at least 2."""
    num_samples_by_type: dict[str, int] = field(default_factory=dict, metadata=items_at_least(1))
    """Responses per prompt of a type (a judged prompt once, a verifiable one 4 times); the others have num_samples_per_prompt.
    The slots of a step stay as many, so the number of its prompts varies."""
    max_prompt_tokens: int = at_least(1, default=2048)
    """Longest prompt; longer ones are left out and counted."""
    max_response_tokens: int = at_least(1, default=24576)
    """Budget of a response over all its windows (L_max)."""
    window_tokens: int = at_least(0, default=0)
    """New tokens a response may grow by in one step (W); 0 means max_response_tokens. A rest of its budget up to W / 16 goes along."""
    window_jitter_tokens: int = at_least(0, default=128)
    """A response's first window is shorter by a random number of tokens below this (at most a window), so that the edges
    of windows, whose tokens the policy loss leaves out, do not fall on the same positions in every response; 0: all
    windows are full. Only with windows."""
    policy_minibatch_size: int = at_least(1, default=512)
    """Responses in one policy optimizer step, over all ranks."""
    critic_minibatch_size: int = at_least(1, default=512)
    """Finished responses in one critic optimizer step, over all ranks."""
    max_tokens_per_microbatch: int = at_least(1, default=32768)
    """Tokens packed into one forward pass of one rank; a longer single sequence gets a micro-batch of its own."""


class Mode(Enum):
    """What a step generates and what overlaps."""

    sync = "sync"
    """Full responses; nothing overlaps (the PPO baseline)."""
    tppo = "tppo"
    """One window per step; the critic update runs while the next window is generated."""
    async_ = "async"
    """One window per step, generated while the step before trains: servers and trainer both work all the time."""


class TrainsOn(Enum):
    """Which tokens a model learns from in a step; every token trains it once."""

    windows = "windows"
    """All that the step generated; where a response goes on, with values in the place of the rest (EGAE)."""
    responses = "responses"
    """The responses that ended in the step, over all their windows, with their outcome."""


class WeightUpdate(Enum):
    """When new weights reach the servers in mode async."""

    between = "between"
    """Between two windows: every window has one weight version, and a run depends on no stage's duration."""
    in_flight = "in_flight"
    """At once, into the window in progress: its requests pause, compute their prefixes again and go on with the new weights."""


@dataclass
class ScheduleConfig:
    """How generation and training follow each other."""

    mode: Mode = Mode.tppo
    """What a step generates and what overlaps."""
    policy_trains_on: TrainsOn = TrainsOn.windows
    """What the policy learns from in a step; T-PPO: windows. With responses no prefix is computed twice, but tokens are as old as
    their windows: algorithm.correction.old_policy=rollout, or a weight, has to say what becomes of that."""
    critic_trains_on: TrainsOn = TrainsOn.responses
    """What the critic learns from in a step; T-PPO: responses. With windows its targets are V + A^lambda_critic (EGAE)."""
    max_staleness: int = at_least(0, default=1)
    """Of mode async: most policy updates between the weights that sample a window's tokens and the update that they train.
    0 is tppo, 1 lets servers and trainer work all the time; more would only make tokens older, and is refused.
    Responses and groups that train whole have windows that are older by one update for each one after them."""
    weight_update: WeightUpdate = WeightUpdate.between
    """When new weights reach the servers in mode async. In flight tokens are fresher, prefixes are computed once more, and
    which token has which version depends on durations."""


@dataclass
class EvalSetConfig:
    """A set of prompts with a name; what is null is as in eval."""

    files: list[str] = field(default_factory=list)
    """Prompts, in the formats of data.train_files."""
    num_prompts: int | None = at_least(0, default=None)
    """The first so many prompts of its files; 0 means all of them."""
    num_samples: int | None = at_least(1, default=None)
    """Responses per prompt."""
    temperature: float | None = at_least(0, default=None)
    """Sampling temperature; 0 means the likeliest token each time."""
    top_p: float | None = positive_share(default=None)
    """Sample among the likeliest tokens that together have this probability."""
    top_k: int | None = num_likeliest(default=None)
    """Sample among this many likeliest tokens."""


@dataclass
class EvalConfig:
    """Evaluation on data.eval_files or on sets with names, with full responses."""

    every_steps: int = at_least(0, default=0)
    """Evaluate every so many steps; 0 means only before and after."""
    num_prompts: int = at_least(0, default=0)
    """Prompts of a set, the first of its files; 0 means all of them."""
    num_samples: int = at_least(1, default=1)
    """Responses per prompt (the papers: 32). The accuracy is their mean; above 1 there is pass@k too."""
    temperature: float = at_least(0, default=0.0)
    """Sampling temperature of an evaluation; 0 means the likeliest token each time."""
    top_p: float = positive_share(default=1.0)
    """Sample among the likeliest tokens that together have this probability; 1 means among all."""
    top_k: int = num_likeliest(default=-1)
    """Sample among this many likeliest tokens; -1 means among all."""
    stop_at_accuracy: float = share(default=0.0)
    """End the run once eval/accuracy, the mean over the prompts of all sets, reaches this; 0 means never."""
    urls: list[str] = field(default_factory=list)
    """Running SGLang servers for evaluation alone, of rollout.tensor_parallel_size each: they get the weights that are to be
    evaluated, and training goes on meanwhile. Empty: the run's own servers evaluate, between two windows."""
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Several sets at once, by name, in the place of data.eval_files; metrics are eval/<name>/..."""


class WandbMode(Enum):
    """How Weights & Biases gets a run."""

    online = "online"
    """While it trains."""
    offline = "offline"
    """From the folder `wandb` in the output folder, by `wandb sync`."""


@dataclass
class TrackingConfig:
    """Where metrics go besides the output folder."""

    mlflow: bool = True
    """Log metrics and parameters to MLflow; a server that is down never stops a run."""
    mlflow_uri: str = ""
    """Address of the tracking server; empty: a SQLite store in the output folder."""
    experiment: str = "megatron_rl"
    """Name of MLflow's experiment, and of the Weights & Biases project, that the run is listed under."""
    mlflow_parent: str = ""
    """Name of the MLflow run that this one is listed under as a child (a sweep, SFT and RL of one model); made where there is
    none. Empty: the run stands alone."""
    mlflow_model: str = ""
    """Name of a registered MLflow model that the final policy becomes a version of (a tracking server gets a copy of the
    weights); empty: none."""
    tensorboard: bool = False
    """Write TensorBoard event files into the folder `tensorboard` of the output folder."""
    wandb: WandbMode | None = None
    """Log to Weights & Biases; null: do not. Account and server are its own settings (WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL)."""
    report_every_steps: int = at_least(0, default=20)
    """Rewrite report.html every so many steps (and at the end)."""
    samples_per_step: int = at_least(0, default=64)
    """Responses of every step that are stored under samples/, in whole groups that run.seed chooses; 0: none."""
    samples_gib: float = at_least(0, default=4.0)
    """Most disk space that stored responses take; where they would take more, older steps are thinned out."""


@dataclass
class ProfileConfig:
    """PyTorch's profiler on the trainer ranks: a trace of each trainer stage in the folder `profile` of the output folder."""

    steps: list[int] = field(default_factory=list, metadata=items_at_least(1))
    """Steps to profile, counted from 1; empty: none, and nothing is paid for it."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata=items_at_least(0))
    """Trainer ranks that write traces."""
    stages: list[str] = field(default_factory=list)
    """Trainer stages that are profiled (update_policy, ...); empty: all. A stage of many micro-batches makes a large trace."""
    memory: bool = False
    """Write a snapshot of the GPU's memory with the history of its allocations, too (for pytorch.org/memory_viz)."""
