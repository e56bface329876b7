"""The environment ``harness``: a program of the user per episode, trained through the endpoint by its base URL alone.

An episode is one run of the command. What it asks of the endpoint becomes rows of the run; its end is scored by the score
command, or by the run's reward on the text that it wrote to ``result_file``.

Invariants: a program that failed, or that was stopped, has no score: it is masked and counted, and never a 0. Programs live as
long as this process: after a resume, an episode that had begun ends in the same way, and its slot goes on with another.
Each has a folder below the run's: its output (``output.txt``), and a workspace until it is scored.
"""

import asyncio
import contextlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_rl.agents.chat import ChatAnswer, ChatRequest
from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.conversation import Conversation
from megatron_rl.agents.endpoint import Endpoint
from megatron_rl.agents.episodes import Episode, EpisodeLimits, Row
from megatron_rl.agents.program import AgentEnd, AgentLimits, AgentProcess, start_program
from megatron_rl.agents.turn_text import SglangParsers, parse_turn
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.environments.base import Branch, Ended, Environment, Message, Services, TurnView, register

_CLOSE_S = 25.0
_MAX_COUNTED = 10_000
"""Episodes whose metrics are kept until they are asked for."""
_MAX_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class EndpointOptions:
    """Options of the endpoint that the programs use."""

    host: str = "127.0.0.1"
    """Address to listen on; others than this machine reach 0.0.0.0, without encryption."""
    port: int = 0
    """0: a free one."""
    url: str = ""
    """Base URL that programs get, for example from inside a container; empty: that of host and port."""
    shared_key_variable: str = ""
    """Environment variable with one key for all episodes, whose requests have the header X-Session-ID; empty: there is none."""
    tool_parser: str = ""
    """SGLang's parser of tool calls, such as qwen25, llama3 or glm45 (``--tool-call-parser``); empty: calls stay text."""
    thought_parser: str = ""
    """SGLang's parser of thoughts, such as qwen3 or deepseek-r1 (``--reasoning-parser``); empty: thoughts stay text."""
    thoughts: Literal["keep", "template"] = "keep"
    """keep: earlier thoughts stay in the row. template: where the chat template drops them, another row begins."""
    max_rows: int = 16
    """Histories of one episode: the first, and one for each fork."""


@dataclass(frozen=True)
class ScoringOptions:
    """Options of the score."""

    score_command: str | list[str] = ""
    """Command whose last line of output is the score, a number; it finds the whole row, with its answer, as JSON in ``{row_file}``.
    Empty: the run's reward scores the text in ``result_file``."""
    result_file: str = "result.txt"
    """File in the workspace; a program that does not write it has answered with an empty text."""
    budget_score: float | None = None
    """Score of an episode that used up its token budget; null: it is masked and counted."""


@dataclass(eq=False)
class _Running:
    episode: Episode
    folder: Path
    task: "asyncio.Task[None] | None" = None
    program: AgentProcess | None = None
    program_s: float = 0.0
    """Seconds of the program's own."""
    stopped: str = ""


