"""Rewards from a judge: a chat model that grades, or any service that speaks JSON or gRPC.

    judge        whole = grade / best,   grade the last number of the model's answer to `question`
    http_judge   whole = score,          POST {"prompt", "answer", "reference"} -> {"score": number or null}
    grpc_judge   whole = score,          opd.wire.v1.JudgeService/Judge of protos/opd/wire/v1/judge.proto

With `adds` the reward is a part beside the verdict, times `weight`. A judge that is down, hangs, or says nothing that
can be read leaves the reward of its row unknown, counted in metric judge/unknown, and never 0. Its answers are kept by
content (`opd.tasks.chat`), so a step that is taken again is judged alike. Source: ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.tasks.chat import ChatClient, JsonClient
from opd.tasks.grpc_judge import GrpcJudgeClient, GrpcSettings
from opd.tasks.judges import GraderSettings, ScorerSettings, graded, scored
from student.rl.rewards.asked import Asked, AskedSettings

if TYPE_CHECKING:
    from opd.tasks.prompt import Prompt


class JudgeSettings(AskedSettings, GraderSettings):
    """Settings of a chat model that grades."""


class Judge(Asked):
    """A chat model that grades; see the module."""

    settings_type = JudgeSettings
    settings: JudgeSettings

    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__(settings)
        self.client = ChatClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """See the module."""
        return graded(self.client, self.settings, prompt, answer)


class HttpJudgeSettings(AskedSettings, ScorerSettings):
    """Settings of a service that scores."""


class HttpJudge(Asked):
    """A service that scores; see the module."""

    settings_type = HttpJudgeSettings
    settings: HttpJudgeSettings

    def __init__(self, settings: HttpJudgeSettings) -> None:
        super().__init__(settings)
        self.client = JsonClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """See the module."""
        return scored(self.client, self.settings.path, prompt, answer)


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
        return scored(self.client, "judge", prompt, answer)

    def close(self) -> None:
        """Close the channel."""
        self.client.close()
