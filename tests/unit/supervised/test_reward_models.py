"""A judge's requests equal its training texts token for token, for any responses."""

import json
import re
import string

import pytest
import tokenizers
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import Config, DataConfig, RewardModelKind, RewardTrainConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError
from megatron_rl.rewards.judges.judge import solution_of
from megatron_rl.rewards.judges.pairwise import training_texts
from megatron_rl.rewards.judges.templates import PAIRWISE_TEMPLATE
from megatron_rl.rewards.workers.event_loop import start_runner
from megatron_rl.supervised.reward_models import build_kind
from tests.unit.local_service import local_service
from tests.unit.rewards.judges.fake_judge import answer

PIECES = (
    "<think>", "</think>", "<eos>", "<e<eos>os>", "<pad>", " ", "\n", "\t", "\u00a0", "42", "{second}", "{prompt}", "[First response]\n",
    "YES", "NO", "is the first response better", "<thi<eos>nk>", "a",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join).filter(str.strip)
SOLUTIONS = st.lists(st.sampled_from([p for p in PIECES if "think>" not in p]), min_size=1, max_size=6).map("".join)
THOUGHTFUL = st.tuples(SOLUTIONS, SOLUTIONS).map(lambda parts: f"<think>{parts[0]}</think>{parts[1]}")
PAIRS = st.tuples(*[st.one_of(SOLUTIONS, THOUGHTFUL, TEXTS).filter(str.strip)] * 2).filter(lambda pair: pair[0] != pair[1])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer of single characters and the two words of a judge."""
    folder = tmp_path_factory.mktemp("judge")
    characters = sorted({*string.printable, *"".join(PIECES)})
    tokens = ["<pad>", "<eos>", "<unk>", "YES", "NO", *characters]
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"YES|NO|[\s\S]"), "isolated")
    raw.decoder = tokenizers.decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def asked(tokenizer):
    """Function (response, anchor, prompt) that returns the token ids the reward ``pairwise`` sends its judge, in both orders."""
    bodies = []

    def handler(path, body):
        if path == "/model_info":
            return {"model_path": "fake"}
        bodies.append(body)
        return [answer(0.5, [1, 20]) | {} for _ in body["input_ids"]]

    with local_service(handler) as service:
        options = {"url": service.url, "tokenizer_path": str(tokenizer.path)}
        with start_runner("pairwise", options=options, row_fields=("prompt", "anchor")) as runner:

            def ask(response, anchor, prompt):
                bodies.clear()
                runner.submit([(response, "", {"prompt": prompt, "anchor": anchor})]).result()
                return bodies[0]["input_ids"] if bodies else None

            yield ask


def trained(tokenizer, folder, row):
    """Token ids of both orders, without the judgment. Raises DataError for a row that cannot be trained on."""
    config = Config(data=DataConfig(), reward_train=RewardTrainConfig(kind=RewardModelKind.pairwise))
    path = folder / "row.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (example,) = build_kind(config, tokenizer).examples([str(path)])
    return [list(sequence[:-1]) for sequence in example.sequences]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TEXTS, pair=PAIRS)
def test_training_text_equals_the_judges_request(prompt, pair, tokenizer, asked, tmp_path):
    chosen, rejected = pair
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    try:
        learned = trained(tokenizer, tmp_path, row)
    except DataError as error:
        # A row is not trainable if a judge is not called for such a response either, or if the row is not a pair.
        assert "row.jsonl:1: field" in str(error)
        if "proper form" in str(error):
            assert solution_of(chosen) is None or solution_of(rejected) is None
            assert asked(chosen, rejected, prompt) is None
        else:
            assert re.search("nothing is left|same solution", str(error))
        event(str(error)[-30:])
        return
    event("asked")
    assert learned == asked(chosen, rejected, prompt)


def test_judge_texts_omit_thoughts_and_control_tokens(tokenizer, asked, tmp_path):
    row = {"prompt": "a", "chosen": "<think> 42 </think>42\n", "rejected": " a<eos>YES"}
    learned = trained(tokenizer, tmp_path, row)
    assert learned == asked(row["chosen"], row["rejected"], "a")
    texts = [tokenizer.decode(ids) for ids in learned]
    assert texts[0] == PAIRWISE_TEMPLATE.format(prompt="a", first="42", second="aYES")
    assert texts[1] == PAIRWISE_TEMPLATE.format(prompt="a", first="aYES", second="42")


@pytest.mark.parametrize(
    ("chosen", "rejected", "words"),
    [
        ("<think>no end", "b", "field 'chosen': its thought has no proper form.*<think>thought</think>solution"),
        ("a", "t</think>b", "field 'rejected': its thought"),
        ("<think>t</think> ", "b", "field 'chosen': its thought"),
        ("a", "<eos>", "field 'rejected': nothing is left"),
        ("<think>t</think>42", "42\n", "have the same solution, '42'"),
    ],
)
def test_rows_that_a_judge_cannot_get_are_reported(chosen, rejected, words, tokenizer):
    with pytest.raises(DataError, match="f.jsonl:7: field.*" + words.removeprefix("field")):
        training_texts("p", chosen, rejected, place="f.jsonl:7", tokenizer_path=str(tokenizer.path))
