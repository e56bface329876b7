"""A judge without a model: replies to /generate, /tokenize and /model_info by a function of the text."""

import math
from collections.abc import Callable
from typing import Any

WORD_IDS = {"YES": 10, " YES": 11, "Yes": 12, "NO": 20, " NO": 21, "No": 22}
MASS = 0.5
"""Probability of all judgement words together."""


def fake_judge(probability: Callable[[str], float]) -> Callable[[str, Any], Any]:
    """A handler for ``local_service``: P(yes) among the words is ``probability(text)``, spread over the asked forms."""

    def handler(path: str, body: Any) -> Any:
        if path == "/model_info":
            return {"model_path": "fake"}
        if path == "/tokenize":
            word = body["prompt"]
            return {"tokens": [WORD_IDS[word]] if word in WORD_IDS else [ord(c) for c in word]}
        return [
            answer(probability(text), ids) for text, ids in zip(body["text"], body["token_ids_logprob"], strict=True)
        ]

    return handler


def answer(p: float, ids: list[int]) -> dict[str, Any]:
    yes, no = [i for i in ids if i < 20], [i for i in ids if i >= 20]
    share = {i: p * MASS / len(yes) for i in yes} | {i: (1 - p) * MASS / len(no) for i in no}
    logprobs = [[math.log(share[i]) if share[i] else -1e4, i, None] for i in ids]
    meta = {"finish_reason": {"type": "length", "length": 1}, "output_token_ids_logprobs": [logprobs]}
    return {"text": "x", "output_ids": [1], "meta_info": meta}
