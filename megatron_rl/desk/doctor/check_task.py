"""The task that ``megatron-rl check`` replays: prompts, a policy and a critic made from a seed, and the recipe.

Weights come from numpy's ``RandomState``, whose stream never changes, so they are equal on every machine. The
record of the released version is ``check_record.json`` in this folder.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.data.trajectory import Score
from megatron_rl.families.parameters import VALUE_HEAD

RECORD = Path(__file__).with_name("check_record.json")
NUM_STEPS = 4
_CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyz.,?!:\n"
_LAYERS, _WIDTH, _INNER, _HEADS, _GROUPS = 2, 64, 128, 4, 2
_MODEL: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": _WIDTH, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS, "num_key_value_heads": _GROUPS, "max_position_embeddings": 512, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "use_sliding_window": False, "torch_dtype": "float32",
}  # fmt: skip
_RECIPE = """
preset: tppo
run: {{seed: 1, num_steps: {num_steps}, output_dir: {folder}/run}}
policy: {{path: {folder}/policy, dtype: float32, optimizer: {{lr: 1.0e-3, warmup_steps: 0, weight_decay: 0.0, eps: 1.0e-4}}}}
critic: {{path: {folder}/critic, warmup_steps: 1, optimizer: {{lr: 1.0e-3, warmup_steps: 0, weight_decay: 0.0, eps: 1.0e-4}}}}
batch:
  num_prompts_per_step: 4
  num_samples_per_prompt: 2
  max_prompt_tokens: 32
  max_response_tokens: 20
  window_tokens: 8
  window_jitter_tokens: 0
  policy_minibatch_size: 4
  critic_minibatch_size: 4
  max_tokens_per_microbatch: 256
algorithm: {{ignore_boundary_tokens: 1}}
data: {{train_files: ["{folder}/train.jsonl"], use_chat_template: false, system_prompt: ""}}
reward: {{name: "megatron_rl.desk.doctor.check_task:digit_fraction", num_workers: 1}}
tracking: {{mlflow: false}}
"""


def digit_fraction(response: str, answer: str) -> Score:
    """The fraction of digits in the response: a reward that every response has and that varies."""
    return Score(round(sum(c.isdigit() for c in response) / max(len(response), 1), 4))


def make_task(folder: Path) -> Path:
    """Write models, prompts and the recipe into ``folder``. Returns the recipe's path."""
    random = np.random.RandomState(7)
    # Policy and critic share the body, like a critic that is initialized from a policy.
    body = _body(random)
    _write_model(folder / "policy", {**body, "lm_head.weight": _matrix(random, _MODEL["vocab_size"], _WIDTH)})
    _write_model(folder / "critic", {**body, VALUE_HEAD: _matrix(random, 1, _WIDTH)})
    rows = [{"prompt": f"{3 * i + 2}+{5 * i + 1}=", "answer": str(8 * i + 3)} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(_RECIPE.format(folder=folder, num_steps=NUM_STEPS))
    return recipe


def _body(random: np.random.RandomState) -> dict[str, np.ndarray]:
    kv = _WIDTH // _HEADS * _GROUPS
    tensors = {"model.embed_tokens.weight": _matrix(random, _MODEL["vocab_size"], _WIDTH)}
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        for part, rows, columns in (("q", _WIDTH, _WIDTH), ("k", kv, _WIDTH), ("v", kv, _WIDTH)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = _matrix(random, rows, columns)
            tensors[f"{name}self_attn.{part}_proj.bias"] = 0.1 * random.standard_normal(rows)
        tensors[f"{name}self_attn.o_proj.weight"] = _matrix(random, _WIDTH, _WIDTH)
        for part, rows, columns in (("gate", _INNER, _WIDTH), ("up", _INNER, _WIDTH), ("down", _WIDTH, _INNER)):
            tensors[f"{name}mlp.{part}_proj.weight"] = _matrix(random, rows, columns)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{part}.weight"] = 1.0 + 0.1 * random.standard_normal(_WIDTH)
    tensors["model.norm.weight"] = 1.0 + 0.1 * random.standard_normal(_WIDTH)
    return tensors


def _matrix(random: np.random.RandomState, rows: int, columns: int) -> np.ndarray:
    return random.standard_normal((rows, columns)) / np.sqrt(columns)


def _write_model(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**_MODEL, "architectures": ["Qwen2ForCausalLM"]}, indent=1))
    arrays = {name: np.ascontiguousarray(tensor, dtype=np.float32) for name, tensor in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
