"""The environment ``harness``: a program per episode, its score, its failures; windows are played by fake_run.py."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.agents.harness import EndpointOptions, Harness, ScoringOptions
from megatron_rl.agents.program import AgentLimits
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.environments import base
from megatron_rl.environments.base import Ended, EnvironmentFault, TurnView
from tests.chat_models import END_ID
from tests.unit.agents.fake_run import FakeRun, services

CLIENT = """
import json, os, sys, time, urllib.request
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
history = []
def say(text, keep=True):
    messages = [*history, {"role": "user", "content": text}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + KEY, "Content-Type": "application/json"}
    reply = urllib.request.urlopen(urllib.request.Request(URL + "/chat/completions", body, headers), timeout=30)
    answer = json.load(reply)["choices"][0]["message"]["content"]
    if keep:
        history[:] = [*messages, {"role": "assistant", "content": answer}]
    return answer
def result(text):
    open("result.txt", "w").write(text)
"""
LIMITS = AgentLimits(time_limit_s=20)
PROMPT = Prompt("p", (5,), text="the task", answer="42", fields={"level": 3, "tests": "secret tests"})


@asynccontextmanager
async def started(folder: Path, tokenizer: Tokenizer, program: str, *, limits: AgentLimits = LIMITS, **options: Any):
    file = folder / "agent" / "agent.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(CLIENT + program)
    harness = Harness(**{"command": [sys.executable, str(file)], "program": limits, **options})
    await harness.start(services(folder, tokenizer))
    run = FakeRun(harness, tokenizer, END_ID)
    branches = asyncio.create_task(run.open_branches())
    try:
        yield run
    finally:
        branches.cancel()
        await harness.close()


def ended(folder: Path, tokenizer: Tokenizer, program: str, *, answer: Any = None, **options: Any) -> tuple[Ended, FakeRun]:
    """Run one episode to its end."""

    async def main() -> tuple[Ended, FakeRun]:
        async with started(folder, tokenizer, program, **options) as run:
            if answer is not None:
                run.answer = answer
            end = await run.episode("train-0", PROMPT)
            for _ in range(200):
                if all(row.ended for row in run.rows.values()):
                    break
                await asyncio.sleep(0.02)
            return end, run

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_the_registry_knows_the_harness_and_checks_its_options():
    harness = base.build("harness", {"command": "python agent.py", "time_limit_s": 5.0, "tool_parser": "qwen25"})
    assert isinstance(harness, Harness) and harness.opens
    for options, message in [
        ({}, "command"),
        ({"command": ""}, "command"),
        ({"command": "x", "time_limit": 5}, "time_limit"),
        ({"command": "x", "sandbox": "most"}, "sandbox"),
        ({"command": "x", "num_programs": 0}, "num_programs"),
    ]:
        with pytest.raises(EnvironmentFault, match=message):
            base.build("harness", options)


def test_what_a_program_writes_is_graded_and_its_tokens_are_one_row(tmp_path, tokenizer):
    program = "task = open('prompt.txt').read()\nfor i in range(3): answer = say(f'{task} {i}')\nresult(answer)\nprint('done')"
    end, run = ended(tmp_path, tokenizer, program)
    assert end.graded_text == "answer 2" and end.score is None
    assert len(run.rows) == 1 and len(run.rows["train-0"].spans) == 3
    assert "the task 0" in tokenizer.decode(run.rows["train-0"].ids)
    folder = tmp_path / "agents" / "train-0"
    assert (folder / "output.txt").read_text() == "done\n" and not (folder / "workspace").exists()


def test_a_program_without_a_result_has_an_empty_answer(tmp_path, tokenizer):
    assert ended(tmp_path, tokenizer, "say('hi')")[0] == Ended(graded_text="")


def test_a_score_command_scores_with_the_whole_row(tmp_path, tokenizer):
    scorer = tmp_path / "score.py"
    scorer.write_text(
        "import json, sys; row = json.load(open(sys.argv[1])); print('noise'); "
        "print(0.25 * (row['answer'] == '42') + 0.5 * (row['tests'] == 'secret tests') + len(open(sys.argv[2]).read()))"
    )
    command = [sys.executable, str(scorer), "{row_file}", "{result_file}"]
    end, _ = ended(tmp_path, tokenizer, "say('hi'); result('1234')", scoring=ScoringOptions(command))
    assert end.score.value == 4.75


@pytest.mark.parametrize("text", ["print('no number')", "raise SystemExit(2)", "print('nan')", ""])
def test_a_score_command_that_fails_leaves_the_episode_unscored(tmp_path, tokenizer, text):
    end, _ = ended(tmp_path, tokenizer, "say('hi')", scoring=ScoringOptions([sys.executable, "-c", text]))
    assert end.score.value is None and "score command" in end.score.error


def test_a_program_sees_given_fields_and_nothing_that_only_the_score_may_know(tmp_path, tokenizer):
    program = "say('hi'); result(open('row.json').read())"
    end, _ = ended(tmp_path, tokenizer, program, fields=["level", "other"])
    assert json.loads(end.graded_text) == {"prompt": "the task", "level": 3}


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("say('hi'); result('fine'); raise SystemExit(3)", "exit code 3"),
        ("say('hi'); os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("say('hi'); time.sleep(60)", "time_limit_s=2"),
        ("raise SystemExit(1)", "exit code 1"),
        ("say('hi')\nwhile True: os.fork()", "num_processes=20"),
        ("say('hi'); x = b'1' * (500 << 20)", "exit code 1"),
    ],
    ids=["code", "killed", "hangs", "before its first request", "fork bomb", "memory"],
)
def test_a_failed_program_is_unscored_with_the_reason_and_never_a_zero(tmp_path, tokenizer, program, failure):
    limits = AgentLimits(time_limit_s=2.0, num_processes=20, memory_mb=300)
    end, _ = ended(tmp_path, tokenizer, program, limits=limits)
    assert end.score.value is None and failure in end.score.error and "output.txt" in end.score.error and end.graded_text is None


def test_waiting_for_the_policy_does_not_count_as_the_programs_time(tmp_path, tokenizer):
    async def slow(text: str, turns: int) -> str:
        await asyncio.sleep(3.0)
        return "late"

    end, _ = ended(tmp_path, tokenizer, "result(say('hi'))", limits=AgentLimits(time_limit_s=2.5), answer=slow)
    assert end.graded_text == "late"


def test_forks_are_rows_that_end_with_the_program(tmp_path, tokenizer):
    program = "say('main'); say('sub 1', keep=False)\nhistory.clear()\nsay('sub 2'); result('x')"
    _, run = ended(tmp_path, tokenizer, program, scoring=ScoringOptions([sys.executable, "-c", "print(1)"]))
    assert len(run.rows) == 2 and {row.ended.score.value for row in run.rows.values()} == {1.0}
    row = run.rows["train-0"]
    views = [TurnView("policy", "answer 0", tuple(row.ids[a : a + n]), "stop") for a, n in row.spans]
    found = run.environment.metrics(Prompt("p", (5,)), views, {})
    assert (found["num_requests"], found["num_rows"]) == (3, 2) and found["program_s"] > 0
    assert sum(value for name, value in found.items() if name.startswith("forks_")) == 1


def test_episodes_run_beside_each_other_and_see_nothing_of_one_another(tmp_path, tokenizer):
    program = """
