"""Laws of tools/quickstart_figures.py: pages show the published run, and a log becomes a transcript."""

import json
import subprocess

import pytest

from tools import quickstart_figures as figures

LOG = """
== 2/4 supervised warm start from random weights
sft step 1/500  loss 3.8202  grad norm 3.16
sft step 371/500  loss 0.0892  grad norm 0.84
prompts to train on: 20,000 without type
before training: accuracy 39.6% ± 2.2% on held-out prompts
step 1/110  reward 0.335  accuracy 33.5%  tokens/s 1426  2.9 s (generate 1.2, score 0.4)  3 min to go
step 2/110  reward 0.335  accuracy 33.5%  tokens/s 1426  2.9 s (generate 1.2, score 0.4)  3 min to go
result
accuracy on held-out prompts            39.6% ± 2.2% before, 72.2% ± 2.0% after (+32.6 points)
policy                                  outputs/arithmetic/tppo/policy

quickstart: done in 195 s
"""


def test_pages_show_the_published_run():
    """Stale? python tools/quickstart_figures.py"""
    for page, text in figures.pages(figures.load()).items():
        assert page.read_text() == text, f"{page.name} does not show the figures of docs/quickstart.json"


def test_published_run_names_processor_date_and_commit():
    run = figures.load()["published"]
    assert {"processor", "vectors", "date", "commit", "versions"} <= run.keys()
    assert f"{run['before']}% before, {run['after']}% after" in "\n".join(run["transcript"])


def test_transcript_has_the_last_line_of_each_kind_and_chosen_steps():
    found = figures.read_log(LOG)
    assert (found["before"], found["after"], found["seconds"]) == ("39.6", "72.2", "195")
    assert found["transcript"] == [
        "== 2/4 supervised warm start from random weights",
        "sft step 371/500  loss 0.0892  grad norm 0.84",
        "before training: accuracy 39.6% on held-out prompts",
        "step 1/110  reward 0.335  accuracy 33.5%  tokens/s 1426  2.9 s (generate 1.2, ...)",
        "accuracy on held-out prompts            39.6% before, 72.2% after (+32.6 points)",
        "quickstart: done in 195 s",
    ]


def test_a_run_is_shown_and_read_and_a_failed_one_is_not_published(capfd):
    log = figures.quickstart(["printf", LOG.replace("%", "%%")])
    assert log == LOG == capfd.readouterr().out
    with pytest.raises(subprocess.CalledProcessError):
        figures.quickstart(["false"])


def test_the_last_run_of_another_processor_stays_in_the_table():
    run = {"processor": "A", "vectors": "AVX2", "date": "d", "before": "1", "after": "2", "seconds": "3", "transcript": []}
    new = {**run, "vectors": "AVX-512"}
    found = figures.published({"published": run, "elsewhere": [{**new, "date": "old"}]}, new)
    assert found["published"] == new
    assert found["elsewhere"] == [{key: value for key, value in run.items() if key != "transcript"}]


def test_machine_names_its_vector_instructions():
    found = figures.machine()
    assert found["vectors"] in (*figures.VECTORS.values(), "SSE") and json.dumps(found)
