"""Sampling parameters, seeds and requests, and the generation plan of a run: hot tokens (FIRE), dialogues and stop strings.

Invariant: a seed depends only on run.seed and on the identity of the sample (trajectory, prompt or name), never on
when or where the sample is generated. A resumed run therefore samples the same tokens as an uninterrupted run.
"""

import asyncio
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config, FireConfig, RolloutConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, TokenParts, Trajectory
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.environments.base import Environment, EnvironmentFault, Message
from megatron_rl.rollout.environment_calls import EnvironmentCalls
from megatron_rl.rollout.requests import GenerationRequest, RequestImages, RouteShape
from megatron_rl.rollout.sglang.wire.response_validation import returns_routes, route_shape

_MAX_SEED = 2**31 - 1
TokenIds = Sequence[int] | np.ndarray | TokenParts
Decode = Callable[[Sequence[int]], str]


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


@dataclass(frozen=True)
class Dialogue:
    """The environment of a run with several turns, and the function that encodes its messages."""

    calls: EnvironmentCalls
    encode_message: Callable[..., list[int]]
    """Maps (message, last token of the history, the prompt's chat-template arguments) to token ids."""
    server_stops: tuple[str, ...] = ()
    """Stop strings of the environment that servers match as text. The others are stop tokens or are searched in the
    replies."""

    @property
    def environment(self) -> Environment:
        return self.calls.environment


@dataclass(frozen=True)
class GenerationPlan:
    sampling: Sampling
    decode: Decode
    fire: FireConfig | None = None
    """FIRE (arXiv 2410.21236): one token of each response is sampled hot; None: off."""
    dialogue: Dialogue | None = None
    trains_meanwhile: bool = False
    """True if the policy is updated during a window: a server restarted then may have the version after the
    published one."""
    published_meanwhile: bool = False
    """True if weights may be published during a window: replies must then report which weights sampled which tokens."""

    has_adapters: bool = False
    """True if the servers have the weights of a version as an adapter, which requests name."""

    @property
    def needs_text(self) -> bool:
        """True if servers must match text, for which they need a tokenizer."""
        return bool(self.dialogue and self.dialogue.server_stops) or bool(self.fire and self.fire.after)

    def without_training(self, draw: SamplingOverrides | None) -> "GenerationPlan":
        """Plan for responses that are not trained on: no hot tokens and no routes; sampled by ``draw`` or as in
        training."""
        sampling = self.sampling if draw is None else self.sampling.drawn(draw)
        return replace(self, sampling=replace(sampling, routes=None), fire=None)


def make_plan(config: Config, tokenizer: Tokenizer, environment: Environment | None) -> GenerationPlan:
    """Build the plan of a run. Raises EnvironmentFault for stop strings that the tokenizer cannot represent."""
    sampling = Sampling.of(config.rollout, tokenizer, seed=base_seed(config))
    # A stop string of one token is sent as a stop token, so that the server needs no tokenizer.
    token_stops = single_token_stops(environment.stop_strings, tokenizer) if environment is not None else {}
    overlap = overlap_of(config.schedule)
    return GenerationPlan(
        sampling=replace(
            sampling,
            stop_token_ids=(*sampling.stop_token_ids, *token_stops.values()),
            routes=route_shape(config.policy.path) if returns_routes(config) else None,
        ),
        decode=tokenizer.decode,
        fire=make_fire(config.rollout.fire, tokenizer),
        dialogue=make_dialogue(
            environment, tokenizer, chat=config.data.use_chat_template, limits=config.environment, in_windows=overlap > Overlap.nothing
        ),
        trains_meanwhile=overlap >= Overlap.training,
        published_meanwhile=overlap >= Overlap.publish,
    )


def make_fire(fire: FireConfig, tokenizer: Tokenizer) -> FireConfig | None:
    """Return FIRE's parameters, or None if FIRE is off. Special tokens are never sampled hot, because a high
    temperature makes all tokens about equally likely."""
    if not fire.temperature:
        return None
    return replace(fire, banned_token_ids=sorted({*fire.banned_token_ids, *tokenizer.special_ids}))


def make_dialogue(environment: Environment | None, tokenizer: Tokenizer, *, chat: bool, **waits: Any) -> Dialogue | None:
    """Return the dialogue settings, or None without an environment. ``chat``: messages that are not ``verbatim`` go
    through the chat template. ``waits``: ``limits`` and ``in_windows`` of ``EnvironmentCalls``."""
    if environment is None:
        return None

    def encode_message(message: Message, last_token_id: int, arguments: Mapping[str, Any] | None = None) -> list[int]:
        goes_through = chat and not message.verbatim
        ids = list(message.token_ids)
        if not ids:
            ids = tokenizer.encode_message(message.text, chat=goes_through, last_token_id=last_token_id, arguments=arguments)
        # An image token without an image would hang the server.
        if tokenizer.vision is not None and not set(ids).isdisjoint(tokenizer.vision.banned_token_ids):
            raise EnvironmentFault(
                f"a message of the environment contains an image or video token: {message.text[:80]!r}; messages of "
                "dialogues are text, images belong to prompts"
            )
        return ids

    token_stops = single_token_stops(environment.stop_strings, tokenizer)
    server_stops = tuple(text for text in environment.stop_strings if text not in token_stops)
    return Dialogue(EnvironmentCalls(environment, **waits), encode_message, server_stops)


def single_token_stops(stop_strings: Sequence[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Map each stop string that is a single token to its id: servers need no tokenizer for these.

    Raises EnvironmentFault for a string that does not survive the tokenizer, because the environment would never
    see it.
    """
    ids = {}
    for text in stop_strings:
        encoded = tokenizer.encode(text)
        if tokenizer.decode(encoded) != text:
            raise EnvironmentFault(
                f"stop string {text!r} becomes {tokenizer.decode(encoded)!r} in the tokens of {tokenizer.path}: the "
                "environment could not see it. Choose other tags, or a tokenizer that has them as ordinary tokens"
            )
        if len(encoded) == 1:
            ids[text] = encoded[0]
    return ids


def current_turn_ids(trajectory: Trajectory) -> list[int]:
    turn = trajectory.current_turn
    return [token for s in trajectory.segments if s.generated and s.turn == turn for token in s.token_ids.tolist()]


def awaits_hot_token(trajectory: Trajectory, fire: FireConfig) -> bool:
    """True if the response, in its first turn, has no hot token yet. Without ``after``, only the first token may be
    hot."""
    if trajectory.greedy or trajectory.current_turn > 0 or any(segment.hot for segment in trajectory.segments):
        return False
    return bool(fire.after) or trajectory.num_response_tokens == 0


def hot_token_is_next(trajectory: Trajectory, fire: FireConfig | None, decode: Decode) -> bool:
    """True if the next token of the response is FIRE's hot token."""
    if fire is None or not awaits_hot_token(trajectory, fire):
        return False
    turn_ids = current_turn_ids(trajectory)
    return not fire.after or end_of_text(turn_ids, [fire.after], decode) == len(turn_ids)


def end_of_text(token_ids: Sequence[int], texts: Sequence[str], decode: Decode) -> int | None:
    """Smallest number of leading tokens whose text contains one of ``texts``; None if the text of all tokens does not."""

    def contains(num_tokens: int) -> bool:
        text = decode(token_ids[:num_tokens])
        return any(wanted in text for wanted in texts)

    if not texts or not contains(len(token_ids)):
        return None
    # A binary search: decoding every prefix would take time quadratic in the tokens.
    return bisect_left(range(len(token_ids)), True, key=contains)
