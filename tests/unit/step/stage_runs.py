"""Runs one stage's function in a test, on the components that it takes."""

from megatron_rl.step.stages import function_of


def run_stage(name, step, state, **components):
    """A coroutine for a stage that runs on the asyncio thread. KeyError names a component that the stage lacks."""
    run, taken = function_of(name)
    return run(step, state, **{component: components[component] for component in taken})
