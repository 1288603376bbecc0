"""Prompts over the limit are found without encoding those that are within it for certain."""

import unicodedata
from typing import Any

import pytest

from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from opd.tasks.template import TemplateWatch
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.prompts import _bound, _lengths


class Counting:
    """A tokenizer that keeps the texts that it encodes."""

    def __init__(self) -> None:
        self.inner: Any = make_tokenizer()
        self.seen: list[str] = []

    def __call__(self, texts: list[str] | str, *, add_special_tokens: bool = True) -> Any:
        self.seen += texts if isinstance(texts, list) else []
        return self.inner(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _prompt(text: str) -> Prompt:
    return Prompt.make(text)


def test_only_texts_that_might_be_too_long_are_encoded_in_their_places() -> None:
    tokenizer = Counting()
    prompts = [_prompt(text) for text in ("1+1=", "x" * 90, "2+2=", "y" * 300)]
    found = list(_lengths(prompts, tokenizer, 100, TemplateWatch(tokenizer)))
    assert tokenizer.seen == ["x" * 90, "y" * 300]
    exact = [len(encode_prompt(prompt, tokenizer)) for prompt in prompts]
    assert found[1] == exact[1] and found[3] == exact[3] > 100
    assert all(exact[place] <= found[place] <= 100 for place in (0, 2))


@pytest.mark.parametrize("text", ["a", "12 + 34 =", "\ufdfa", "\u00e9\U0001f600", "\ufdfa" * 40])
def test_no_text_has_more_tokens_than_the_bound(text: str) -> None:
    # The most that can come of it: every byte of its longest normal form a token of its own.
    worst = max(len(unicodedata.normalize(form, text).encode()) for form in ("NFC", "NFD", "NFKC", "NFKD"))
    assert worst <= _bound(_prompt(text))


@pytest.mark.parametrize("text", [" ", "\n\n"])
def test_blanks_are_encoded_because_they_may_make_no_token(text: str) -> None:
    assert _bound(_prompt(text)) > 10**9
