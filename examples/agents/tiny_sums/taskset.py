"""A task set for verifiers 0.4.0: the sum of the row that the harness wrote (``ROW_FILE``)."""

import json
import os

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    pass


class TinySumsTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        with open(os.environ["ROW_FILE"]) as file:
            row = json.load(file)
        return [SumTask(SumData(prompt=row["prompt"], answer=str(row["sum"])), self.config.task)]
