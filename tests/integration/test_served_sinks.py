"""gpt-oss on a real SGLang server: sinks, windows and biases of experts, in windows of T-PPO, with routes, after new weights.

The tests are those of ``test_routed_experts.py``, with a model whose attention windows are shorter than the windows that generate.
``doctor`` comes last, for it sends the server weights.
"""

import re
from pathlib import Path

import pytest

from megatron_rl.cli import main
from tests.integration.test_routed_experts import (  # noqa: F401  fixtures and tests, which pytest finds here
    engine,
    runs,
    test_a_run_replays_the_routes_of_every_token_it_trains,
    test_replaying_the_servers_routes_gives_its_logprobs_and_shuffled_routes_do_not,
    test_server_and_trainer_choose_the_same_experts,
    test_the_record_of_a_window_covers_earlier_windows,
    url,
    windows,
)
from tests.tiny_families import make_family_model
from tests.tiny_models import make_tokenizer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return make_family_model(folder, "gpt_oss", eos_token_id=None, num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=2)


def test_doctor_finds_equal_weights_and_logprobs(
    model_path: Path,
    url: str,  # noqa: F811  the fixture above
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stacked experts and their biases included."""
    monkeypatch.setenv("COLUMNS", "160")
    status = main(["doctor", "--model", str(model_path), "policy.dtype=float32", f"rollout.urls=[{url}]", "batch.max_response_tokens=32"])
    output = capfd.readouterr().out
    assert status == 0, output
    for line in ("weight checksums +[0-9]+ parameters compared with the trainer's: equal", "log-prob parity +[0-9]+ sampled tokens"):
        assert re.search(f"^OK +{line}", output, re.MULTILINE), output
