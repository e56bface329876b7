"""DPO's update: its two passes have the gradient of the loss, and its reference is the policy before the first update."""

import pytest
import torch

from megatron_rl.config.schema import Config, DpoConfig, PreferenceLoss
from megatron_rl.supervised.preference_optimization import PreferencePairs
from tests.unit.data.test_preferences import ROWS, ToyGroup, tokenizer, write  # noqa: F401


@pytest.mark.parametrize("loss", PreferenceLoss)
@pytest.mark.parametrize("length_normalized", [False, True])
def test_two_passes_give_the_gradient_of_the_loss_to_the_first_reference(loss, length_normalized, tokenizer, tmp_path):  # noqa: F811
    settings = DpoConfig(loss=loss, beta=0.3, label_smoothing=0.1, length_normalized=length_normalized)
    pairs, group = PreferencePairs(Config(dpo=settings), tokenizer), ToyGroup(tokenizer.vocab_size)
    examples = pairs.examples(write(tmp_path / "rows.jsonl", ROWS))
    pairs.keep_reference(group, examples)

    def response_logprobs():
        for example in examples:
            yield [group.logprobs_of(torch.tensor(ids))[example.num_prompt_tokens :] for ids in example.sequences]

    references = [[side.sum().item() for side in sides] for sides in response_logprobs()]
    with torch.no_grad():  # as updates would have moved it
        group.head += 0.3 * torch.randn(group.head.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result, metrics = pairs.update(group, examples)
    found, total = group.gradients(), torch.zeros((), dtype=torch.float64)
    for sides, reference in zip(response_logprobs(), references, strict=True):
        chosen, rejected = (
            (side.sum() - first) / (len(side) if length_normalized else 1) for side, first in zip(sides, reference, strict=True)
        )
        margin, sign = chosen - rejected, torch.tensor([1.0, -1.0], dtype=torch.float64)
        f = (
            -torch.nn.functional.logsigmoid(0.3 * sign * margin)
            if loss is PreferenceLoss.sigmoid
            else (sign * margin - 1 / 0.6) ** 2
        )
        total = total + (torch.tensor([0.9, 0.1], dtype=torch.float64) * f).sum() / len(examples)
    for one, two in zip(found, group.brute_force(total), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-4) and not result.skipped
