"""A model family is one file: all code reads its content, and nothing else lists the families."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_rl.families as package
from megatron_rl.config.checks import check_config
from megatron_rl.errors import ConfigError
from megatron_rl.families.family import families
from megatron_rl.families.model_facts import as_config, has_experts, has_vision, num_experts, read_model_json
from megatron_rl.families.sglang_limits import engine_problems, joined_name
from tests.unit.config.recipes import SPARSE, load

NEW_FAMILY = '''
"""A family that exists only in this test."""

from megatron_rl.families.layer_rules import EXPERTS, moe_kwargs
from megatron_rl.families.family import Experts, Family, SGLangSupport, VisionSpec
from megatron_rl.families.layer_rules import ATTENTION, NORMS


def _problems(model, where):
    if model.get("unheard_of"):
        yield f"{where}: unheard_of=true: SGLang has not heard of it"


FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *EXPERTS),
    transformer_kwargs=moe_kwargs,
    forbidden={},
    experts=Experts(in_layer=lambda config, index: True, number=("num_helpers",), has_bias=True),
    vision=VisionSpec(encoder_prefix="eye.", text_prefix="mind.", title="Brandnew-VL", interleaves_positions=True),
    num_mtp_layers="num_next_layers",
    served=SGLangSupport(joined={"qkv_alike": ("everything_proj", 3)}, problems=_problems),
)
'''
MODEL = {**SPARSE, "model_type": "brandnew", "num_helpers": 8}
del MODEL["num_experts"]


@pytest.fixture
def brandnew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a file to the package for the duration of a test."""
    folder = tmp_path / "more_families"
    folder.mkdir()
    (folder / "brandnew.py").write_text(NEW_FAMILY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    families.cache_clear()
    yield
    families.cache_clear()
    sys.modules.pop("megatron_rl.families.brandnew", None)


def test_every_file_with_a_family_is_a_model_type(brandnew: None) -> None:
    assert "brandnew" in families() and "llama" in families()


def test_configuration_checks_accept_a_new_family(brandnew: None, tmp_path: Path) -> None:
    check_config(load(tmp_path, MODEL, "routing_replay=R3", "load_balancing=bias"), command="train")


def test_configuration_checks_reject_unknown_families(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type 'brandnew' is not supported; supported are deepseek_v3, glm4_moe"):
        check_config(load(tmp_path, MODEL), command="train")


def test_layouts_and_servers_are_checked_against_the_family(brandnew: None, tmp_path: Path) -> None:
    config = load(tmp_path, {**MODEL, "num_helpers": 6, "unheard_of": True})
    config.parallel.expert_parallel_size, config.parallel.num_ranks = 4, 4
    with pytest.raises(ConfigError) as error:
        check_config(config, command="train")
    assert "6 experts do not divide by parallel.expert_parallel_size 4" in str(error.value)
    assert "SGLang has not heard of it" in str(error.value)


def test_experts_images_routes_and_names_come_from_the_family(brandnew: None, tmp_path: Path) -> None:
    from megatron_rl.families.model_facts import num_mtp_layers, vision_titles, vision_token_ids
    from megatron_rl.rollout.requests import RouteShape
    from megatron_rl.rollout.sglang.wire.response_validation import route_shape

    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "image_token_id": 7, "num_next_layers": 1}))
    model = read_model_json(tmp_path)
    config = as_config(model)
    assert has_vision(model) and vision_token_ids(config) == (7,) and "Brandnew-VL" in vision_titles()
    assert has_experts(config) == [True, True] and num_experts(config) == 8 and num_mtp_layers(config) == 1
    assert route_shape(tmp_path) == RouteShape(num_layers=2, top_k=2, num_experts=8)
    assert joined_name("a.qkv_alike.weight", {"a.everything_proj.weight"}) == ("a.everything_proj.weight", 3)


def test_parameters_follow_the_family_table(brandnew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.families import parameters

    monkeypatch.setattr(parameters, "parameter_shapes", lambda config: {"lens": (2, 3)})
    sizes = {"hidden_size": 8, "tie_word_embeddings": False, "vision_config": None}
    found = parameters.entries(as_config({**MODEL, **sizes}), "policy")
    names = [name for entry in found for name in entry.hf]
    assert names[:2] == ["eye.lens", "mind.embed_tokens.weight"]
    assert "mind.layers.1.mlp.experts.7.down_proj.weight" in names


@pytest.mark.parametrize("model_type", families())
def test_sglang_problems_are_checked_for_every_family(model_type: str) -> None:
    assert list(engine_problems({"model_type": model_type}, "config.json")) == []


def test_families_import_no_megatron_sglang_or_transformers() -> None:
    code = (
        "import sys; from megatron_rl.families.family import families; assert len(families()) >= 10; "
        "assert not {'megatron', 'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_fields_of_a_file_name_it_in_caches_and_cannot_be_set():
    facts = as_config({"hidden_size": 64, "layer_types": ["a"]})
    with pytest.raises(AttributeError, match="make other ones by as_config"):
        facts.hidden_size = 128
    assert facts == as_config(vars(facts)) and facts.content == as_config(vars(facts)).content
    assert facts.content != as_config({**vars(facts), "hidden_size": 128}).content
    assert set(vars(facts)) == {"hidden_size", "layer_types"}
