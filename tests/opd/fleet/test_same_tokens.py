"""Tokenizers may differ in what the student never writes, and in nothing else."""

from collections.abc import Sequence
from typing import Any

import pytest

from opd.errors import IncompatibleTeacherError
from opd.fleet.same_tokens import check_same_tokens
from opd.wire.fingerprint import token_bytes, tokenizer_fingerprint
from opd.wire.v1 import teacher_pb2 as pb
from tests.conftest import chat_tokenizer


class Served:
    """A source that sends a tokenizer's tokens, 100 at once; none if it has no tokenizer."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokens = token_bytes(tokenizer) if tokenizer else []

    def tokens(self, teacher: str, start: int) -> Sequence[bytes]:
        return self._tokens[start : start + 100]


def info_of(tokenizer: Any) -> pb.TeacherInfo:
    known = pb.TokenizerInfo(fingerprint=tokenizer_fingerprint(tokenizer), size=len(tokenizer))
    return pb.TeacherInfo(name="t", tokenizer=known)


def check(student: Any, teacher: Any, source: Served | None = None) -> None:
    check_same_tokens(source or Served(teacher), info_of(teacher), student)  # type: ignore[arg-type]


def other_pad() -> Any:
    """The tokenizer with an ordinary token as padding."""
    tokenizer = chat_tokenizer("<|im_end|>")
    tokenizer.pad_token = "!"
    assert tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(chat_tokenizer("<|im_end|>"))
    return tokenizer


def longer(*tokens: str) -> Any:
    tokenizer = chat_tokenizer("<|im_end|>")
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("of", ["student", "teacher"])
def test_another_choice_of_the_padding_is_no_difference(of: str) -> None:
    usual = chat_tokenizer("<|im_end|>")
    check(*((other_pad(), usual) if of == "student" else (usual, other_pad())))


def test_a_teacher_may_have_further_tokens() -> None:
    check(chat_tokenizer("<|im_end|>"), longer("<extra>", "<more>"))


@pytest.mark.parametrize(
    ("student", "teacher", "said"),
    [
        (("<a>",), (), "id 260 is '<a>' to the student and nothing to the teacher"),
        (("<a>", "<b>"), ("<a>", "<c>"), "id 261 is '<b>' to the student and '<c>' to the teacher"),
    ],
)
def test_the_first_id_that_means_something_else_is_named(student: Any, teacher: Any, said: str) -> None:
    with pytest.raises(IncompatibleTeacherError, match=rf"{said}.*\(opd answers"):
        check(longer(*student), longer(*teacher))


def test_tokens_that_a_source_does_not_send_are_not_taken_for_equal() -> None:
    with pytest.raises(IncompatibleTeacherError, match="different tokenizers"):
        check(chat_tokenizer("<|im_end|>"), longer("<extra>"), Served())


def test_a_teacher_without_a_tokenizer_is_told_to_get_one() -> None:
    with pytest.raises(IncompatibleTeacherError, match=r"'t' \(m\).* without a tokenizer.* copy"):
        check_same_tokens(Served(), pb.TeacherInfo(name="t", model="m"), chat_tokenizer("<|im_end|>"))  # type: ignore[arg-type]
