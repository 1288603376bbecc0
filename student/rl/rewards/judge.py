"""Rewards from a judge: a chat model that grades, or any service that speaks JSON or gRPC.

    judge        whole = grade / best,   grade the last number of the model's answer to `question`
    http_judge   whole = score,          POST {"prompt", "answer", "reference"} -> {"score": number or null}
    grpc_judge   whole = score,          opd.wire.v1.JudgeService/Judge of protos/opd/wire/v1/judge.proto

With `adds` the reward is a part beside the verdict, times `weight`. A judge that is down, hangs, or says nothing that
can be read leaves the reward of its row unknown, counted in metric judge/unknown, and never 0. Its answers are kept by
content (`opd.tasks.chat`), so a step that is taken again is judged alike. Source: ours.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd.tasks.chat import ChatClient, ChatSettings, EndpointSettings, JsonClient
from opd.tasks.grpc_judge import GrpcJudgeClient, GrpcSettings
from student.rl.rewards.asked import Asked, AskedSettings

if TYPE_CHECKING:
    from opd.tasks.prompt import Prompt

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class JudgeSettings(AskedSettings, ChatSettings):
    """Settings of a chat model that grades."""

    question: str = Field(
        "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nReference:\n{reference}\n\nGrade the answer from 0 to 10. End "
        "with the grade alone.",
        description="What the judge is asked; {prompt}, {answer} and {reference} stand for those.",
    )
    best: float = Field(10.0, gt=0, description="The best grade; others are clipped to 0 and to it.")


class Judge(Asked):
    """A chat model that grades; see the module."""

    settings_type = JudgeSettings
    settings: JudgeSettings

    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__(settings)
        self.client = ChatClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """See the module."""
        text = filled(self.settings.question, prompt, answer)
        found = _NUMBER.findall(self.client.ask([{"role": "user", "content": text}]))
        return min(max(float(found[-1]), 0.0), self.settings.best) / self.settings.best if found else None


class HttpJudgeSettings(AskedSettings, EndpointSettings):
    """Settings of a service that scores."""

    path: str = Field("", description="Put behind the endpoint.")


class HttpJudge(Asked):
    """A service that scores; see the module."""

    settings_type = HttpJudgeSettings
    settings: HttpJudgeSettings

    def __init__(self, settings: HttpJudgeSettings) -> None:
        super().__init__(settings)
        self.client = JsonClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """See the module."""
        body = {"prompt": text_of(prompt), "answer": answer, "reference": prompt.answer}
        return score_of(self.client.post(self.settings.path, body))


class GrpcJudgeSettings(AskedSettings, GrpcSettings):
    """Settings of a judge that speaks gRPC."""


class GrpcJudge(Asked):
    """A judge that speaks gRPC; see the module."""

    settings_type = GrpcJudgeSettings
    settings: GrpcJudgeSettings

    def __init__(self, settings: GrpcJudgeSettings) -> None:
        super().__init__(settings)
        self.client = GrpcJudgeClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """See the module."""
        body = {"prompt": text_of(prompt), "answer": answer, "reference": prompt.answer or ""}
        return score_of(self.client.post("judge", body))

    def close(self) -> None:
        """Close the channel."""
        self.client.close()


def score_of(said: Any) -> float | None:
    """The finite number under "score" in what a service said; None where there is none."""
    score = said.get("score") if isinstance(said, dict) else None
    return float(score) if isinstance(score, int | float) and math.isfinite(score) else None


def text_of(prompt: Prompt) -> str:
    """What a prompt says, in one text."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def filled(question: str, prompt: Prompt, answer: str, **more: str) -> str:
    """A question with its places filled; what fills them is not looked at again."""
    values = {"prompt": text_of(prompt), "answer": answer, "reference": prompt.answer or "", **more}
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), question)
