"""Laws of selection/line_labeling.py with a fake model and a fake reward."""

import asyncio
import io
import json

import pytest

from megatron_rl.config.schema import Config, LabelLinesConfig, PolicyConfig, RewardConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Score
from megatron_rl.errors import DataError, UserError
from megatron_rl.rewards.registry import Reward, resolve
from megatron_rl.rewards.score_file import RowSchema
from megatron_rl.selection.line_labeling import (
    LabelSummary,
    LineLabeler,
    finished_keys,
    label_lines,
    label_rows,
    load_jobs,
)
from tests.integration import line_oracle
from tests.word_models import write_tokenizer

GOOD, BROKEN = "a = 1\nb = 2\n", "a = 1\n# no\n\nbad = 2\nc = 3\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    size = write_tokenizer(folder, extra="bad no go")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    return folder


class Setting:
    """Rows on disk, a model that continues with ``continuation``, and the oracle's scores; counts requests."""

    def __init__(self, tmp_path, model, responses, *, continuation="d = 4\n", context_tokens=0, **settings):
        rows = [{"prompt": f"go {i}:", "response": text, "answer": ""} for i, text in enumerate(responses)]
        self.input = tmp_path / "in.jsonl"
        self.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.output = tmp_path / "out.jsonl"
        self.config = Config(
            policy=PolicyConfig(path=str(model)),
            reward=RewardConfig(name="tests.integration.line_oracle:score"),
            label_lines=LabelLinesConfig(
                input_path=str(self.input), output_path=str(self.output), **{"num_completions": 3, **settings}
            ),
        )
        self.tokenizer = Tokenizer(model)
        self.continuation = continuation
        self.context_tokens = context_tokens
        self.requests = []
        self.summary = LabelSummary()
        self.warnings = []

    async def complete(self, request):
        await asyncio.sleep(0)
        self.requests.append(request)
        return self.tokenizer.encode(self.continuation)

    async def grade(self, items):
        await asyncio.sleep(0)
        return [line_oracle.score(response, answer) for response, answer, _ in items]

    @property
    def form(self):
        return RowSchema(resolve(self.config.reward.name), {})

    def jobs(self):
        return load_jobs(self.config, self.tokenizer, self.form)

    def run(self, jobs=None):
        labeller = LineLabeler(
            self.config, self.tokenizer, self.form, self.complete, self.grade, context_tokens=self.context_tokens
        )
        output = io.StringIO()
        asyncio.run(
            label_rows(
                self.jobs() if jobs is None else jobs,
                labeller,
                output,
                self.summary,
                max_rows_in_progress=4,
                warn=self.warnings.append,
            )
        )
        rows = [json.loads(line) for line in output.getvalue().splitlines()]
        return sorted(rows, key=lambda row: row["prompt"])


def test_labels_mark_the_first_bad_line(tmp_path, model):
    setting = Setting(tmp_path, model, [GOOD, BROKEN, "# no\n", "bad = 1\n", "a = 1\nbad = 1\n"])
    rows = setting.run()
    assert [row["line_labels"] for row in rows] == [[1, 1], [1, 0, 0, -1, -1], [0], [-1], [1, -1]]
    assert [row["first_bad_line"] for row in rows] == [0, 4, 0, 1, 2]
    assert setting.summary.num_labelled == 5 and setting.summary.num_passed == 2
    assert setting.summary.num_without_lines == 1


def test_passing_program_needs_no_completions_others_log2_of_their_lines(tmp_path, model):
    setting = Setting(tmp_path, model, [GOOD])
    assert setting.run()[0]["num_completions_graded"] == 0 and not setting.requests
    setting = Setting(tmp_path, model, ["x = 1\n" * 7 + "bad = 1\n"])
    (row,) = setting.run()
    assert row["line_labels"] == [1] * 7 + [-1] and len(setting.requests) == 3 * 3 == row["num_completions_graded"]


def test_prefixes_end_at_lines_and_completions_have_unique_seeds(tmp_path, model):
    setting = Setting(tmp_path, model, [BROKEN])
    setting.run()
    prompts = {setting.tokenizer.decode(request.input_ids) for request in setting.requests}
    assert prompts == {"go 0:a = 1\n# no\n\nbad = 2\n", "go 0:a = 1\n"}
    assert len({request.rid for request in setting.requests}) == len(setting.requests) == 6
    assert len({request.seed for request in setting.requests}) == 6
    assert all(request.stop_token_ids == (setting.tokenizer.eos_id,) for request in setting.requests)


def test_equal_rows_get_different_keys_and_request_ids(tmp_path, model):
    setting = Setting(tmp_path, model, [BROKEN])
    setting.input.write_text(setting.input.read_text() * 2)
    rows = setting.run()
    assert len(rows) == 2 and len({row["label_key"] for row in rows}) == 2
    assert len({request.rid for request in setting.requests}) == 12


