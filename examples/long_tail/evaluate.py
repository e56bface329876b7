"""Measure the accuracy of policies without the noise of samples.

A problem of this task has exactly one right response, so the probability that a sample is right is the probability of
that response: one forward pass tells what the mean over endlessly many samples at temperature 1 would (avg@k for k to
infinity). What is left is the standard error of the problems. Each folder gets an ``evaluation.json``, as from
``megatron-rl evaluate``, whose samples agree within their error.

    python examples/long_tail/evaluate.py --task outputs/long_tail/task outputs/long_tail/runs/*/policies/*
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron_rl.algorithms.pass_at_k import mean_and_error
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

declare_torchvision_ops()
from transformers import AutoModelForCausalLM

TOKENS_AT_ONCE = 32768
"""Maximum tokens of a padded batch."""
Example = tuple[list[int], int]
"""Token ids of a prompt with its right response and the end-of-text token; tokens of the prompt."""


def read_examples(task: Path, num_problems: int) -> list[Example]:
    """The first ``num_problems`` of eval.jsonl; 0: all."""
    tokenizer = Tokenizer(task / "model")
    rows = [json.loads(line) for line in (task / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    examples = []
    for row in rows[: num_problems or None]:
        prompt, response = (tokenizer.encode(row[field]) for field in ("prompt", "response"))
        examples.append(([*prompt, *response, tokenizer.eos_id], len(prompt)))
    return examples


def batches(examples: Sequence[Example]) -> Iterator[list[int]]:
    """Indices of examples of like length, at most TOKENS_AT_ONCE tokens with the padding (at least one example)."""
    batch: list[int] = []
    for index in sorted(range(len(examples)), key=lambda index: len(examples[index][0])):
        if batch and (len(batch) + 1) * len(examples[index][0]) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@torch.inference_mode()
def probabilities(model: torch.nn.Module, examples: Sequence[Example]) -> list[float]:
    """Probability of each example's right response, at temperature 1."""
    found = torch.zeros(len(examples), dtype=torch.float64)
    for batch in batches(examples):
        length = max(len(examples[index][0]) for index in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        is_response = torch.zeros(len(batch), length, dtype=torch.bool)
        for row, index in enumerate(batch):
            tokens, num_prompt_tokens = examples[index]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            is_response[row, num_prompt_tokens : len(tokens)] = True
        # Padding on the right needs no mask: attention is causal.
        logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        found[batch] = (logprobs.double() * is_response[:, 1:]).sum(-1).exp()
    return found.tolist()


def evaluate(folder: Path, examples: Sequence[Example], settings: dict[str, object]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accuracy, error = mean_and_error(probabilities(model, examples))
    metrics = {"eval/accuracy": accuracy, "eval/accuracy_stderr": error}
    (folder / "evaluation.json").write_text(json.dumps({"settings": settings, "metrics": metrics}, indent=2))
    print(f"{folder}: accuracy {accuracy:.1%} ± {error:.1%}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("policies", nargs="+", type=Path, help="Hugging Face folders (run.keep_policy_every_s)")
    parser.add_argument("--task", type=Path, required=True, help="the folder that make_task.py wrote")
    parser.add_argument("--num-problems", type=int, default=0, help="the first so many of eval.jsonl; 0: all")
    options = parser.parse_args(arguments)
    examples = read_examples(options.task, options.num_problems)
    digest = hashlib.sha256((options.task / "eval.jsonl").read_bytes()).hexdigest()
    settings: dict[str, object] = {"exact": True, "num_prompts": len(examples), "sha256": digest}
    for folder in options.policies:
        note = folder / "evaluation.json"
        if not note.exists() or json.loads(note.read_text())["settings"] != settings:
            evaluate(folder, examples, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
