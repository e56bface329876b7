"""The run: its folder and length, the size of a step, the schedule, evaluation, tracking, and actions on collapsed training."""

from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.config.schema.bounds import (
    at_least,
    between,
    bounded,
    items_at_least,
    num_likeliest,
    positive_share,
    prompt_template,
    share,
)


@dataclass
class RunConfig:
    """The run: its folder, its length, its checkpoints."""

    output_dir: str = bounded("a folder", bool, default="outputs/run")
    """Folder for all files that the run writes; `critic-pretrain` writes its run to the folder critic_pretrain_run in it."""
    num_steps: int = at_least(1, default=100)
    """Total number of steps; a resumed run continues up to this number."""
    stop_after_s: float = at_least(0, default=0.0)
    """Time limit for training in seconds: the run stops after the first step whose policy update ends past the limit.
    Startup is not counted; time before a resume is. 0: no limit."""
    seed: int = at_least(0, default=1)
    """Seed of random weights, of the order of prompts and mini-batches, and of sampling."""
    resume: bool | str = bounded("true, false or auto", lambda value: isinstance(value, bool) or value == "auto", default=False)
    """Continue from the newest checkpoint under output_dir; auto: from the newest complete one, or start if there is none."""
    overwrite: bool = False
    """Allow a run to start over in a folder that already contains a run."""
    save_every_steps: int = at_least(0, default=20)
    """Steps between two checkpoints. 0: save only at the end and when a signal stops the run."""
    async_save: bool | None = None
    """Write checkpoints during training, from a copy in host memory: each rank copies its part, and training waits if the
    memory is too small. A run killed during the write resumes from the previous checkpoint. null: true on GPUs; false
    on a CPU, whose cores would write and train at the same time."""
    keep_last: int = at_least(1, default=2)
    """Number of newest checkpoints to keep. The newest healthy checkpoint is also kept, at any age."""
    keep_every_steps: int = at_least(0, default=0)
    """Also keep the checkpoints of steps that are multiples of this number. 0: none."""
    keep_best: int = at_least(0, default=0)
    """Also keep this many checkpoints with the highest eval/accuracy, among the evaluated steps."""
    keep_policy_every_s: float = at_least(0, default=0.0)
    """Seconds of training between two exports of the policy as a Hugging Face folder under policies/, for
    `megatron-rl evaluate`. 0: never."""
    stop_grace_s: float = at_least(0, default=90.0)
    """Seconds in which the run ends its step and saves after SIGTERM, SIGUSR1, SIGHUP or Ctrl-C; it has 20 s more to exit."""


@dataclass
class BatchConfig:
    """The size of a step: prompts, samples and tokens, over all ranks."""

    num_prompts_per_step: int = at_least(1, default=512)
    """Prompts whose responses are generated at the same time; times num_samples_per_prompt, this is the number of slots."""
    num_samples_per_prompt: int = at_least(1, default=16)
    """Responses per prompt; advantages that compare responses need at least 2."""
    num_samples_by_type: dict[str, int] = field(default_factory=dict, metadata=items_at_least(1))
    """Responses per prompt of a type (for example 1 for judged prompts, 4 for verifiable ones); other types use
    num_samples_per_prompt. The number of slots is constant, so the number of prompts per step varies."""
    max_prompt_tokens: int = at_least(1, default=2048)
    """Longest prompt in tokens; longer prompts are skipped and counted."""
    max_response_tokens: int = at_least(1, default=24576)
    """Token budget of a response over all its windows (L_max)."""
    window_tokens: int = at_least(0, default=0)
    """New tokens per response and step (W). A remainder of the budget up to W / 16 is generated with the window before it.
    0: max_response_tokens."""
    window_jitter_tokens: int = at_least(0, default=128)
    """Shorten each response's first window by a random number of tokens below this value (at most a window), so that the
    edges of windows, whose tokens the policy loss excludes, are at different positions in different responses. Applies
    only with windows. 0: all windows are full."""
    policy_minibatch_size: int = at_least(1, default=512)
    """Responses per policy update, over all ranks."""
    critic_minibatch_size: int = at_least(1, default=512)
    """Finished responses per critic update, over all ranks."""
    max_tokens_per_microbatch: int = at_least(1, default=32768)
    """Tokens per forward pass of one rank; a longer sequence gets its own micro-batch."""


class Mode(Enum):
    """Length of the responses of a step, and overlap of its stages."""

    sync = "sync"
    """Full responses; nothing overlaps (the PPO baseline)."""
    tppo = "tppo"
    """One window per step; the critic update runs while the next window is generated."""
    async_ = "async"
    """One window per step, generated while the previous step trains: servers and trainer are always busy."""


