"""Judges of answers, which verifiers compare with a threshold and rewards weigh: chat models, JSON or gRPC services.

    chat    score = grade / best,   grade the last number of the model's answer to `question` (8 in "8/10")
    HTTP    score = number,         POST {"prompt", "answer", "reference"} -> {"score": number or null}
    gRPC    score = number,         opd.wire.v1.JudgeService/Judge of protos/opd/wire/v1/judge.proto

As a verifier (`verifier: chat_judge`, `http_judge` or `grpc_judge` with `verifier_options`), a score of at least
`threshold` is correct. A lower one is wrong with partial credit: the score, or the score divided by a threshold above
1. If a judge is down, hangs, or answers with something that cannot be read, the answer is unknown (metric
unknown_share), never wrong. Scores are cached by content, see `opd.tasks.chat`.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings, parse_settings
from opd.tasks.chat import CachingClient, ChatClient, ChatFailed, ChatSettings, EndpointSettings, JsonClient
from opd.tasks.grpc_judge import GrpcJudgeClient, GrpcSettings
from opd.tasks.messages import message_text
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict, Verifier

_GRADE = re.compile(r"((?<!\d)-?\d+(?:\.\d+)?)(?:[\s*_()}]*(?:/|out of)[\s*_]*\d+(?:\.\d+)?)?")
"""A number, without the maximum it may be followed by: "8/10", "**8**/10" and "8 (out of 10)" are an 8."""


class GraderSettings(ChatSettings):
    """How a chat model is asked for a grade."""

    question: str = Field(
        "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nReference:\n{reference}\n\nGrade the answer from 0 to 10. End "
        "with the grade alone.",
        description="Question to the judge, in which {prompt}, {answer} and {reference} are replaced by those texts. "
        "The last number of its reply is the grade.",
    )
    best: float = Field(
        10.0,
        gt=0,
        description="Grade that counts as a score of 1; grades are clipped to the range from 0 to it, and divided by "
        "it.",
    )


class ScorerSettings(EndpointSettings):
    """How a service that speaks JSON is asked for a score."""

    path: str = Field("", description="Path that is appended to the endpoint for every call.")


class ChatScorer(ChatClient):
    """Asks a chat model for grades."""

    settings: GraderSettings

    def score(self, prompt: Prompt, answer: str) -> float | None:
        """The grade, in [0, 1]; None if the model's answer contains no number.

        Raises:
            ChatFailed: if the model gave no answer.
        """
        found = _GRADE.findall(self.ask([{"role": "user", "content": filled(self.settings.question, prompt, answer)}]))
        best = self.settings.best
        return min(max(float(found[-1]), 0.0), best) / best if found else None


class HttpScorer(JsonClient):
    """Asks a service that speaks JSON for scores."""

    settings: ScorerSettings

    def score(self, prompt: Prompt, answer: str) -> float | None:
        """The score, if it is finite; None if the service gives none.

        Raises:
            ChatFailed: if the service gave no answer.
        """
        return _scored(self, self.settings.path, prompt, answer, prompt.answer)


class GrpcScorer(GrpcJudgeClient):
    """Asks a service that speaks gRPC for scores."""

    def score(self, prompt: Prompt, answer: str) -> float | None:
        """The score, as `HttpScorer.score` gives it."""
        return _scored(self, "judge", prompt, answer, prompt.answer or "")


def _scored(client: CachingClient, path: str, prompt: Prompt, answer: str, reference: str | None) -> float | None:
    score = client.post(path, {"prompt": text_of(prompt), "answer": answer, "reference": reference})["score"]
    return None if score is None else float(score)


def text_of(prompt: Prompt) -> str:
    """A prompt as one text; chat messages are joined, each with its role."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in prompt.messages)


def filled(question: str, prompt: Prompt, answer: str, **more: str) -> str:
    """A question with its placeholders filled in; placeholders in what is filled in are left alone."""
    values = {"prompt": text_of(prompt), "answer": answer, "reference": prompt.answer or "", **more}
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), question)


class _Threshold(Settings):
    """What verifiers add to a judge's settings."""

    threshold: float = Field(
        1.0,
        description="Score from which on an answer is correct. A lower score is its partial credit, divided by the "
        "threshold if that is above 1.",
    )


class ChatJudgeOptions(GraderSettings, _Threshold):
    """Options of verifier chat_judge."""


class HttpJudgeOptions(ScorerSettings, _Threshold):
    """Options of verifier http_judge."""


class GrpcJudgeOptions(GrpcSettings, _Threshold):
    """Options of verifier grpc_judge."""


class JudgeVerifier(Verifier):
    """Base class of judges as verifiers.

    Args:
        timeout: seconds after which a call counts as failed, unless the options set fewer.
        options: options of the verifier.
    """

    Options: ClassVar[type[Settings]]
    Scorer: ClassVar[Any]

    def __init__(self, timeout: float = 10.0, options: Mapping[str, Any] | None = None) -> None:
        parsed: Any = parse_settings(self.Options, options or {}, source="prompts.verifier_options")
        # prompts.verifier_timeout bounds every verifier; a judge's own limit can only be tighter.
        self.options = parsed.model_copy(update={"timeout": min(timeout, parsed.timeout)})
        self.client = self.Scorer(self.options)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        try:
            score = self.client.score(prompt, completion)
        except ChatFailed as error:
            return Verdict.unknown(str(error))
        if score is None:
            return Verdict.unknown("the judge did not give a score")
        threshold = self.options.threshold
        return Verdict.of(True) if score >= threshold else Verdict.partial(score / max(threshold, 1.0))

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self.client.close()


class ChatJudge(JudgeVerifier):
    """A grade by a chat model at an OpenAI-compatible endpoint."""

    Options, Scorer = ChatJudgeOptions, ChatScorer


class HttpJudge(JudgeVerifier):
    """A score by any service that speaks JSON."""

    Options, Scorer = HttpJudgeOptions, HttpScorer


class GrpcJudge(JudgeVerifier):
    """A score by any service that speaks gRPC (judge.proto)."""

    Options, Scorer = GrpcJudgeOptions, GrpcScorer
