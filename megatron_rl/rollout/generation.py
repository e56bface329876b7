"""How a run generates: what is the same for all its windows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config, FireConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.environments.base import Environment, EnvironmentFault, Message
from megatron_rl.rollout.sampling import Sampling, SamplingOverrides, base_seed
from megatron_rl.rollout.sglang.wire.routes import returns_routes, route_shape

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class HotTokenSampling:
    """FIRE (arXiv 2410.21236): one token of each response is sampled hot."""

    temperature: float
    top_k: int
    after: str
    """The hot token is the first one after this text; empty: the first of the response."""
    banned_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Dialogue:
    """Who answers the model's turns, and how its words become tokens."""

    environment: Environment
    encode_message: Callable[..., list[int]]
    """(message, last token of the history, the prompt's chat-template arguments) -> ids."""
    server_stops: tuple[str, ...] = ()
    """Those of the environment's stop strings that servers look for as text; the others are stop tokens, or are found
    in the answers."""


@dataclass(frozen=True)
class GenerationPlan:
    sampling: Sampling
    decode: Decode
    fire: HotTokenSampling | None = None
    dialogue: Dialogue | None = None
    trains_meanwhile: bool = False
    """The policy is updated during a window: a server that starts again in it may get the version after the published one."""
    published_meanwhile: bool = False
    """So may all servers: an answer has to say which weights sampled which of its tokens."""

    @property
    def needs_text(self) -> bool:
        """Servers must look for texts, and need a tokenizer for it."""
        return bool(self.dialogue and self.dialogue.server_stops) or bool(self.fire and self.fire.after)

    def without_training(self, draw: SamplingOverrides | None) -> "GenerationPlan":
        """For responses that train nothing: no hot tokens, no routes; drawn as the run's own, or in another way."""
        sampling = self.sampling if draw is None else self.sampling.drawn(draw)
        return replace(self, sampling=replace(sampling, routes=None), fire=None)


def make_plan(config: Config, tokenizer: Tokenizer, environment: Environment | None) -> GenerationPlan:
    """Raises EnvironmentFault for stop strings that the tokenizer does not carry."""
    sampling = Sampling.of(config.rollout, tokenizer, seed=base_seed(config))
    # A stop string of one token needs no text on the server: its id does the same.
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
        dialogue=make_dialogue(environment, tokenizer, chat=config.data.use_chat_template),
        trains_meanwhile=overlap >= Overlap.training,
        published_meanwhile=overlap >= Overlap.publish,
    )


def make_fire(fire: FireConfig, tokenizer: Tokenizer) -> HotTokenSampling | None:
    """None when it is off. Special tokens are never sampled hot: at a high temperature all tokens are about equal."""
    if not fire.temperature:
        return None
    banned = {*fire.banned_token_ids, *tokenizer.special_ids}
    return HotTokenSampling(fire.temperature, fire.top_k, fire.after, tuple(sorted(banned)))


def make_dialogue(environment: Environment | None, tokenizer: Tokenizer, *, chat: bool) -> Dialogue | None:
    """None without an environment. ``chat``: messages go through the chat template, unless they are ``verbatim``."""
    if environment is None:
        return None

    def encode_message(message: Message, last_token_id: int, arguments: Mapping[str, Any] | None = None) -> list[int]:
        goes_through = chat and not message.verbatim
        ids = tokenizer.encode_message(message.text, chat=goes_through, last_token_id=last_token_id, arguments=arguments)
        # Such a token without its image would hang the server.
        if tokenizer.vision is not None and not set(ids).isdisjoint(tokenizer.vision.banned_token_ids):
            raise EnvironmentFault(
                f"a message of the environment spells an image or video token: {message.text[:80]!r}; messages of "
                "dialogues are text, images belong to prompts"
            )
        return ids

    token_stops = single_token_stops(environment.stop_strings, tokenizer)
    server_stops = tuple(text for text in environment.stop_strings if text not in token_stops)
    return Dialogue(environment, encode_message, server_stops)


def single_token_stops(stop_strings: Sequence[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Those stop strings that are one token each, with their ids: servers need no tokenizer for them.

    Raises EnvironmentFault for a string that does not survive the tokenizer: the environment would never see it.
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