def test_rows_that_cannot_be_scored_are_skipped_and_counted(tmp_path, model):
    setting = Setting(tmp_path, model, ["a = 1 ???\n", BROKEN, GOOD], continuation="???")
    rows = setting.run()
    assert [row["response"] for row in rows] == [GOOD]
    assert setting.summary.num_ungraded == 2 and len(setting.warnings) == 2
    assert any("the response itself" in text for text in setting.warnings)
    assert any("3 of 3 could not be scored" in text for text in setting.warnings)


def test_one_passing_completion_is_enough_among_unscored_ones(tmp_path, model):
    setting = Setting(tmp_path, model, ["a = 1\nbad = 1\n"])
    texts = iter(["???", "???", "c = 1\n"])

    async def complete(request):
        return setting.tokenizer.encode(next(texts))

    setting.complete = complete
    (row,) = setting.run()
    assert row["line_labels"] == [1, -1] and row["num_completions_graded"] == 1


def test_completions_fit_the_context(tmp_path, model):
    setting = Setting(tmp_path, model, [BROKEN], context_tokens=40)
    setting.run()
    assert {len(r.input_ids) + r.max_new_tokens for r in setting.requests} == {32}
    setting = Setting(tmp_path, model, [BROKEN], context_tokens=12)
    assert setting.run() == [] and "fills the model's context" in setting.warnings[0]


def test_generation_error_ends_all_rows(tmp_path, model):
    setting = Setting(tmp_path, model, [BROKEN] * 6)

    async def complete(request):
        raise RuntimeError("no server")

    setting.complete = complete
    with pytest.raises(RuntimeError, match="no server"):
        setting.run()


def test_killed_run_resumes_after_its_finished_rows_and_drops_a_torn_line(tmp_path, model):
    setting = Setting(tmp_path, model, [GOOD, BROKEN, "bad = 1\n"])
    rows = setting.run()
    lines = [json.dumps(row) + "\n" for row in rows]
    setting.output.write_text(lines[2] + lines[0] + lines[1][:20])
    done = finished_keys(setting.output, setting.jobs())
    assert done == {rows[0]["label_key"], rows[2]["label_key"]}
    assert setting.output.read_text() == lines[2] + lines[0]
    rest = setting.run([job for job in setting.jobs() if job.key not in done])
    assert rest == [rows[1]]


@pytest.mark.parametrize("change", [{"num_completions": 4}, {"max_new_tokens": 9}])
def test_output_from_other_settings_is_rejected(change, tmp_path, model):
    setting = Setting(tmp_path, model, [GOOD])
    setting.output.write_text("".join(json.dumps(row) + "\n" for row in setting.run()))
    assert len(finished_keys(setting.output, setting.jobs())) == 1
    other = Setting(tmp_path, model, [GOOD], **change)
    with pytest.raises(DataError, match="out.jsonl:1: labeled from another input, model or setting"):
        finished_keys(other.output, other.jobs())
    setting.output.write_text("{}\n")
    with pytest.raises(DataError, match="not a row of label-lines"):
        finished_keys(setting.output, setting.jobs())


def test_labeled_rows_can_be_labeled_again(tmp_path, model):
    """Fields added by labeling do not belong to a row's identity."""
    setting = Setting(tmp_path, model, [BROKEN])
    (row,) = setting.run()
    setting.input.write_text(json.dumps(row) + "\n")
    assert setting.jobs()[0].key == row["label_key"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "go", "answer": ""}, "'response' is missing"),
        ({"response": "a", "answer": ""}, "'prompt'"),
        ({"prompt": "go", "response": "\x07", "answer": ""}, "does not know"),
        (["go"], "object"),
    ],
)
def test_bad_rows_are_rejected_with_file_and_line(row, reason, tmp_path, model):
    setting = Setting(tmp_path, model, [GOOD])
    setting.input.write_text(setting.input.read_text() + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"in.jsonl:2.*{reason}"):
        setting.jobs()


def test_output_must_differ_from_input_and_dry_run_starts_nothing(tmp_path, model):
    setting = Setting(tmp_path, model, [BROKEN])
    notes = []
    summary = label_lines(setting.config, note=notes.append, dry_run=True)
    assert summary.num_rows == 1 and "1 rows with 3 lines" in notes[0] and "at most 2 prefixes of 3" in notes[0]
    assert not setting.output.exists()
    setting.config.label_lines.output_path = str(setting.input)
    with pytest.raises(UserError, match="this is the input file"):
        label_lines(setting.config, note=notes.append)


def test_line_oracle_is_a_reward():
    assert isinstance(resolve("tests.integration.line_oracle:score"), Reward)
    assert line_oracle.score("bad", "") == Score(0.0) and line_oracle.score("???", "").value is None
