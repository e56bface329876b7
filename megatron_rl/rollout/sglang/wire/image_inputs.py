"""Prompts with images on their way to SGLang: one image token per image, and the images next to the ids."""

import asyncio
from collections.abc import Sequence

import numpy as np

from megatron_rl.data.trajectory import Prompt, TokenParts
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.rollout.requests import RequestImages

TokenIds = Sequence[int] | np.ndarray | TokenParts


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
