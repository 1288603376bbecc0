"""Rewards from a judge: a chat model that grades, or any service that speaks JSON or gRPC.

    judge        whole = grade / best,   grade the last number of the model's answer to `question`
    http_judge   whole = score,          POST {"prompt", "answer", "reference"} -> {"score": number or null}
    grpc_judge   whole = score,          opd.wire.v1.JudgeService/Judge of protos/opd/wire/v1/judge.proto

The reward is multiplied by `weight`; with `adds` it is a part beside the verdict. If a judge is down, hangs or gives no
readable answer, the reward of the row is unknown, never 0, and counted in metric judge/unknown. Answers are cached by
content (`opd.tasks.chat`), so a step that is repeated is judged alike. Source: ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from opd.tasks.grpc_judge import GrpcSettings
from opd.tasks.judges import ChatScorer, GraderSettings, GrpcScorer, HttpScorer, ScorerSettings
from student.rl.rewards.asked import Asked, AskedSettings, AskedSettings_co

if TYPE_CHECKING:
    from opd.tasks.prompt import Prompt


class Judged(Asked[AskedSettings_co]):
    """Base of rewards from a judge, which the verifier of its kind asks in the same way."""

    Scorer: ClassVar[Any]

    def __init__(self, settings: AskedSettings_co) -> None:
        super().__init__(settings)
        self.client = self.Scorer(settings)

    def value(self, prompt: Prompt, answer: str) -> float | None:
        """The judge's score; None if it gives none."""
        found: float | None = self.client.score(prompt, answer)
        return found

    def close(self) -> None:
        """Close the connection."""
        self.client.close()


class JudgeSettings(AskedSettings, GraderSettings):
    """Settings of a chat model that grades."""


class Judge(Judged[JudgeSettings]):
    """A grade from a chat model at an OpenAI-compatible endpoint."""

    Scorer = ChatScorer


class HttpJudgeSettings(AskedSettings, ScorerSettings):
    """Settings of a service that scores."""


class HttpJudge(Judged[HttpJudgeSettings]):
    """A score from any HTTP service that speaks JSON."""

    Scorer = HttpScorer


class GrpcJudgeSettings(AskedSettings, GrpcSettings):
    """Settings of a judge that speaks gRPC."""


class GrpcJudge(Judged[GrpcJudgeSettings]):
    """A score from any gRPC service (judge.proto)."""

    Scorer = GrpcScorer
