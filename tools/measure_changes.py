"""Measure the share of a model's bfloat16 values that an update changes, which a publish of changed values would send.

A small transformer learns a text of random rules at a high rate first, so that weights and Adam's moments are those of a trained
model; then it continues at the rates of reinforcement learning. Main weights are float32, as in Megatron; the values compared
are their bfloat16 roundings, which a publish sends.

    python tools/measure_changes.py
"""

import argparse
import copy

import torch
from torch import Tensor, nn

BLOCK = 64
"""Values of a block: 128 bytes."""


class Model(nn.Module):
    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        layer = nn.TransformerEncoderLayer(hidden, hidden // 64, 4 * hidden, 0.0, batch_first=True, norm_first=True, bias=False)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocab, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.vocab, self.length = arguments.vocab, arguments.length
        self.rules = torch.randint(self.vocab, (self.vocab, 4))
        self.model = Model(self.vocab, arguments.hidden, arguments.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def batch(self) -> Tensor:
        """Each token is one of four that may follow the one before: [16, length]."""
        tokens = [torch.randint(self.vocab, (16,))]
        while len(tokens) < self.length:
            tokens.append(self.rules[tokens[-1], torch.randint(4, (16,))])
        return torch.stack(tokens, 1)

    def update(self, lr: float) -> float:
        tokens = self.batch()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return loss.item()

    def served(self) -> list[Tensor]:
        return [weight.detach().bfloat16() for weight in self.model.parameters()]


def changed(before: list[Tensor], after: list[Tensor]) -> tuple[float, float, float]:
    """Shares of the values, of the blocks of 128 bytes and of the tensors that differ."""
    masks = [(a.view(torch.int16) != b.view(torch.int16)).flatten() for a, b in zip(before, after, strict=True)]
    values = torch.cat(masks)
    blocks = torch.cat([mask[: len(mask) // BLOCK * BLOCK].view(-1, BLOCK).any(1) for mask in masks])
    tensors = [mask.any().item() for mask in masks]
    return values.float().mean().item(), blocks.float().mean().item(), sum(tensors) / len(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=300, help="initial updates at a rate of 1e-3")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    arguments = parser.parse_args()
    run = Run(arguments)
    losses = [run.update(1e-3) for _ in range(arguments.warmup)]
    count = sum(weight.numel() for weight in run.model.parameters())
    print(f"{count / 1e6:.1f}M parameters, loss {losses[0]:.2f} -> {losses[-1]:.2f} in {arguments.warmup} updates")
    print("rate    updates  values  blocks of 128 bytes  tensors   (that differ)")
    for lr in arguments.rates:
        here = copy.deepcopy(run)
        for _ in range(16):  # Adam's moments forget the high rate's steps
            here.update(lr)
        before = here.served()
        for number in range(1, 17):
            here.update(lr)
            if number in (1, 4, 16):
                values, blocks, tensors = changed(before, here.served())
                print(f"{lr:<7g} {number:>7}  {values:6.2%}  {blocks:>19.1%}  {tensors:>7.0%}")


if __name__ == "__main__":
    main()