@register("harness")
class Harness(Environment):
    """Runs a command per episode, which uses the policy through OpenAI's or Anthropic's protocol."""

    opens = True

    def __init__(
        self,
        *,
        command: str | list[str],
        container: str | list[str] = "",
        variables: dict[str, str] | None = None,
        fields: list[str] | None = None,
        num_programs: int = 64,
        scoring: ScoringOptions = ScoringOptions(),
        program: AgentLimits = AgentLimits(),  # noqa: B008
        endpoint: EndpointOptions = EndpointOptions(),
    ) -> None:
        """
        Args:
            command: Program and arguments. ``{base_url}``, ``{key}``, ``{session}``, ``{workspace}``, ``{prompt_file}``, ``{row_file}``
                (JSON) and ``{result_file}`` are replaced, also in ``container`` and ``variables``.
            container: Command before ``command``, such as ``docker run --rm ...``, in place of the sandbox.
            variables: Environment of the program, besides the base URLs and keys that both official clients read.
            fields: Fields of the row (``data.reward_fields``) that the program finds in ``{row_file}``, next to the prompt; the answer is
                not among them, nor anything else that only the score may know.
            num_programs: Programs that run at a time; others wait for their start.
        """
        if num_programs < 1:
            raise ValueError(f"num_programs must be at least 1, got {num_programs}")
        self._command = [*_words(container), *_words(command)]
        if not _words(command):
            raise ValueError("command must name a program")
        self._scoring = scoring
        self._variables = dict(variables or {})
        self._fields = list(fields or [])
        self._limits = replace(program, sandbox="none") if container else program
        self._options = endpoint
        self._num_programs = num_programs
        self._counted: dict[int, dict[str, float]] = {}
        self._running: dict[str, _Running] = {}
        self._rows: dict[str, tuple[_Running, Row]] = {}

    # ------------------------------------------------------------------------------------------------------- environment

    async def start(self, services: Services) -> None:
        self._services = services
        self.branches: asyncio.Queue[Branch] = asyncio.Queue()
        self.unwanted: set[str] = set()
        self._places = asyncio.Semaphore(self._num_programs)
        self._template = ChatTemplate(services.tokenizer)
        self._sglang = SglangParsers(services, self._options.tool_parser, self._options.thought_parser)
        shared_key = os.environ.get(self._options.shared_key_variable, "") if self._options.shared_key_variable else ""
        self._endpoint = Endpoint(self._options.host, self._options.port, shared_key=shared_key, template=self._template)
        await self._endpoint.start()

    async def close(self) -> None:
        for name in list(self._running):
            self.stop(name)
        tasks = [running.task for running in self._running.values() if running.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        await self._endpoint.close()
        await self._sglang.close()

    async def respond(self, prompt: Prompt, turns: Sequence[TurnView], episode: str) -> Message | Ended:  # type: ignore[override]
        found = self._row(episode)
        if found is None:
            if turns:
                return Ended(Score(None, error=f"the program of {episode} ended with its run; the resumed run starts others"))
            found = self._begin(prompt, episode)
        running, row = found
        reply = await running.episode.next_message(row, turns)
        if isinstance(reply, Ended):
            self._rows.pop(episode, None)
            if episode == running.episode.name:
                self._note_metrics(running, prompt, turns)
        return reply

    def stop(self, episode: str) -> None:
        """End a row; with the first one, the program."""
        found = self._rows.pop(episode, None)
        if found is None:
            return
        running, row = found
        running.episode.close_row(row)
        if episode == running.episode.name:
            running.stopped = "the run needs it no more"
            if running.program is not None:
                running.program.stop(running.stopped)

    def graded_text(self, prompt: Prompt, turns: Sequence[TurnView], index: int) -> str | None:
        return None  # an Ended has the text

    def turn_reward(self, prompt: Prompt, turns: Sequence[TurnView], index: int, grades: Mapping[int, Score]) -> Score | None:
        return self.outcome(prompt, turns, grades) if index == len(turns) - 1 else None

    def outcome(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> Score:
        """The score of an episode whose token budget ended before its program."""
        if self._scoring.budget_score is not None:
            return Score(self._scoring.budget_score, "token budget used up")
        return Score(None, error="the token budget (batch.max_response_tokens) ended the episode before its program did")

    def metrics(self, prompt: Prompt, turns: Sequence[TurnView], grades: Mapping[int, Score]) -> dict[str, float]:
        """Requests, rows, forks by reason, seconds in which the program waited and worked; with an episode's first row."""
        return self._counted.pop(_key(prompt, turns), {})

    # ----------------------------------------------------------------------------------------------------------- episode

    def _row(self, name: str) -> tuple[_Running, Row] | None:
        if name not in self._rows:  # a fork's row gets its name when a window opens it
            for running in self._running.values():
                if (row := running.episode.row(name)) is not None:
                    self._rows[name] = running, row
        return self._rows.get(name)

    def _begin(self, prompt: Prompt, name: str) -> tuple[_Running, Row]:
        services = self._services
        limits = EpisodeLimits(services.max_prompt_tokens, services.max_response_tokens, self._options.max_rows)
        conversation = Conversation(self._template, self._options.thoughts)
        episode = Episode(name, conversation, limits, self._read_turn, self.branches, self.unwanted)
        running = _Running(episode, services.output_dir.resolve() / "agents" / name)
        self._running[name] = running
        row = episode.row(name)
        assert row is not None
        self._rows[name] = running, row
        running.task = asyncio.create_task(self._run(prompt, running))
        return running, row

    async def _read_turn(self, turn: TurnView, request: ChatRequest, answer_id: str, num_prompt_tokens: int) -> ChatAnswer:
        stopped = turn.finish_reason == "stop"
        parsers = self._sglang.parsers()
        return await parse_turn(
            self._template, request, turn.token_ids, parsers, answer_id=answer_id, stopped=stopped, num_prompt_tokens=num_prompt_tokens
        )

    async def _run(self, prompt: Prompt, running: _Running) -> None:
        """Run the program of an episode to its end, and score it."""
        episode = running.episode
        ended = Ended(Score(None, error=f"episode {episode.name} was stopped"))
        try:
            async with self._places:
                ended = await self._ended(prompt, running)
        except OSError as error:
            ended = Ended(Score(None, error=f"episode {episode.name}: {type(error).__name__}: {error}"))
        finally:
            episode.end(ended)
            self._endpoint.remove(episode.name)
            self._running.pop(episode.name, None)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(shutil.rmtree, running.folder / "workspace", ignore_errors=True)

    async def _ended(self, prompt: Prompt, running: _Running) -> Ended:
        episode, folder = running.episode, running.folder
        workspace = folder / "workspace"
        shutil.rmtree(workspace, ignore_errors=True)  # of an interrupted run
        workspace.mkdir(parents=True)
        row_file = workspace / "row.json"
        (workspace / "prompt.txt").write_text(prompt.text)
        given = {name: prompt.fields[name] for name in self._fields if name in prompt.fields}
        row_file.write_text(json.dumps({"prompt": prompt.text, **given}, default=str))
        texts = self._texts(self._endpoint.add(episode), running, row_file)
        end = await self._program(self._command, running, "output.txt", self._limits, texts, waited=True)
        if not end.succeeded:
            return Ended(Score(None, error=f"the program of {episode.name} failed: {end.failure}; see {folder / 'output.txt'}"))
        score_command = _words(self._scoring.score_command)
        if not score_command:
            return Ended(graded_text=_read_text(workspace / self._scoring.result_file, workspace))
        row_file = folder / "row.json"  # not the program's copy
        row_file.write_text(json.dumps({"prompt": prompt.text, "answer": prompt.answer, **prompt.fields}, default=str))
        scored = replace(self._limits, sandbox="none")
        end = await self._program(score_command, running, "score.txt", scored, {**texts, "{row_file}": str(row_file)})
        lines = _read_text(folder / "score.txt", folder).split("\n") if end.succeeded else []
        value = _number(next((line for line in reversed(lines) if line.strip()), ""))
        if value is not None:
            return Ended(Score(value, "score command"))
        failure = "expected a number as its last line of output" if end.succeeded else end.failure
        return Ended(Score(None, error=f"the score command of {episode.name} failed: {failure}; see {folder / 'score.txt'}"))

    async def _program(
        self,
        command: Sequence[str],
        running: _Running,
        output: str,
        limits: AgentLimits,
        texts: Mapping[str, str],
        *,
        waited: bool = False,
    ) -> AgentEnd:
        variables = {name: _filled(value, texts) for name, value in {**_VARIABLES, **self._variables}.items()}
        words = [_filled(word, texts) for word in command]
        port = self._endpoint.port if waited else 0
        running.program = start_program(
            words, running.folder / "workspace", running.folder / output, limits, environment=variables, port=port
        )
        if running.stopped:
            running.program.stop(running.stopped)
        if not waited:
            return await running.program.end()
        clock = asyncio.get_running_loop().time
        start_s = clock()
        end = await running.program.end(lambda: running.episode.policy_s)
        running.program_s = clock() - start_s - running.episode.policy_s
        return end

    def _texts(self, key: str, running: _Running, row_file: Path) -> dict[str, str]:
        workspace = running.folder / "workspace"
        return {
            "{base_url}": self._options.url.rstrip("/") or self._endpoint.url,
            "{key}": key,
            "{session}": running.episode.name,
            "{workspace}": str(workspace),
            "{prompt_file}": str(workspace / "prompt.txt"),
            "{row_file}": str(row_file),
            "{result_file}": str(workspace / self._scoring.result_file),
        }

    def _note_metrics(self, running: _Running, prompt: Prompt, turns: Sequence[TurnView]) -> None:
        """Keep what an episode did until ``metrics`` is asked for it, with the same tokens."""
        episode = running.episode
        self._counted[_key(prompt, turns)] = {
            "num_requests": float(episode.num_requests),
            "num_repeated_requests": float(episode.num_joined),
            "num_calls": float(episode.num_calls),
            "num_rows": float(episode.num_rows),
            "num_lost_rows": float(episode.num_lost),
            "policy_s": episode.policy_s,
            "program_s": running.program_s,
            "num_forks": float(episode.conversation.forks.total()),
            **{f"forks_{reason}": float(number) for reason, number in episode.conversation.forks.items() if number},
        }
        while len(self._counted) > _MAX_COUNTED:
            self._counted.pop(next(iter(self._counted)))


_VARIABLES = {
    "OPENAI_BASE_URL": "{base_url}/v1",
    "OPENAI_API_KEY": "{key}",
    "ANTHROPIC_BASE_URL": "{base_url}",
    "ANTHROPIC_API_KEY": "{key}",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    # These clients call other addresses than the base URL when they start.
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def _key(prompt: Prompt, turns: Sequence[TurnView]) -> int:
    return hash((prompt.token_ids, tuple(turn.token_ids for turn in turns)))


def _words(command: str | list[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else list(command)


def _filled(text: str, texts: Mapping[str, str]) -> str:
    for name, value in texts.items():
        text = text.replace(name, value)
    return text


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _read_text(path: Path, workspace: Path) -> str:
    """Text of a file of the program; empty without one, and for a link, which could lead out of the workspace."""
    inside = os.path.realpath(path) == os.path.join(os.path.realpath(workspace), path.relative_to(workspace))
    if not inside or not path.is_file():
        return ""
    with open(path, "rb") as file:
        return file.read(_MAX_RESULT_BYTES).decode(errors="replace")