class TrainsOn(Enum):
    """Tokens that the critic trains on in a step; every token trains it once."""

    windows = "windows"
    """The tokens that train the policy; for unfinished responses values replace the future rewards (EGAE)."""
    responses = "responses"
    """The responses that finished in the step, over all their windows, with their outcome."""


class WeightUpdate(Enum):
    """Time of a publish in mode async."""

    between = "between"
    """Between two windows: every window has one weight version, and a run depends on no stage's duration."""
    in_flight = "in_flight"
    """Immediately, during the current window: its requests pause, recompute their prefixes and resume with the new weights."""


@dataclass
class ScheduleConfig:
    """Order and overlap of generation and training."""

    mode: Mode = Mode.tppo
    """Length of the responses of a step, and overlap of its stages."""
    training_window_tokens: int | None = at_least(0, default=None)
    """The window of training: an unfinished response trains the policy in the step in which it has this many tokens that
    have not trained; a finished one trains on its remainder. null: every step trains on the tokens that it generated
    (T-PPO). 0: only finished responses train, whole. A longer window computes prefixes less often, but its first tokens
    are older, which needs algorithm.correction.old_policy=rollout or a correction weight."""
    critic_trains_on: TrainsOn = TrainsOn.responses
    """Tokens that the critic trains on in a step; T-PPO: responses. With windows its targets are V + A^lambda_critic (EGAE)."""
    critic_first: bool = False
    """Update the critic before the policy, whose advantages are then computed from the critic's new values (SAO): one more
    pass of the critic per step, and its update overlaps with no policy's. false: values from before the update."""
    max_staleness: int = bounded("0 to 8", lambda value: 0 <= value <= 8, default=1)
    """For mode async: number N of windows that are generated ahead: exactly (in_flight: at most) N policy updates are between
    the weights that sample a window's tokens and the update that they train. 0 equals tppo, 1 keeps servers and trainer
    busy; more saves no time and makes tokens older, for experiments with old tokens. In a longer window of training,
    earlier windows are older by one update per later window."""
    weight_update: WeightUpdate = WeightUpdate.between
    """Time of a publish in mode async. With in_flight tokens are less stale, prefixes are computed once more, and the
    version of a token depends on durations."""


@dataclass
class EvalSetConfig:
    """A named set of prompts; null takes the value of eval, or of data for fields and instruction."""

    files: list[str] = field(default_factory=list)
    """Prompts, in the formats of data.train_files."""
    num_prompts: int | None = at_least(0, default=None)
    """Number of prompts, taken from the start of the files. 0: all."""
    num_samples: int | None = at_least(1, default=None)
    """Responses per prompt."""
    temperature: float | None = between(0.01, 100, default=None, zero="greedy")
    """Sampling temperature. 0: the most likely token."""
    top_p: float | None = positive_share(default=None)
    """Sample from the smallest set of most likely tokens with this probability."""
    top_k: int | None = num_likeliest(default=None)
    """Sample from this many most likely tokens."""
    prompt_field: str | None = None
    """Column of the prompt."""
    answer_field: str | None = None
    """Column of the ground truth."""
    instruction: str | None = prompt_template(default=None)
    """Text around each prompt, as data.instruction."""


