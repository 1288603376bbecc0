"""Rewards from a judge: a chat model that grades, or any service that speaks JSON or gRPC.

    judge        whole = grade / best,   grade the last number of the model's answer to `question`
    http_judge   whole = score,          POST {"prompt", "answer", "reference"} -> {"score": number or null}
    grpc_judge   whole = score,          opd.wire.v1.JudgeService/Judge of protos/opd/wire/v1/judge.proto

The reward is multiplied by `weight`; with `adds` it is a part beside the verdict. If a judge is down, hangs or gives no
readable answer, the reward of the row is unknown, never 0, and counted in metric judge/unknown. Answers are cached by
content (`opd.tasks.chat`), so a step that is repeated is judged alike. Source: ours.
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


class Judge(Asked[JudgeSettings]):
    """A grade from a chat model at an OpenAI-compatible endpoint."""

    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__(settings)
        self.client = ChatClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """The grade over the best one; None if it cannot be read."""
        return graded(self.client, self.settings, prompt, answer)


class HttpJudgeSettings(AskedSettings, ScorerSettings):
    """Settings of a service that scores."""


class HttpJudge(Asked[HttpJudgeSettings]):
    """A score from any HTTP service that speaks JSON."""

    def __init__(self, settings: HttpJudgeSettings) -> None:
        super().__init__(settings)
        self.client = JsonClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """The service's score; None if it gives none."""
        return scored(self.client, self.settings.path, prompt, answer)


class GrpcJudgeSettings(AskedSettings, GrpcSettings):
    """Settings of a judge that speaks gRPC."""


class GrpcJudge(Asked[GrpcJudgeSettings]):
    """A score from any gRPC service (judge.proto)."""

    def __init__(self, settings: GrpcJudgeSettings) -> None:
        super().__init__(settings)
        self.client = GrpcJudgeClient(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """The service's score; None if it gives none."""
        return scored(self.client, "judge", prompt, answer)

    def close(self) -> None:
        """Close the channel."""
        self.client.close()
