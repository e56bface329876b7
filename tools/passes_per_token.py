"""Count the trainer's forward tokens per generated token, by stage.

    python tools/passes_per_token.py                                     # windows of 32k, and the presets
    python tools/passes_per_token.py --lengths lognormal:median=2000,sigma=1.2 --budget 16384 --windows 1024 2048 4096
    python tools/passes_per_token.py --recipe examples/gpu/tppo.yaml batch.policy_minibatch_size=8192

Rows are those of the simulator's slots once they are mixed; no costs, no clock. Every window is passed with its prompt and with
all that earlier windows wrote. ``before``: a pass of all rows for the old log-probs, as it was until first updates gave their own.
``work`` counts an update three times, for its backward pass.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.load import load_config
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import StepWork, Workload, simulated_works
from megatron_rl.desk.simulate.scenario import Scenario, make_scenario
from megatron_rl.desk.simulate.timing import Timing
from megatron_rl.errors import UserError

COLUMNS = ("old_logprobs", "reference_logprobs", "values", "update_policy", "update_critic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, help="count only for this recipe")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE overrides of the recipe")
    parser.add_argument("--lengths", default="lognormal:median=6000,sigma=0.9", help="length distribution before truncation at the budget")
    parser.add_argument("--prompt", type=int, default=512, help="tokens per prompt")
    parser.add_argument("--budget", type=int, default=32768, help="maximum tokens per response")
    parser.add_argument("--windows", type=int, nargs="*", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--presets", nargs="*", default=["ppo", "grpo", "gspo", "dapo", "rloo"])
    parser.add_argument("--steps", type=int, default=40, help="steps to count in the steady state (without windows 2 are enough)")
    arguments = parser.parse_args()
    asked: list[tuple[str, Scenario]] = []
    if arguments.recipe:
        asked.append((arguments.recipe.name, make_scenario(load_config(arguments.recipe, arguments.overrides))))
    else:
        for window in arguments.windows:
            words = [f"batch.max_response_tokens={arguments.budget}", f"batch.window_tokens={window}"]
            for name, more in (("16 updates", []), ("1 update", ["batch.policy_minibatch_size=8192"])):
                asked.append((f"tppo, window {window}, {name}", _scenario("tppo", *words, *more)))
        for preset in arguments.presets:
            words = ["algorithm.dynamic_sampling.enabled=false", f"batch.max_response_tokens={arguments.budget}"]
            asked.append((preset, _scenario(preset, *words)))
    print(f"| | {' | '.join(COLUMNS)} | all, before | all | work, before | work |\n|{' --- |' * (len(COLUMNS) + 5)}")
    for name, scenario in asked:
        lengths = named_lengths(f"{arguments.lengths},max={scenario.max_response_tokens}")
        works = _works(scenario, Workload(lengths, named_lengths(f"fixed:length={arguments.prompt}")), arguments.steps)
        now, before = passes(scenario, works), passes(replace(scenario, first_is_own_old=False), works)
        numbers = [now[column] for column in COLUMNS]
        numbers += [sum(before.values()), sum(now.values()), _work(before), _work(now)]
        print(f"| {name} | {' | '.join(f'{number:.2f}' if number else '-' for number in numbers)} |")


def _scenario(preset: str, *words: str) -> Scenario:
    return make_scenario(load_config(None, [f"preset={preset}", *words]))


def _works(scenario: Scenario, workload: Workload, num_steps: int) -> list[StepWork]:
    # No step in which the policy rests: what a run does most of the time. Without servers nothing takes time.
    scenario = replace(scenario, num_servers=0, critic_warmup_steps=0)
    settled = scenario.num_settling_steps
    num_steps = num_steps if scenario.facts.windows else min(num_steps, 2)
    works = simulated_works(scenario, workload, Timing(), num_steps=settled + num_steps, seed=0)
    return works[settled:]


def passes(scenario: Scenario, works: Sequence[StepWork]) -> dict[str, float]:
    """Stage -> tokens forward per generated token, over ``works``."""
    generated = sum(work.new_tokens for work in works)
    rows = sum(work.row_tokens for work in works)
    late = scenario.critic_warmup_steps
    old = sum(work.row_tokens * scenario.stale_fraction(work.num_rows, late) for work in works)
    finished = sum(work.finished_tokens for work in works) * scenario.critic_epochs
    found = {
        "old_logprobs": old,
        "reference_logprobs": rows * scenario.facts.reference,
        "values": rows * scenario.facts.critic,
        "update_policy": rows,
        "update_critic": finished * scenario.facts.critic,
    }
    return {stage: number / generated for stage, number in found.items()}


def _work(passed: dict[str, float]) -> float:
    return sum(number * (3 if stage.startswith("update_") else 1) for stage, number in passed.items())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"passes_per_token: error: {error}") from error
