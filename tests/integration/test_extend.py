"""The model family of docs/extend.md is complete: logits and bits are those of transformers."""

import re
import sys
from pathlib import Path

import pytest
import torch

import megatron_rl.families as package
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.families.family import families
from megatron_rl.models import policy
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import export_weights, load_weights
from megatron_rl.parallel import topology
from tests.integration.models_worker import pack
from tests.integration.test_families import assert_same_bits, load_hf, make_sequences, tensors_of
from tests.tiny_families import SHAPES, make_family_model

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()


@pytest.fixture
def mistral(tmp_path, monkeypatch):
    """One more file in the package, for the time of a test; a tiny model of that family."""
    (source,) = re.findall(r"^```python megatron_rl/families/mistral.py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "mistral.py").write_text(source)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "families")])
    families.cache_clear()
    monkeypatch.setitem(SHAPES, "mistral", dict(model_type="mistral", head_dim=16, sliding_window=None))
    yield make_family_model(tmp_path / "model", "mistral")
    families.cache_clear()
    sys.modules.pop("megatron_rl.families.mistral", None)


def test_the_documented_family_computes_what_transformers_computes(mistral):
    parallel = ParallelConfig()
    topology.initialize(parallel, seed=1)
    try:
        config = load_hf_config(mistral)
        (chunk,) = policy.build_policy(config, parallel, dtype=torch.float32, seed=None)
        load_weights([chunk], config, mistral)
        sequences, model = make_sequences(config.vocab_size), load_hf(mistral)
        with torch.no_grad():
            logits = policy.forward(chunk, pack(sequences))[0] @ policy.head_weight(chunk)[: config.vocab_size].T
            expected = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert_same_bits(dict(export_weights([chunk], config)), tensors_of(mistral))
    finally:
        topology.destroy()
