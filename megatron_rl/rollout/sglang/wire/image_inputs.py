"""Prompts with images in SGLang's format: one image token per image, and the images next to the ids."""

import asyncio
from collections.abc import Sequence

import numpy as np

from megatron_rl.data.trajectory import Prompt, TokenParts
from megatron_rl.data.vision import Vision
from megatron_rl.rollout.requests import RequestImages

TokenIds = Sequence[int] | np.ndarray | TokenParts


async def images_of_request(vision: Vision | None, prompt: Prompt) -> RequestImages | None:
    """Images of the prompt, read and encoded on other threads than the event loop's; None for a model without vision."""
    if vision is None:
        return None
    if not prompt.images:
        return RequestImages(vision.image_token_id)
    # Shielded, because one encoding serves all samples of a group even if one request is cancelled.
    data = await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(vision.wire(image))) for image in prompt.images))
    return RequestImages(vision.image_token_id, data, sum(vision.num_tokens(image) for image in prompt.images))


def sent_ids(vision: Vision | None, prompt: Prompt, token_ids: TokenIds) -> TokenIds:
    """``token_ids`` (the prompt and the tokens after it) in the form that requests carry."""
    if vision is None or not prompt.images:
        return token_ids
    return vision.collapsed(np.asarray(token_ids), prompt.images)