@dataclass
class EvalConfig:
    """Evaluation on data.eval_files or on named sets, with full responses."""

    every_steps: int = at_least(0, default=0)
    """Steps between two evaluations. 0: evaluate only before and after training."""
    num_prompts: int = at_least(0, default=0)
    """Number of prompts per set, taken from the start of its files. 0: all."""
    num_samples: int = at_least(1, default=1)
    """Responses per prompt (the papers: 32). The accuracy is their mean; more than 1 adds pass@k."""
    temperature: float = between(0.01, 100, default=0.0, zero="greedy")
    """Sampling temperature of an evaluation. 0: the most likely token."""
    top_p: float = positive_share(default=1.0)
    """Sample from the smallest set of most likely tokens with this probability. 1: from all tokens."""
    top_k: int = num_likeliest(default=-1)
    """Sample from this many most likely tokens. -1: from all tokens."""
    stop_at_accuracy: float = share(default=0.0)
    """Stop the run once eval/accuracy, the mean over the prompts of all sets, is at least this value. 0: never."""
    urls: list[str] = field(default_factory=list)
    """Evaluation servers: running SGLang servers of rollout.tensor_parallel_size each that only evaluate. They get the
    weights to evaluate, and training continues meanwhile. Empty: the run's servers evaluate between two windows."""
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Several named sets instead of data.eval_files; their metrics are eval/<name>/..."""


class WandbMode(Enum):
    """Time at which a run is uploaded to Weights & Biases."""

    online = "online"
    """During training."""
    offline = "offline"
    """Afterwards, by `wandb sync` from the folder `wandb` in the output folder."""


@dataclass
class TrackingConfig:
    """Metric trackers, in addition to the files in the output folder."""

    mlflow: bool = True
    """Log metrics and parameters to MLflow; an unavailable server never stops a run."""
    mlflow_uri: str = ""
    """Address of the tracking server. Empty: a SQLite store in the output folder."""
    experiment: str = bounded("a name", bool, default="megatron_rl")
    """Name of the MLflow experiment, and of the Weights & Biases project, that lists the run."""
    mlflow_parent: str = ""
    """Name of the MLflow run that lists this run as a child (a sweep, SFT and RL of one model); created if missing. Empty:
    no parent."""
    mlflow_model: str = ""
    """Name of a registered MLflow model that gets the final policy as a new version (a tracking server receives a copy of
    the weights). Empty: no model is registered."""
    tensorboard: bool = False
    """Write TensorBoard event files to the folder `tensorboard` of the output folder."""
    wandb: WandbMode | None = None
    """Upload to Weights & Biases. The account and the server are Weights & Biases settings (WANDB_API_KEY, WANDB_ENTITY,
    WANDB_BASE_URL). null: no upload."""
    report_every_steps: int = at_least(0, default=20)
    """Steps between two updates of report.html, which is also written at the end. 0: only at the end."""
    samples_per_step: int = at_least(0, default=64)
    """Responses stored under samples/ per step, in whole groups that run.seed selects. 0: none."""
    samples_gib: float = at_least(0, default=4.0)
    """Largest disk space of stored responses, in GiB; above it, older steps are thinned out."""


@dataclass
class ProfileConfig:
    """PyTorch's profiler on the trainer ranks: one trace per trainer stage in the folder `profile` of the output folder."""

    steps: list[int] = field(default_factory=list, metadata=items_at_least(1))
    """Steps to profile, counted from 1. Empty: none, without any overhead."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata=items_at_least(0))
    """Trainer ranks that write traces."""
    stages: list[str] = field(default_factory=list)
    """Trainer stages to profile (update_policy, ...); a stage with many micro-batches makes a large trace. Empty: all."""
    memory: bool = False
    """Also write a snapshot of GPU memory with its allocation history (for pytorch.org/memory_viz)."""


class HealthAction(Enum):
    """Action once a warning sign has been present for ``patience_steps`` consecutive steps."""

    ignore = "ignore"
    """No action; the steps are still counted."""
    warn = "warn"
    """A warning on the terminal, repeated after every further ``patience_steps`` steps."""
    stop = "stop"
    """The run ends with an error that names the last healthy checkpoint."""
    roll_back = "roll_back"
    """Weights and optimizers return to the last healthy checkpoint; the prompts continue at their current position."""


@dataclass
class HealthConfig:
    """Warning signs of collapsed training, with an action for each. A checkpoint is healthy if no sign was present at its step."""

    patience_steps: int = at_least(1, default=5)
    """Consecutive steps with a sign before its action is taken. Signs of reward errors and parity act immediately."""
    entropy: HealthAction = HealthAction.warn
    """The policy's entropy is below 0.001 nats per token."""
    reward_drop: HealthAction = HealthAction.warn
    """The mean reward of the last patience_steps steps has fallen by half of its best, beyond the noise of the steps."""
    gradient: HealthAction = HealthAction.warn
    """The gradient of the policy or the critic is zero, the policy had no token to train on, or an update was skipped
    because its gradient was not finite."""
    mismatch: HealthAction = HealthAction.warn
    """Trainer and servers disagree about the sampled tokens by more than 0.1 nats per token (mismatch/k3)."""
    ess: HealthAction = HealthAction.warn
    """The effective sample size is below min_ess: few tokens, on which the policies differ most, make up the update."""
    min_ess: float = share(default=0.1)
    """Lowest healthy effective sample size, as a share of the tokens: the smaller one of policy/ess and mismatch/ess."""
    reward_errors: HealthAction = HealthAction.stop
    """More than reward.max_error_rate of a step's responses could not be scored. Acts immediately."""
    parity: HealthAction = HealthAction.stop
    """The parity check of rollout.parity_every_steps exceeded a bound (rollout.parity_bounds). Acts immediately."""
