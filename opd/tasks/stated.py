"""Verification of short answers within free text: a phrase, the letter of a choice, or a pattern."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import regex
from pydantic import Field

from opd.config import Settings, parse_settings
from opd.errors import ConfigError, one_line
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import NO_REFERENCE, PlainVerifier, Verdict

_ANSWERS = re.compile(
    r"(?i:answer|option|choice)(?:\s+is)?\s*[:=]?[\s*_(\[]*([A-Z])(?![\w'])"  # "the answer is (B)", "Answer: **B**"
    r"|\\boxed\{(?:\\text\{)?[(\s]*([A-Z])[)\s]*\}"
)
_NAMES = re.compile(
    r"\(([A-Z])\)"
    r"|^[\s*_]*([A-Z])[\s*_]*(?:[).:\]]|$)",  # a line that begins with "B." or is a "B"
    re.MULTILINE,
)


class ContainsVerifier(PlainVerifier):
    """The completion contains the answer, as whole words.

    Correct if the answer occurs in the completion as whole words; case and white space do not matter. A number is not
    found within a longer one. Unknown without an answer.
    """

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        wanted = _plain(prompt.answer or "")
        if not wanted:
            return Verdict.unknown(NO_REFERENCE)
        # Where words are written without spaces, as in Chinese, a phrase has no ends that could be seen.
        before = "" if _wide(wanted[0]) else r"(?<!\w)(?<!\d[.,])"
        after = "" if _wide(wanted[-1]) else r"(?!\w)(?![.,]\d)"
        found = re.search(before + re.escape(wanted) + after, _plain(completion))
        return Verdict.of(found is not None, f"expected {wanted[:80]!r} in it")


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


class ChoiceVerifier(PlainVerifier):
    """The completion chooses the letter that is the answer.

    Correct if the last choice that the completion states is the letter of the answer: in "the answer is B" or in a box,
    or else "(B)", or a line that begins with "B." or is a "B". Unknown if the reference is not a single letter.
    """

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        if prompt.answer is None:
            return Verdict.unknown(NO_REFERENCE)
        wanted = prompt.answer.strip(" ().:").upper()
        if not re.fullmatch("[A-Z]", wanted):
            return Verdict.unknown("the prompt's reference answer is not the letter of a choice")
        found = self.extract(prompt, completion)
        return Verdict.of(found == wanted, f"expected {wanted}, found {found or 'no choice'}")

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The letter that is chosen last."""
        # A letter by itself may be small; within a text, small letters are words.
        text = completion.strip().upper() if len(completion.strip(" ().:*_\n")) == 1 else completion
        for pattern in (_ANSWERS, _NAMES):
            if stated := [match[match.lastindex or 0] for match in pattern.finditer(text)]:
                return stated[-1]
        return None


class RegexSettings(Settings):
    """Options of the verifier `regex`."""

    pattern: str | None = Field(
        None, description="Pattern for all prompts; null: each prompt's reference answer is its pattern."
    )
    ignore_case: bool = Field(True, description="Whether upper and lower case are the same.")


class RegexVerifier(PlainVerifier):
    """The completion matches a pattern.

    Correct if a regular expression is found in the completion: the option `pattern`, or else the prompt's answer.

    Unknown without a valid pattern, or if the search takes longer than the time-out.
    """

    Options = RegexSettings

    def __init__(self, timeout: float = 10.0, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(timeout)
        self.options = parse_settings(RegexSettings, options or {}, source="prompts.verifier_options")
        self._flags = regex.IGNORECASE if self.options.ignore_case else 0
        if self.options.pattern is not None:
            try:
                regex.compile(self.options.pattern, self._flags)
            except regex.error as error:
                raise ConfigError(
                    f"prompts.verifier_options.pattern {self.options.pattern!r} is not a valid pattern: "
                    f"{one_line(error)}; correct it."
                ) from error

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        pattern = prompt.answer if self.options.pattern is None else self.options.pattern
        if not pattern:
            return Verdict.unknown(NO_REFERENCE)
        try:
            found = regex.search(pattern, completion, self._flags, timeout=self.timeout)
        except regex.error as error:
            return Verdict.unknown(f"the pattern {pattern[:80]!r} is not valid: {one_line(error, 80)}")
        except TimeoutError:
            return Verdict.unknown(f"the search took longer than {self.timeout:g} s")
        return Verdict.of(found is not None, f"no match of {pattern[:80]!r}")
