"""Verification by equality of text."""

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict


class ExactVerifier:
    """The completion equals the answer, white space aside.

    Correct if the completion equals the answer after normalising white space; unknown without an answer.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """See `Verifier.verify`."""
        if prompt.answer is None:
            return Verdict.unknown("the prompt has no reference answer")
        return Verdict.of(completion.split() == prompt.answer.split(), f"expected {prompt.answer[:80]!r}")

    def close(self) -> None:
        """Nothing to release."""
