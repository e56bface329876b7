"""Results of ``megatron-rl doctor`` for trainer and servers, judged without starting any."""

from types import SimpleNamespace
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.desk.doctor.engine_checks import checksum_line, random_prompts
from megatron_rl.desk.doctor.machine_checks import FAIL, OK, WARN
from megatron_rl.weights.verify import ChecksumReport


def report(**fields: Any) -> ChecksumReport:
    defaults: dict[str, Any] = dict(reference="trainer", num_compared=40, differing={}, uncompared=(), note="")
    return ChecksumReport(**{**defaults, **fields})


def test_checksum_line_reports_differing_parameters() -> None:
    equal = checksum_line(report())
    assert equal.state == OK and equal.found == "40 parameters compared with the trainer's: equal."
    wrong = checksum_line(report(differing={"u": tuple(f"layer.{i}" for i in range(9))}))
    assert wrong.state == FAIL and "9 differ: layer.0" in wrong.found and "and more" in wrong.found and wrong.remedy
    assert checksum_line(report(num_compared=0, reference="nothing", note="one server")).state == WARN
    assert "between servers" in checksum_line(report(reference="servers")).found


def test_random_prompts_have_only_ordinary_tokens() -> None:
    tokenizer: Any = SimpleNamespace(special_ids={0, 1}, vocab_size=20, vision=SimpleNamespace(banned_token_ids=(7, 8)))
    prompts = random_prompts(Config(), tokenizer)
    tokens = {token for prompt in prompts for token in prompt.token_ids}
    assert len(prompts) == Config().rollout.num_parity_prompts and tokens == set(range(20)) - {0, 1, 7, 8}
    assert prompts == random_prompts(Config(), tokenizer)
