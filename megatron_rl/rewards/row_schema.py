"""Row schema of a reward: validates a file's rows and converts them to items to score."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.registry import Reward, required_fields, row_arguments
from megatron_rl.rewards.workers.calls import RewardItem

Row = dict[str, Any]


@dataclass(frozen=True)
class RowSchema:
    """Row schema of one reward: validates rows and converts them to items of the runner."""

    reward: Reward
    options: Mapping[str, Any]

    @property
    def fields(self) -> list[str]:
        """All keyword parameters that a row may set."""
        return [*required_fields(self.reward, self.options), *self.reward.row_fields]

    def item(self, row: Row) -> RewardItem:
        answer = row.get("answer")
        return row["response"], "" if answer is None else str(answer), row_arguments(self.reward, self.options, row)

    def problem(self, row: Any) -> str:
        """Description of a row's first problem, or ""."""
        if not isinstance(row, dict):
            return f"expected a JSON object, got {type(row).__name__}"
        needed = ("response", "answer") if self.reward.answer_required else ("response",)
        for name in (*needed, *required_fields(self.reward, self.options)):
            if name not in row:
                return f"field {name!r} is missing; the row has {sorted(row)}"
        if not isinstance(row["response"], str):
            return f"field 'response': expected text, got {type(row['response']).__name__}"
        if "answer" in needed and (not isinstance(row["answer"], (str, int, float)) or isinstance(row["answer"], bool)):
            return f"field 'answer': expected text or a number, got {type(row['answer']).__name__}"
        if isinstance(row.get("answer"), float) and not math.isfinite(row["answer"]):
            return f"field 'answer': expected text or a number, got {row['answer']}"
        return ""
