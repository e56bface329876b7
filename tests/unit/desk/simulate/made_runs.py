"""Folders of runs that never ran: simulated with known costs, and written as a real run writes itself."""

from dataclasses import replace

import numpy as np

from megatron_rl.config.load import config_to_yaml
from megatron_rl.config.schema import Config, Mode
from megatron_rl.desk.simulate.clock import run_clock
from megatron_rl.desk.simulate.decoding import spread
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import stage_load, stage_seconds, work_of
from megatron_rl.desk.simulate.scenario import make_scenario
from megatron_rl.desk.simulate.slot_simulation import SlotProcess, serve_rows
from megatron_rl.desk.simulate.timing import Decode, LinearCost, Timing
from megatron_rl.tracking.timeline import Timeline

TIMING = Timing(
    Decode((1.0, 16.0, 64.0, 128.0), (0.010, 0.011, 0.016, 0.030), 2.0e-7),
    LinearCost(token_s=1.0e-5),
    {
        "generate": LinearCost(token_s=2.0e-5, cores=1.2),
        "score": LinearCost(row_s=1.0e-3),
        "old_logprobs": LinearCost(token_s=3.0e-5, cores=1.6),
        "values": LinearCost(token_s=3.0e-5, cores=1.6),
        "advantages": LinearCost(token_s=1.0e-6),
        "update_policy": LinearCost(token_s=1.0e-4, update_s=0.02, cores=1.6),
        "publish": LinearCost(fixed_s=0.1),
        "checkpoint": LinearCost(fixed_s=0.01, update_s=1.5),
        "update_critic": LinearCost(token_s=1.0e-4, update_s=0.02, cores=1.6),
    },
    between_s=0.001,
    cores=2.0,
    overlap_rate=0.8,
)
ARRIVALS_S = 0.02
LENGTHS = "pareto:shape=1.15,mean=55,max=900"


def make_config(mode="tppo", window_tokens=96, num_prompts=32):
    config = Config()
    config.schedule.mode = Mode(mode)
    config.batch.num_prompts_per_step, config.batch.num_samples_per_prompt = num_prompts, 4
    config.batch.max_response_tokens, config.batch.window_tokens = 900, 0 if mode == "sync" else window_tokens
    config.batch.window_jitter_tokens = 16
    config.batch.policy_minibatch_size = config.batch.critic_minibatch_size = 32
    config.critic.warmup_steps = 0
    return config


def make_run(folder, config, *, num_steps=40, timing=TIMING, noise=0.0, seed=0):
    """``noise``: standard deviation of the logarithm of every stage's seconds."""
    scenario = make_scenario(config)
    rng = np.random.default_rng(seed)
    slots = SlotProcess(scenario, named_lengths(LENGTHS).draw, named_lengths("uniform:min=8,max=20").draw, rng)
    works, rows = [], []

    def load_of(run):
        name, factor = run.stage.name, float(np.exp(noise * rng.standard_normal()))
        if name == "generate":
            window = slots.generate(run.step, timing)
            works.append(work_of(window, run.step))
            rows.append((window.generated, factor))
        last = run.step == num_steps - 1
        return scaled(stage_load(name, works[run.step], run.step, scenario, timing, last=last), factor)

    spans = run_clock(scenario.graph, load_of, num_steps, **timing.sharing)
    written = [
        replace(
            span,
            start_s=1e9 + span.start_s,
            end_s=1e9 + span.end_s,
            args=facts(span, spans, rows[span.step - 1], works[span.step - 1], scenario, timing),
        )
        for span in spans
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config_to_yaml(config))
    Timeline(spans=written).write(folder / "timeline.json")
    return folder


def scaled(load, factor):
    return load and replace(load, seconds=factor * load.seconds, then=scaled(load.then, factor))


def facts(span, spans, row, work, scenario, timing):
    """As the loop notes them. CPU seconds: those of the work, whatever slowed it down."""
    if not timing.stage(span.name).cores:
        return {}
    alone = stage_seconds(span.name, work, span.step - 1, scenario, timing)
    busy_s = sum(work.server_s) + alone - max(work.server_s) if span.name == "generate" else alone
    found = {"cpu_s": busy_s * timing.stage(span.name).cores}
    if span.name != "generate":
        return found
    generated, factor = row
    finish_s = np.zeros(len(generated))
    served = serve_rows(generated, scenario, timing)
    for own, trace in zip(spread(len(generated), scenario.num_servers), served, strict=True):
        finish_s[own] = trace.finish_s * factor
    # Next to a trainer stage, which goes on when the window begins, everything takes longer.
    beside = [
        other
        for other in spans
        if other.lane == "trainer" and other.start_s < span.end_s and other.end_s > span.start_s
    ]
    beside_s = max((other.end_s - span.start_s for other in beside), default=1.0)
    lost_s = span.end_s - span.start_s - alone * factor if beside else 0.0
    done_s = max(beside_s - lost_s, 1e-9)
    finish_s = np.where(finish_s < done_s, finish_s * beside_s / done_s, finish_s + lost_s)
    # Requests that travel together arrive later than those before them, and their seconds count from then.
    arrived_s = ARRIVALS_S * (np.arange(len(generated)) // scenario.limits.http_batch)
    seconds = np.maximum(finish_s - arrived_s, 0.001)
    words = {name: getattr(generated, name) for name in ("prompt", "held", "new")}
    words |= {"ended": generated.ended.astype(int), "ms": np.round(1000 * seconds).astype(int)}
    text = {name: " ".join(map(str, values.tolist())) for name, values in words.items()}
    return found | {
        "cores": timing.cores,
        "rounds": [{"rows": len(generated), "tokens": int(generated.new.sum()), **text}],
    }
