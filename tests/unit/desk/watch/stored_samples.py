"""Synthetic stored responses in a run's folder: words as tokens, values from a seed."""

import numpy as np

from megatron_rl.tracking.samples_file import write_samples

_WORDS = [
    "We", " need", " the", " sum", " of", " both", " numbers", ".", "\n", " So", " 12", " times", " 13", " is", " 156", ",",
    " because", " ten", " times", " 13", " is", " 130", " und", " größer", " 😀", " wait", "!", " \\boxed{156}", "中", "文",
]  # fmt: skip


def columns_of(step, num_responses=12, *, max_tokens=120, seed=0, group_size=4, dialogue=False):
    """Columns for ``write_samples``; some responses are not finished, not scored or not trained."""
    rng = np.random.default_rng(1000 * seed + step)
    rows = []
    for i in range(num_responses):
        length = int(rng.integers(3, max_tokens))
        words = [_WORDS[j] for j in rng.integers(0, len(_WORDS), length - 1)] + ["<|im_end|>"]
        window = int(rng.integers(1, length + 1))
        kind = rng.choice(["stop", "length", "open"], p=[0.6, 0.2, 0.2])
        scored = kind != "open" and rng.random() < 0.9
        in_window = np.arange(length) >= length - window
        server = np.where(np.arange(length) % 17 == 3, -3.0, -0.2) * rng.random(length)
        nan = np.float32("nan")
        trained = in_window & (rng.random(length) < 0.95)
        sizes = [length - window, window] if window < length else [length]
        first = step - len(sizes)
        segments = [(n, first + 1 + k, first + k, k if dialogue else 0, "policy", "length", None) for k, n in enumerate(sizes)]
        if dialogue and len(sizes) == 2:
            head = max(1, sizes[0] // 2)
            segments = [(head, *segments[0][1:]), (sizes[0] - head, step, step - 1, 0, "environment", "message", 1.5), segments[1]]
        rows.append(
            {
                "step": step,
                "id": 100 * step + i,
                "group": 10 * step + i // group_size,
                "sample": i % group_size,
                "prompt_id": f"train{i // group_size}",
                "type": ["math", "code"][i % 2],
                "reward": float(rng.integers(0, 5)) / 4 if scored else None,
                "finished": kind != "open",
                "end": kind,
                "greedy": False,
                "parent": 100 * step if dialogue and i == 3 else None,
                "num_turns": len(sizes) if dialogue else 1,
                "waited_s": 1.5 if dialogue else None,
                "prompt_tokens": 8,
                "length": length,
                "new_tokens": window,
                "trained_tokens": int(trained.sum()),
                "advantage": float(rng.normal()) if trained.any() else None,
                "mismatch": float(rng.random() * 0.02),
                "logprob": float(server.mean()),
                "oldest_version": step - len(sizes),
                "newest_version": step - 1,
                "detail": "the last number is 156" if scored else "",
                "error": "" if scored or kind == "open" else "the worker ran 5 s and was killed",
                "reward_metrics": {"depth": float(i)} if scored and i % 3 else {},
                "prompt": "<|im_start|>user\nWhat is 12 * 13?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
                "response": "".join(words),
                "question": "What is 12 * 13?",
                "answer": "156",
                "prompt_ids": np.arange(8, dtype=np.int32),
                "token_ids": rng.integers(0, 1000, length).astype(np.int32),
                "token_ends": np.cumsum([len(word) for word in words]).astype(np.int32),
                "mask": trained,
                "rollout_logprobs": server.astype(np.float32),
                "trainer_logprobs": np.where(in_window, server + rng.normal(0, 0.02, length), nan).astype(np.float32),
                "advantages": np.where(in_window, rng.normal(0, 1, length), nan).astype(np.float32),
                "values": None if seed else np.where(in_window, rng.random(length), nan).astype(np.float32),
                "segments": segments,
                "turns": [(0, 1.0, "right", ""), (1, None, "", "no answer")] if dialogue else [],
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


def write_run(folder, steps=range(1, 7), **how):
    """Write samples. Returns the written columns by step."""
    written = {step: columns_of(step, **how) for step in steps}
    for step, columns in written.items():
        write_samples(folder, step, columns)
    return written
