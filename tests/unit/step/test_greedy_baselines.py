"""The greedy response of a prompt: a baseline that trains nothing (ReMax, arXiv 2310.10505)."""

from megatron_rl.config.schema import AlgorithmConfig, Overlong
from megatron_rl.data.trajectory import Score
from megatron_rl.step.packing import window_batch
from megatron_rl.step.window_advantages import ModelOutputs, greedy_rewards, window_advantages
from tests.unit.step.test_window_advantages import RAW, WINDOW, trajectory


def test_a_greedy_response_is_the_baseline_of_its_group_and_one_without_a_score_leaves_the_group_out():
    """ReMax, arXiv 2310.10505."""
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "advantage": "remax"})
    group = [trajectory([2], stopped=True, score=Score(score), id=i) for i, score in enumerate((1.0, 0.0, 1.0))]
    for t, group_id in zip(group, (0, 1, 2)):
        t.group_id = group_id
    greedy = [trajectory([3], stopped=True, score=Score(score), id=9) for score in (1.0, 0.25, None)]
    for t, group_id in zip(greedy, (0, 1, 2)):
        t.group_id, t.greedy = group_id, True
    batch = window_batch(group, 0)
    found = window_advantages(
        group,
        batch,
        ModelOutputs(greedy_rewards=greedy_rewards([*group, *greedy], algorithm)),
        step=0,
        window_tokens=WINDOW,
        algorithm=algorithm,
    )
    assert found.mask.tolist() == ([False] * 3 + [True] * 2) * 2 + [False] * 5
    assert found.raw.tolist()[:4] == [0.0, 0.0, -0.25, -0.25]


def test_a_greedy_response_is_shaped_like_the_others():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "overlong": Overlong.soft, "overlong_buffer_tokens": 4})
    cut = trajectory([8], stopped=False, score=Score(1.0), budget=8)
    cut.greedy = True
    assert greedy_rewards([cut], algorithm) == {0: 0.0}
