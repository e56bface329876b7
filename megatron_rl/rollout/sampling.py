"""Sampling parameters, generation requests and seeds.

Invariant: a seed depends only on run.seed and on the identity of the sample (trajectory, prompt or name), never on
when or where the sample is generated. A resumed run therefore samples the same tokens as an uninterrupted run.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, TokenParts
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.rollout.requests import GenerationRequest, RequestImages, RouteShape

_MAX_SEED = 2**31 - 1
TokenIds = Sequence[int] | np.ndarray | TokenParts


@dataclass(frozen=True)
class SamplingOverrides:
    """Sampling parameters of responses that are not trained on."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    name: str = ""
    """Different names give different seeds; the empty name uses the run's seeds."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of the run, shared by all requests."""

    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    seed: int | None
    """Base of the per-sample seeds; None leaves the seeds to the server."""
    vision: ImageProcessor | None = None
    """Image processor of the model, if the model has one. Image placeholder tokens are then never sampled."""
    routes: RouteShape | None = None
    """Shape of the expert routes to record with the trajectories, or None."""

    @classmethod
    def of(cls, rollout: RolloutConfig, tokenizer: Tokenizer, *, seed: int | None) -> "Sampling":
        """Build the parameters from the configuration. The tokenizer's end-of-text token is added to the stop tokens."""
        return cls(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=(tokenizer.eos_id, *rollout.stop_token_ids),
            seed=seed,
            vision=tokenizer.vision,
        )

    def drawn(self, draw: SamplingOverrides) -> "Sampling":
        """Return a copy with the temperature, top-p, top-k and seeds of ``draw``."""
        seed = named_seed(self.seed, f"draw {draw.name}") if draw.name else self.seed
        return replace(self, temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k, seed=seed)

    async def request(
        self, prompt: Prompt, token_ids: TokenIds, *, rid: str, max_new_tokens: int, seed: int | None, **more: Any
    ) -> GenerationRequest:
        """Build the request of one sample that continues ``token_ids`` (the prompt and the tokens after it). Reads
        the prompt's images.

        ``more``: additional request fields; they override the fields set here.
        """
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_token_ids": self.stop_token_ids,
            "banned_token_ids": self.vision.banned_token_ids if self.vision is not None else (),
            "routes": self.routes,
            "images": await images_of_request(self.vision, prompt),
            "prompt_name": prompt.source or prompt.id,
        }
        ids = sent_ids(self.vision, prompt, token_ids)
        return GenerationRequest(rid, ids, max_new_tokens, seed=seed, **(fields | more))


def base_seed(config: Config) -> int | None:
    """Base of all sample seeds, or None if ``rollout.deterministic`` is false. Nondeterministic servers ignore seeds."""
    return None if config.rollout.deterministic is False else config.run.seed


def trajectory_seed(base: int | None, trajectory_id: int) -> int | None:
    """Seed of a trajectory, the same in every window: the server hashes it with the token's position."""
    # Frozen formula: a resumed run must reproduce the seeds of its checkpoint.
    return None if base is None else (base * 1_000_003 + trajectory_id * 7_919) % _MAX_SEED


def sample_seed(base: int | None, prompt_id: str, sample: int) -> int | None:
    """Seed of one sample of a prompt."""
    return None if base is None else int.from_bytes(text_digest(f"{base}/{sample}/{prompt_id}")) % _MAX_SEED


def named_seed(base: int | None, name: str) -> int | None:
    """Seed of a named use of randomness."""
    if base is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{base} {name}".encode()).digest()[:4], "big") % _MAX_SEED


def text_digest(text: str) -> bytes:
    """12-byte digest that identifies ``text``."""
    # Ids come from JSON, which may contain half a surrogate pair.
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).digest()


async def images_of_request(vision: ImageProcessor | None, prompt: Prompt) -> RequestImages | None:
    """Images of the prompt, read and encoded on other threads than the event loop's; None for a model without vision."""
    if vision is None:
        return None
    if not prompt.images:
        return RequestImages(vision.image_token_id)
    # Shielded, because one encoding serves all samples of a group even if one request is cancelled.
    data = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(vision.wire(image))) for image in prompt.images))
    return RequestImages(vision.image_token_id, data, sum(vision.num_tokens(image) for image in prompt.images))


def sent_ids(vision: ImageProcessor | None, prompt: Prompt, token_ids: TokenIds) -> TokenIds:
    """``token_ids`` (the prompt and the tokens after it) in the form that requests carry."""
    if vision is None or not prompt.images:
        return token_ids
    return vision.collapsed(np.asarray(token_ids), prompt.images)
