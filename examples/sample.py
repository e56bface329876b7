"""Sample one response (temperature 1) to every prompt of a file, from a model folder, outside of any run.

What comes out is the input of `megatron-rl score`: a policy that was trained by one reward is measured by another one.
The same arguments write the same responses.

    python examples/sample.py --model outputs/pairwise_ppo/sft --rows prompts.jsonl --output responses.jsonl
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from characters import write_rows

from megatron_rl.data.row_files import read_rows
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops


def responses(model_path: Path, prompts: list[str], *, max_new_tokens: int, seed: int) -> list[str]:
    """Texts of the responses, in the order of ``prompts``, without their end-of-text token."""
    declare_torchvision_ops()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = Tokenizer(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    ids = [tokenizer.encode_prompt(prompt, chat=False) for prompt in prompts]
    length = max(map(len, ids))
    padded = torch.tensor([[tokenizer.eos_id] * (length - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in ids])
    sampled = model.generate(
        padded, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.eos_id,
    )  # fmt: skip
    return [tokenizer.decode(row) for row in sampled[:, length:].tolist()]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--rows", required=True, help="JSONL with prompts")
    parser.add_argument("--output", type=Path, required=True, help="JSONL that receives the rows with their responses")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    rows = [row for row, _ in read_rows([options.rows])]
    texts = responses(
        options.model, [row["prompt"] for row in rows], max_new_tokens=options.max_new_tokens, seed=options.seed
    )
    write_rows(options.output, ({**row, "response": text} for row, text in zip(rows, texts, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
