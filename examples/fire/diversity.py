"""Measure the effect of a hot first token before any training: the same model, a group of responses per held-out prompt.

    python examples/fire/diversity.py --model outputs/fire/sft --rows outputs/fire/task/held_out.jsonl

The first token is sampled at temperature 1, then at 30 among the 8 likeliest ones; everything after it at temperature 1.
Standard errors are over prompts. The same arguments print the same table.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from megatron_rl.data.row_files import read_rows
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.rules.math import score
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

MAX_NEW_TOKENS = 12


def sample_groups(
    folder: Path, prompts: list[str], *, group_size: int, temperature: float, top_k: int, seed: int
) -> list[list[str]]:
    """``group_size`` responses to each prompt, whose first token alone has ``temperature`` and ``top_k`` (0: all)."""
    declare_torchvision_ops()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = Tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [tokenizer.encode_prompt(prompt, chat=False) for prompt in prompts for _ in range(group_size)]
    length = max(map(len, ids))
    padded = torch.tensor([[tokenizer.eos_id] * (length - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in ids])
    with torch.no_grad():
        logits = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[:, -1]
    logits[:, sorted(tokenizer.special_ids)] = float("-inf")
    if top_k:
        logits[logits < logits.topk(top_k).values[:, -1:]] = float("-inf")
    first = torch.multinomial((logits / temperature).softmax(-1), 1)
    sampled = model.generate(
        torch.cat([padded, first], dim=1), attention_mask=torch.cat([mask, torch.ones_like(first)], dim=1),
        max_new_tokens=MAX_NEW_TOKENS - 1, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.eos_id,
    )  # fmt: skip
    texts = [tokenizer.decode(row) for row in sampled[:, length:].tolist()]
    return [texts[i : i + group_size] for i in range(0, len(texts), group_size)]


def measures(rows: list[dict[str, Any]], groups: list[list[str]]) -> dict[str, list[float]]:
    """Name -> a number per prompt."""
    rights = [
        [score(text, row["answer"], extract="last_number").value == 1.0 for text in group]
        for row, group in zip(rows, groups, strict=True)
    ]
    size = len(groups[0])
    return {
        "right (pass@1)": [sum(right) / size for right in rights],
        f"one of {size} right (pass@{size})": [float(any(right)) for right in rights],
        "groups with right and wrong responses": [float(any(right) and not all(right)) for right in rights],
        f"different first words in {size}": [float(len({text.split(" ")[0] for text in group})) for group in groups],
        f"different answers in {size}": [float(len({text.split(" ")[-1] for text in group})) for group in groups],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--rows", required=True, help="JSONL with prompts and answers")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=30.0)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    rows = [row for row, _ in read_rows([options.rows])]
    columns = []
    for temperature, top_k in ((1.0, 0), (options.temperature, options.top_k)):
        groups = sample_groups(
            options.model, [row["prompt"] for row in rows], group_size=options.group_size, temperature=temperature,
            top_k=top_k, seed=options.seed,
        )  # fmt: skip
        columns.append(measures(rows, groups))
    print(f"| {len(rows)} prompts | first token at 1 | at {options.temperature:g}, top {options.top_k} |\n|---|---|---|")
    for name in columns[0]:
        scale, unit = (1, "") if name.startswith("different") else (100, " %")
        cells = [
            f"{statistics.fmean(c[name]) * scale:.1f} ± {statistics.stdev(c[name]) / len(rows) ** 0.5 * scale:.1f}{unit}"
            for c in columns
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
