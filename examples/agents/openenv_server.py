"""An environment of openenv-core 0.3.0: a number between 1 and 9 to guess, with hints. Run: python openenv_server.py PORT"""

import sys
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MAX_GUESSES = 4


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 1
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Hint:
        self._number = 1 + (seed or 0) % 9
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Hint(text="Guess a number from 1 to 9.", done=False, reward=0.0)

    def step(self, action: Guess, **_: object) -> Hint:
        self._state.step_count += 1
        right = action.number == self._number
        text = "right" if right else "higher" if action.number < self._number else "lower"
        return Hint(text=text, done=right or self._state.step_count >= MAX_GUESSES, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


# The default is one session per server; a second one would be closed.
app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=256)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
