"""Laws of ``doctor --template``: each finding names what the template does, for six styles and for templates that fail."""

import argparse

import pytest

from megatron_rl.commands import doctor
from megatron_rl.desk.doctor.machine_checks import FAIL, OK, WARN
from megatron_rl.desk.doctor.template_check import print_template, template_lines
from megatron_rl.errors import UserError
from tests.tiny_models import make_tokenizer as make_plain_tokenizer
from tests.unit.agents.chat_styles import QWEN25, STYLES, make_tokenizer


def found(tokenizer):
    return {line.name: line for line in template_lines(tokenizer)}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_rows_go_on_in_every_style(style):
    lines = found(style.tokenizer)
    assert {name for name, line in lines.items() if line.state == FAIL} == set()
    assert {lines[name].state for name in ("after a text", "after a call", "after thoughts", "control tokens")} == {OK}


def test_findings_differ_by_style():
    lines = {name: found(STYLES[name].tokenizer) for name in ("qwen2.5", "qwen3", "llama3.1", "glm4", "harmony")}
    assert lines["qwen3"]["thoughts"].found == "kept in a tool cycle, dropped after a new user message"
    assert (lines["qwen2.5"]["rendered again"].state, lines["qwen3"]["rendered again"].state) == (OK, WARN)
    assert (lines["qwen2.5"]["text beside a call"].state, lines["llama3.1"]["text beside a call"].state) == (OK, WARN)
    for name, text in (("glm4", "<|observation|>"), ("harmony", "<|call|>")):
        stop = STYLES[name].tokenizer.encode(text)[0]
        assert lines[name]["stop token"].remedy == f"set rollout.stop_token_ids=[{stop}]"


def test_template_that_hides_answers_or_refuses_a_role_is_named():
    hidden = found(make_tokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "<|im_end|>"))
    assert hidden["after a text"].state == FAIL
    refused = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    line = found(make_tokenizer(refused + QWEN25, "<|im_end|>"))["system message"]
    assert line.state == WARN and "no system role" in line.found


def test_folder_without_a_chat_template_and_other_arguments_are_refused(tmp_path):
    make_plain_tokenizer(tmp_path)
    with pytest.raises(UserError, match="has no chat template"):
        print_template(tmp_path)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    with pytest.raises(UserError, match="takes a model folder"):
        doctor.run(parser.parse_args(["--template", str(tmp_path), "--model", "x"]))
