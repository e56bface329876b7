"""Laws of reward-model training: megatron_rl/data/preferences.py, supervised/reward_models.py, rewards/judges/templates.py."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl import algorithms
from megatron_rl.config.schema import Config, DataConfig, RewardModelKind, RewardTrainConfig
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.preferences import Preference, check_reward_files, load_labelled_programs, load_preferences
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError, UserError
from megatron_rl.rewards.judges.templates import (
    JUDGE_FIELDS,
    JUDGE_TEMPLATE,
    PAIRWISE_FIELDS,
    PAIRWISE_TEMPLATE,
    TemplateError,
    check_template,
    render_judge,
    render_pairwise,
    word_token,
)
from megatron_rl.supervised.reward_models import build_kind, on_last_tokens, packed
from megatron_rl.supervised.reward_training import training_config
from megatron_rl.training import losses
from megatron_rl.training.engine import UpdateResult
from tests.word_models import write_tokenizer

ROWS = [
    {"prompt": "1+2=", "chosen": "3", "rejected": "4"},
    {"prompt": "2+2=", "chosen": "4", "rejected": "3 3"},
    {"prompt": "9-1=", "chosen": "8", "rejected": "1"},
]
PROGRAMS = [
    {"prompt": "go\n", "response": "a = 1\n# x\nb = c\nd = b", "line_labels": [1, 0, -1, -1]},
    {"prompt": "go\n", "response": "a = 1\n", "line_labels": [1]},
    {"prompt": "go\n", "response": "# x\n", "line_labels": [0]},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, extra="go")
    return Tokenizer(folder)


def config_of(kind, path, rows, **settings):
    files = write(path / "rows.jsonl", rows)
    return Config(reward_train=RewardTrainConfig(kind=RewardModelKind(kind), train_files=files, **settings))


class ToyGroup:
    """Fake trainer ranks: a model of a few weights, sequences in micro-batches of one."""

    def __init__(self, vocab_size, lr=0.0):
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(vocab_size, 6, generator=generator, dtype=torch.float64).requires_grad_()
        self.head = torch.randn(6, vocab_size, generator=generator, dtype=torch.float64).requires_grad_()
        self.lr = lr

    def after(self, tokens):
        """Value after each token of one sequence."""
        hidden = torch.tanh(self.embedding[tokens].cumsum(0) / 4)
        return hidden @ self.head[:, 0]

    def logprobs_of(self, tokens):
        hidden = torch.tanh(self.embedding[tokens].cumsum(0) / 4)
        logits = torch.log_softmax(hidden[:-1] @ self.head, dim=-1)
        return torch.cat([torch.zeros(1, dtype=torch.float64), logits.gather(1, tokens[1:, None])[:, 0]])

    def outputs(self, batch):
        if self.is_policy:
            return {"logprobs": torch.cat([self.logprobs_of(tokens) for tokens in self.split(batch)])}
        after = [self.after(tokens) for tokens in self.split(batch)]
        before = [torch.cat([torch.zeros(1, dtype=torch.float64), values[:-1]]) for values in after]
        return {"values": torch.cat(before), "final_values": torch.stack([values[-1] for values in after])}

    def split(self, batch):
        return batch.tokens.split(batch.lengths.tolist())

    is_policy = False

    @torch.no_grad()
    def values(self, batch):
        outputs = self.outputs(batch)
        return outputs["values"].float(), outputs["final_values"].float()

    @torch.no_grad()
    def logprobs(self, batch, *, temperature):
        self.is_policy = True
        return torch.where(batch.fields["mask"], self.outputs(batch)["logprobs"], 0.0).float()

    def update(self, engine, batch, *, objective, denominators):
        self.is_policy = engine == "policy"
        config = training_config(Config())
        loss = losses.build(objective, config.algorithm, denominators)
        self.embedding.grad = self.head.grad = None
        totals = {}
        for index in reversed(range(batch.num_sequences)):
            part = batch.select([index])
            part = PackedBatch(part.tokens, part.cu_seqlens, {n: _widen(v) for n, v in part.fields.items()})
            value, metrics = loss(self.outputs(part), part)
            value.backward()
            for name, pair in metrics.items():
                totals[name] = tuple(float(old) + float(new) for old, new in zip(totals.get(name, (0, 0)), pair))
        with torch.no_grad():
            for weight in (self.embedding, self.head):
                weight -= self.lr * weight.grad
        return UpdateResult(1.0, self.lr, totals, False)

    def gradients(self):
        return [self.embedding.grad.clone(), self.head.grad.clone()]

    def brute_force(self, loss):
        self.embedding.grad = self.head.grad = None
        loss.backward()
        return self.gradients()


def _widen(values):
    return values.double() if values.is_floating_point() else values


# --------------------------------------------------------------------------------------------------------------- rows


def test_preferences_keep_their_prompt_source_and_texts(tmp_path):
    (first, *_) = load_preferences(write(tmp_path / "p.jsonl", ROWS), DataConfig())
    assert isinstance(first, Preference) and (first.chosen, first.rejected) == ("3", "4")
    assert first.content.text == "1+2=" and first.content.place.endswith("p.jsonl:1")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "'rejected': expected non-empty text"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "'chosen': expected non-empty text"),
        ({"prompt": "a", "chosen": " \n", "rejected": "c"}, "'chosen': expected non-empty text"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "'chosen': expected non-empty text, got list"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same text"),
        ({"chosen": "b", "rejected": "c"}, "'prompt'"),
        (["prompt"], "object"),
    ],
)
def test_invalid_preference_is_reported_with_source_and_reason(row, reason, tmp_path):
    with pytest.raises(DataError, match="p.jsonl:2.*" + reason):
        load_preferences(write(tmp_path / "p.jsonl", [ROWS[0], row]), DataConfig())


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([1, 0], "2 labels for a program of 1 lines"),
        ([2], "expected a list of 1, -1 and 0"),
        ([True], "expected a list of 1, -1 and 0"),
        ("+", "expected a list of 1, -1 and 0"),
        (None, "expected a list of 1, -1 and 0"),
    ],
)
def test_invalid_labels_are_reported_with_source_and_reason(labels, reason, tmp_path):
    row = {"prompt": "go", "response": "a = 1\n", "line_labels": labels}
    with pytest.raises(DataError, match="p.jsonl:1.*" + reason):
        load_labelled_programs(write(tmp_path / "p.jsonl", [row]), DataConfig())


def test_empty_files_and_output_over_the_base_model_are_rejected(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    config = Config(reward_train=RewardTrainConfig(train_files=[str(tmp_path / "rows.jsonl")], output_path="out"))
    with pytest.raises(DataError, match="no rows"):
        check_reward_files(config)
    same = replace(config, policy=replace(config.policy, path=str(tmp_path / "m")))
    same = replace(same, reward_train=replace(same.reward_train, output_path=f"{tmp_path}/x/../m"))
    with pytest.raises(UserError, match="overwritten"):
        check_reward_files(same)


# ---------------------------------------------------------------------------------------------------------- templates


def test_template_fields_in_a_text_are_not_replaced():
    text = render_pairwise("p {second}", "f {first} {prompt}", "{0} {} s")
    assert "p {second}" in text and "f {first} {prompt}" in text and "{0} {} s" in text
    assert render_judge("p", "{reference}", "truth").count("truth") == 1


def test_swapping_the_responses_swaps_nothing_else():
    one, two = render_pairwise("p", "AAA", "BBB"), render_pairwise("p", "BBB", "AAA")
    assert one != two and one.replace("AAA", "x").replace("BBB", "AAA").replace("x", "BBB") == two


def test_templates_must_contain_their_fields():
    check_template(PAIRWISE_TEMPLATE, PAIRWISE_FIELDS)
    check_template(JUDGE_TEMPLATE, JUDGE_FIELDS)
    with pytest.raises(TemplateError, match="lacks {second}"):
        check_template("{prompt} {first}", PAIRWISE_FIELDS)


def test_judgment_word_must_be_one_token(tokenizer):
    assert word_token(tokenizer.encode, "YES") != word_token(tokenizer.encode, "NO")
    with pytest.raises(TemplateError, match=r"'YES NO' is 3 tokens \["):
        word_token(tokenizer.encode, "YES NO")


# ----------------------------------------------------------------------------------------------------------- training


def test_two_passes_give_the_gradient_of_the_bradley_terry_loss(tokenizer, tmp_path):
    config = config_of("bradley_terry", tmp_path, ROWS)
    kind, group = build_kind(config, tokenizer), ToyGroup(tokenizer.vocab_size)
    examples = kind.examples(config.reward_train.train_files)
    kind.update(group, examples)
    found = group.gradients()
    scores = [[group.after(torch.tensor(ids))[-1] for ids in example.sequences] for example in examples]
    expected = group.brute_force(-sum(torch.nn.functional.logsigmoid(c - r) for c, r in scores) / len(scores))
    for one, two in zip(found, expected):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)


def test_a_response_is_scored_after_its_end_of_text_token(tokenizer, tmp_path):
    config = config_of("bradley_terry", tmp_path, ROWS)
    (example, *_) = build_kind(config, tokenizer).examples(config.reward_train.train_files)
    assert [tokenizer.decode(ids[:-1]) for ids in example.sequences] == ["1+2=3", "1+2=4"]
    assert {ids[-1] for ids in example.sequences} == {tokenizer.eos_id}


def test_metrics_of_scores_are_loss_accuracy_and_margin(tokenizer, tmp_path):
    kind = build_kind(config_of("bradley_terry", tmp_path, ROWS), tokenizer)
    metrics = kind.metrics({"chosen": np.array([1.0, 0.0, 0.5]), "rejected": np.array([0.0, 1.0, 0.5])})
    assert metrics["accuracy"] == pytest.approx(0.5) and metrics["margin"] == pytest.approx(0.0)
    expected = np.mean([np.log1p(np.exp(-1)), np.log1p(np.exp(1)), np.log(2)])
    assert metrics["loss"] == pytest.approx(expected)


def test_judge_sees_both_orders_and_learns_only_the_judgment_token(tokenizer, tmp_path):
    config = config_of("pairwise", tmp_path, ROWS)
    kind, group = build_kind(config, tokenizer), ToyGroup(tokenizer.vocab_size)
    examples = kind.examples(config.reward_train.train_files)
    yes, no = (word_token(tokenizer.encode, word) for word in ("YES", "NO"))
    first, second = examples[0].sequences
    assert (first[-1], second[-1]) == (yes, no)
    assert tokenizer.decode(first[:-1]) == render_pairwise("1+2=", "3", "4")
    assert tokenizer.decode(second[:-1]) == render_pairwise("1+2=", "4", "3")
    _result, metrics = kind.update(group, examples)
    found = group.gradients()
    sequences = [torch.tensor(ids) for example in examples for ids in example.sequences]
    loss = -sum(group.logprobs_of(ids)[-1] for ids in sequences) / len(sequences)
    for one, two in zip(found, group.brute_force(loss)):
        torch.testing.assert_close(one, two)
    assert metrics["loss"] == pytest.approx(float(loss.detach()))


def test_judge_that_cannot_see_the_order_learns_no_preference(tokenizer, tmp_path):
    """Both orders are trained equally: the toy model adds up its tokens, so a gain in one order is a loss in the other."""
    config = config_of("pairwise", tmp_path, ROWS)
    kind, group = build_kind(config, tokenizer), ToyGroup(tokenizer.vocab_size, lr=0.5)
    examples = kind.examples(config.reward_train.train_files)
    for _ in range(100):
        kind.update(group, examples)
    predictions = kind.predict(group, examples)
    metrics = kind.metrics(predictions)
    np.testing.assert_allclose(predictions["chosen_first"], predictions["chosen_second"], atol=1e-6)
    np.testing.assert_allclose(predictions["chosen_first"], 0.5, atol=0.05)
    assert metrics["margin"] == pytest.approx(0.0, abs=1e-6) and metrics["judgement_mass"] > 0.9


def test_judge_metrics_distinguish_skill_from_position_bias(tokenizer, tmp_path):
    kind = build_kind(config_of("pairwise", tmp_path, ROWS), tokenizer)
    ones = np.ones(1)
    skilled = kind.metrics({"chosen_first": ones * 0.9, "chosen_second": ones * 0.1, "mass": ones})
    biased = kind.metrics({"chosen_first": ones * 0.9, "chosen_second": ones * 0.8, "mass": ones})
    assert skilled["accuracy"] == skilled["swap_consistency"] == 1.0 and skilled["margin"] == pytest.approx(0.8)
    assert skilled["position_gap"] == pytest.approx(0.0) and skilled["loss"] == pytest.approx(-np.log(0.9))
    assert biased["swap_consistency"] == 0.0 and biased["accuracy_chosen_second"] == 0.0
    assert biased["position_gap"] == pytest.approx(0.7)


def test_words_of_several_tokens_and_equal_words_are_rejected(tokenizer, tmp_path):
    with pytest.raises(UserError, match="expected one token"):
        build_kind(config_of("pairwise", tmp_path, ROWS, yes_word="YES YES"), tokenizer)
    with pytest.raises(UserError, match="two words"):
        build_kind(config_of("pairwise", tmp_path, ROWS, yes_word="NO"), tokenizer)


def test_line_values_are_read_after_the_token_that_ends_the_line(tokenizer, tmp_path):
    config = config_of("process", tmp_path, PROGRAMS)
    kind, group = build_kind(config, tokenizer), ToyGroup(tokenizer.vocab_size)
    examples = kind.examples(config.reward_train.train_files)
    assert len(examples) == 2  # the third has neutral lines alone
    (sequence,) = examples[0].sequences
    texts = [tokenizer.decode([token]) for token in sequence]
    ends = [position - 1 for position in examples[0].labels]
    assert [texts[end] for end in ends] == ["\n", "\n", "b"] and list(examples[0].labels.values()) == [1, -1, -1]
    assert ends[-1] == len(sequence) - 2
    _, metrics = kind.update(group, examples)
    found = group.gradients()
    errors = [
        (group.after(torch.tensor(example.sequences[0]))[position - 1] - label) ** 2
        for example in examples
        for position, label in example.labels.items()
    ]
    loss = sum(errors) / len(errors)
    assert metrics["loss"] == pytest.approx(float(loss.detach()))
    for one, two in zip(found, group.brute_force(0.5 * loss)):
        torch.testing.assert_close(one, two)


def test_metrics_of_line_values_compare_signs(tokenizer, tmp_path):
    kind = build_kind(config_of("process", tmp_path, PROGRAMS), tokenizer)
    metrics = kind.metrics({"values": np.array([0.5, 0.1, -2.0]), "labels": np.array([1.0, -1.0, -1.0])})
    assert metrics["accuracy"] == pytest.approx(2 / 3) and metrics["good_share"] == pytest.approx(1 / 3)
    assert metrics["margin"] == pytest.approx(0.5 + 0.95)


# ---------------------------------------------------------------------------------------------------------- objective


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[3, 0], [2, 1]], [[0], [1], [2], [3]]])
def test_score_objective_adds_up_for_any_split_of_pairs(split):
    lengths = torch.tensor([4, 2, 1, 5])
    scores = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    tokens = torch.zeros(12, dtype=torch.int64)
    batch = PackedBatch(tokens, cu_seqlens_of(lengths))
    chosen, rejected = algorithms.bradley_terry_coefficients(scores.detach()[0::2], scores.detach()[1::2])
    coefs = torch.stack([chosen, rejected], dim=1).flatten() / 2
    batch = batch.with_fields(score_coefs=torch.zeros(12, dtype=torch.float64))
    batch.fields["score_coefs"][batch.cu_seqlens[1:] - 1] = coefs
    objective = losses.build("score", Config().algorithm, {})
    for indices in split:
        loss, metrics = objective({"final_values": scores[indices]}, batch.select(indices))
        loss.backward()
        assert not metrics
    found, scores.grad = scores.grad, None
    (-torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()).backward()
    torch.testing.assert_close(found, scores.grad)


def test_per_sequence_values_are_on_their_last_tokens():
    batch = packed([(5, 6), (7,)])
    assert on_last_tokens(batch, torch.tensor([2.0, 3.0])).tolist() == [0.0, 2.0, 3.0]
