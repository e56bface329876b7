"""One sample of the policy: its request to a server, and its seed.

Invariant: a seed follows from run.seed and from what the sample is of, never from when or where it is generated, so a
run that goes on after a kill samples what an uninterrupted one would have.
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
    """How samples are drawn that train nothing."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    name: str = ""
    """Draws with different names have different seeds; the empty name has those of the run."""


@dataclass(frozen=True)
class Sampling:
    """How every token is sampled."""

    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    seed: int | None
    """Base of the samples' seeds; None lets the server draw."""
    vision: ImageProcessor | None = None
    """Of the model's folder, if it has one. Tokens that stand for images are never sampled then."""
    routes: RouteShape | None = None
    """Keep the experts of all tokens with the trajectories."""

    @classmethod
    def of(cls, rollout: RolloutConfig, tokenizer: Tokenizer, *, seed: int | None) -> "Sampling":
        """As the configuration says; the tokenizer's end-of-text token stops a response too."""
        return cls(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=(tokenizer.eos_id, *rollout.stop_token_ids),
            seed=seed,
            vision=tokenizer.vision,
        )

    def drawn(self, draw: SamplingOverrides) -> "Sampling":
        """The same in another way."""
        seed = named_seed(self.seed, f"draw {draw.name}") if draw.name else self.seed
        return replace(self, temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k, seed=seed)

    async def request(
        self, prompt: Prompt, token_ids: TokenIds, *, rid: str, max_new_tokens: int, seed: int | None, **more: Any
    ) -> GenerationRequest:
        """For one sample that continues ``token_ids`` (the prompt, and what follows it). Reads the prompt's images.

        ``more``: further fields of the request, or others than this would give them.
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
    """Of all samples' seeds. Servers that are not deterministic ignore them, so only a plain false keeps them back."""
    return None if config.rollout.deterministic is False else config.run.seed


def trajectory_seed(base: int | None, trajectory_id: int) -> int | None:
    """One seed per trajectory, the same in every window: the engine hashes it with the token's position."""
    return None if base is None else (base * 1_000_003 + trajectory_id * 7_919) % _MAX_SEED


def sample_seed(base: int | None, prompt_id: str, sample: int) -> int | None:
    """One seed per sample of a prompt."""
    return None if base is None else int.from_bytes(text_digest(f"{base}/{sample}/{prompt_id}")) % _MAX_SEED


def named_seed(base: int | None, name: str) -> int | None:
    """One seed per name."""
    if base is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{base} {name}".encode()).digest()[:4], "big") % _MAX_SEED


def text_digest(text: str) -> bytes:
    """12 bytes that stand for ``text``."""
    # Ids come from JSON, which may hold half a surrogate pair.
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).digest()


async def images_of_request(vision: ImageProcessor | None, prompt: Prompt) -> RequestImages | None:
    """The prompt's images, read and encoded on other threads than the event loop's; None for a model without vision."""
    if vision is None:
        return None
    if not prompt.images:
        return RequestImages(vision.image_token_id)
    # One encoding serves all samples of a group: a request that is cancelled leaves it to the others.
    data = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(vision.wire(image))) for image in prompt.images))
    return RequestImages(vision.image_token_id, data, sum(vision.num_tokens(image) for image in prompt.images))


def sent_ids(vision: ImageProcessor | None, prompt: Prompt, token_ids: TokenIds) -> TokenIds:
    """``token_ids`` (the prompt, and what follows it) as a request carries them."""
    if vision is None or not prompt.images:
        return token_ids
    return vision.collapsed(np.asarray(token_ids), prompt.images)
