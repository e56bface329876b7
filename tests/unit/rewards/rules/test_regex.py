"""The regex reward."""


from megatron_rl.rewards.rules import regex as instruction


def test_regex_reward_uses_the_ground_truth_as_pattern() -> None:
    assert instruction.score("say Hello twice", "hel+o").value == 0.0
    assert instruction.score("say Hello twice", "hel+o", ignore_case=True).value == 1.0
    assert instruction.score("hello there", "hel+o", match="fullmatch").value == 0.0
    assert instruction.score("hello", "hel+o", match="fullmatch").value == 1.0
    assert instruction.score("hello", "(").value is None
