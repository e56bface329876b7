"""Computes losses, gradients and masks with TRL and writes them as JSON, which the tests compare with.

TRL needs an environment of its own (``tools/bench_trl.py`` says how to make one), with this repository on PYTHONPATH:

    PYTHONPATH=. /tmp/trl/bin/python -m tests.trl_golden

The same versions write the same bytes.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.data.template_styles import STYLES, conversations, make_tokenizer

FOLDER = Path(__file__).parent / "unit"
DPO_FILE = FOLDER / "algorithms" / "dpo_trl.json"
MASKS_FILE = FOLDER / "data" / "conversation_masks_trl.json"
VARIANTS = [
    {"loss_type": loss_type, "beta": beta, "label_smoothing": smoothing}
    for loss_type, smoothing in (("sigmoid", 0.0), ("ipo", 0.0), ("sigmoid_norm", 0.0), ("conservative", 0.2))
    for beta in (0.1, 0.5)
]
NUM_PAIRS, MAX_TOKENS = 16, 12


def dpo_batches() -> list[dict[str, Any]]:
    """Random batches with the loss and the gradient of TRL's DPOTrainer for every variant.

    "conservative" is not among DPOTrainer's losses: CPOTrainer has it, for log-probs in place of log-ratios.
    """
    import torch
    from accelerate import Accelerator
    from trl import DPOTrainer
    from trl.experimental.cpo import CPOTrainer

    torch.manual_seed(0)
    rows = []
    for variant in VARIANTS:
        lengths = torch.randint(1, MAX_TOKENS + 1, (2 * NUM_PAIRS,))
        mask = (torch.arange(MAX_TOKENS + 1)[None] - 1 < lengths[:, None]) & (torch.arange(MAX_TOKENS + 1)[None] > 0)
        tokens = (torch.randn(2 * NUM_PAIRS, MAX_TOKENS, dtype=torch.float64) - 2.0) * mask[:, 1:]
        reference = tokens.sum(1) + 3.0 * torch.randn(2 * NUM_PAIRS, dtype=torch.float64)
        leaf = tokens.clone().requires_grad_()
        if variant["loss_type"] == "conservative":
            trainer: Any = object.__new__(CPOTrainer)
            trainer.__dict__ |= {
                **variant, "loss_type": "sigmoid", "accelerator": Accelerator(cpu=True), "simpo_gamma": 0.0, "alpha": 0.0,
            }  # fmt: skip
            ratios = (leaf.sum(1) - reference).chunk(2)
            loss = trainer.cpo_loss(*ratios)[0].mean()
        else:
            trainer = object.__new__(DPOTrainer)
            trainer.__dict__ |= {
                "model": SimpleNamespace(training=True), "accelerator": Accelerator(cpu=True), "aux_loss_enabled": False,
                "ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl", "use_weighting": False,
                "loss_types": [variant["loss_type"]], "loss_weights": [1.0], "beta": variant["beta"],
                "label_smoothing": variant["label_smoothing"], "_total_train_tokens": 0, "_tp_size": 1,
                "_metrics": defaultdict(lambda: defaultdict(list)),
            }  # fmt: skip
            nothing = torch.zeros_like(leaf)
            outputs = SimpleNamespace(log_probs=leaf, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
            inputs = {
                "input_ids": mask.long(), "attention_mask": mask.long(), "completion_mask": mask.long(),
                "ref_chosen_logps": reference[:NUM_PAIRS], "ref_rejected_logps": reference[NUM_PAIRS:],
            }  # fmt: skip
            loss = trainer._compute_loss(lambda outputs=outputs, **_: outputs, inputs, return_outputs=False)
        (gradient,) = torch.autograd.grad(loss, leaf)
        spread = (gradient - gradient[:, :1]) * mask[:, 1:]
        assert spread.abs().max() == 0, "a response's tokens have one gradient"
        rows.append(
            {
                **variant,
                "logprobs": tokens.sum(1).tolist(),
                "reference": reference.tolist(),
                "lengths": lengths.tolist(),
                "loss": loss.item(),
                "gradient": gradient[:, 0].tolist(),
            }
        )
    return rows


def masks() -> dict[str, list[list[dict[str, Any]]]]:
    """TRL's ids and runs of trained tokens by style and conversation; of every prefix, if the template changes earlier turns."""
    import tempfile

    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    found: dict[str, list[list[dict[str, Any]]]] = {}
    for name, style in STYLES.items():
        tokenizer, rows = make_tokenizer(style), conversations(style)
        parts = [prefixes(row) if style.changes_turns else [row] for row in rows]
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        )
        with tempfile.TemporaryDirectory() as folder:
            settings = SFTConfig(output_dir=folder, assistant_only_loss=True, max_length=None, use_cpu=True, bf16=False, report_to=[])
            trained = [
                SFTTrainer(
                    model=model, args=settings, train_dataset=Dataset.from_list([one]), processing_class=tokenizer
                ).train_dataset[0]
                for part in parts
                for one in part
            ]
        encoded = iter({"ids": one["input_ids"], "runs": runs([label != -100 for label in one["labels"]])} for one in trained)
        found[name] = [list(islice(encoded, len(part))) for part in parts]
    return found


def prefixes(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row as it is after each turn of the assistant."""
    messages = row["messages"]
    return [{**row, "messages": messages[: i + 1]} for i, message in enumerate(messages) if message["role"] == "assistant"]


def runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """(start, end) of every run of True."""
    edges = [i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    print(f"trl_golden: wrote {path}")


if __name__ == "__main__":
    write(DPO_FILE, dpo_batches())
    write(MASKS_FILE, masks())
