"""Prompts in a deterministic, resumable order: every prompt once an epoch, each epoch in an order of its own."""

from collections.abc import Sequence

import numpy as np

from megatron_rl.data.trajectory import Prompt


class PromptSampler:
    """Endless draw from ``prompts``; the state (epoch, position) and the seed fix all that follows."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self.load_state({"epoch": 0, "position": 0})

    def draw(self, step: int = 0) -> Prompt:
        if self._position == len(self._order):
            self.load_state({"epoch": self._epoch + 1, "position": 0})
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return prompt

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        order = np.arange(len(self._prompts))
        if self._shuffle:
            np.random.default_rng([self._seed, self._epoch]).shuffle(order)
        self._order = order
