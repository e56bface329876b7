"""Engines are built with the precision of their section."""

from pathlib import Path

import pytest

from megatron_rl.config.schema import Dtype
from megatron_rl.training import trainer_ranks
from tests.unit.config.recipes import DENSE, load


@pytest.mark.parametrize("own", [None, *Dtype])
def test_critic_precision_defaults_to_the_policy(own: Dtype | None, tmp_path: Path) -> None:
    config = load(tmp_path, DENSE)
    config.policy.dtype = Dtype.bfloat16
    assert config.critic.dtype is None
    config.critic.dtype = own
    built = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_ranks, "Engine", lambda *args, **kwargs: built.append(kwargs["dtype"]))
        trainer_ranks.build_engine(config, None, "critic", config.critic, None)
        trainer_ranks.build_engine(config, None, "policy", config.policy, None)
    assert built == [own or Dtype.bfloat16, Dtype.bfloat16]
