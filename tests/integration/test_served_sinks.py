"""gpt-oss on a real SGLang server: sinks, windows and biases of experts, in windows of T-PPO, with routes, after new weights.

The tests are those of ``test_routed_experts.py``, with a model whose attention windows are shorter than the windows that generate.
"""

from pathlib import Path

import pytest

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