name = os.environ["NAME"]
for i in range(3): answer = say(f"I am {name}")
try:
    others = os.listdir("../..")
except OSError:
    others = []
result(json.dumps([answer, others]))
"""

    async def main() -> None:
        async with started(tmp_path, tokenizer, program, variables={"NAME": "{session}"}) as run:
            run.answer = lambda text, turns: text.partition("I am ")[2][:9]
            names = [f"train-{i:02}" for i in range(8)]
            ends = await asyncio.gather(*(run.episode(name, PROMPT) for name in names))
            assert [json.loads(end.graded_text)[1] for end in ends] == [[]] * 8
            for name in names:
                text = tokenizer.decode(run.rows[name].ids)
                assert text.count(f"I am {name}") == 3 and text.count("I am train") == 3

    asyncio.run(asyncio.wait_for(main(), 60))


def test_at_most_num_programs_run_at_a_time(tmp_path, tokenizer):
    program = "say('hi'); time.sleep(0.5); result('x')"

    async def main() -> None:
        async with started(tmp_path, tokenizer, program, num_programs=1) as run:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, sum(one.program is not None for one in run.environment._running.values()))
                    await asyncio.sleep(0.02)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*(run.episode(f"train-{i}", PROMPT) for i in range(3)))
            watching.cancel()
            assert most == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_stopped_episode_ends_its_program_and_its_slot_is_free(tmp_path, tokenizer):
    async def main() -> None:
        async with started(tmp_path, tokenizer, "say('hi'); time.sleep(60)") as run:
            growing = asyncio.create_task(run.episode("train-0", PROMPT))
            while "train-0" not in run.rows or not run.rows["train-0"].spans:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            running = run.environment._running["train-0"]
            run.environment.stop("train-0")
            await asyncio.wait_for(running.task, 20)
            assert not run.environment._running and not (tmp_path / "agents" / "train-0" / "workspace").exists()
            assert (await growing).score.value is None

    asyncio.run(asyncio.wait_for(main(), 60))


def test_after_a_resume_an_episode_that_had_begun_is_unscored_and_a_new_one_begins(tmp_path, tokenizer):
    async def main() -> None:
        async with started(tmp_path, tokenizer, "result(say('hi'))") as run:
            turns = [TurnView("policy", "hm", (5, END_ID), "stop")]
            end = await run.environment.respond(PROMPT, turns, episode="train-3")
            assert end.score.value is None and "resumed" in end.score.error
            assert (await run.episode("train-4", PROMPT)).graded_text == "answer 0"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_end_of_the_run_ends_all_programs(tmp_path, tokenizer):
    async def main() -> list[int]:
        async with started(tmp_path, tokenizer, "say('hi'); time.sleep(60)") as run:
            growing = [asyncio.create_task(run.episode(f"train-{i}", PROMPT)) for i in range(3)]
            while not all(len(row.spans) for row in run.rows.values()) or len(run.rows) < 3:
                await asyncio.sleep(0.05)
            pids = [one.program.pid for one in run.environment._running.values()]
            for one in growing:
                one.cancel()
        return pids

    for pid in asyncio.run(asyncio.wait_for(main(), 60)):
        assert not os.path.exists(f"/proc/{pid}")


def test_a_container_command_comes_before_the_program_and_gets_its_texts(tmp_path, tokenizer):
    wrapper = tmp_path / "container.py"
    wrapper.write_text("import os, sys; open(sys.argv[1] + '/started', 'w').write(sys.argv[2]); os.execvp(sys.argv[3], sys.argv[3:])")
    container = [sys.executable, str(wrapper), "{workspace}", "{base_url}"]
    program, nowhere = "say('hi'); result(open('started').read())", EndpointOptions(url="http://127.0.0.1:1/")
    end, _ = ended(tmp_path, tokenizer, program, container=container, endpoint=nowhere)
    assert "exit code" in end.score.error  # the program got the address that was given, where nothing listens
    end, _ = ended(tmp_path, tokenizer, program, container=container)
    assert end.graded_text.startswith("http://127.0.0.1:")


def test_a_result_that_leads_out_of_the_workspace_is_empty(tmp_path, tokenizer):
    for make in ("os.symlink('/etc/hostname', 'result.txt')", "os.mkfifo('result.txt')", "os.mkdir('result.txt')"):
        assert ended(tmp_path, tokenizer, f"say('hi'); {make}")[0] == Ended(graded_text="")


def test_a_used_up_budget_is_unscored_unless_a_score_is_given():
    unscored = Harness(command="x").outcome(PROMPT, (), {})
    assert unscored.value is None and "max_response_tokens" in unscored.error
    assert Harness(command="x", scoring=ScoringOptions(budget_score=0.0)).outcome(PROMPT, (), {}).value == 0.0
