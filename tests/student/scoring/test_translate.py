"""Rows in the tokens of another tokenizer: spans cover the same bytes on both sides, whatever the two are made of."""

from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import KINDS, byte_level, word_piece

from opd.errors import DataError, IncompatibleTeacherError
from opd.tasks.prompt import Prompt
from opd.wire.fingerprint import token_bytes
from opd.wire.types import Scores
from opd.wire.v1 import teacher_pb2 as pb
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.translation import Translation
from student.scoring.translate import Translator

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TEXTS = [
    "Hello world, it's 12345.",
    " two  spaces\n\nand\tlines\r\n",
    "naïve Zoë 李雷💥👩‍👩‍👧 e\u0301x \u1e9b\u0323",
    "def f(x):\n    return x ** 2  # 3.14",
    "\n\nA response that begins with newlines.",
    "</s> is not a stop, and <|note|> no note",
]


@cache
def kind(name: str) -> Any:
    made = KINDS[name]()
    made.chat_template = CHAT
    return made


def info_of(tokenizer: Any, limit: int = 4096) -> pb.TeacherInfo:
    return pb.TeacherInfo(
        name="t",
        limits=pb.Limits(max_sequence_tokens=limit),
        tokenizer=pb.TokenizerInfo(eos_id=tokenizer.eos_token_id),
    )


@cache
def between(student: str, teacher: str) -> Translator:
    return Translator(info_of(kind(teacher)), kind(teacher), kind(student), [kind(student).eos_token_id])


def row_of(ids: Any, prompt: Prompt) -> Any:
    return SimpleNamespace(response_ids=np.array(ids, np.uint32), prompt=prompt, episode=None)


def translated(translator: Translator, ids: Any, prompt: Prompt | None = None) -> Translation:
    prompt = prompt or Prompt.make([{"role": "user", "content": "Say it."}])
    return translator.translate(row_of(ids, prompt), prompt)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [*encoded, tokenizer.eos_token_id]


def check_spans(found: Translation, student: Any, teacher: Any, ids: Any) -> None:
    """Every span has the same bytes on both sides, in order, and no token is in two."""
    mine, theirs = token_bytes(student), token_bytes(teacher)
    answer = found.item.response_ids
    assert len(answer) == len(found.of) and len(ids) == len(found.span)
    spans = [one for one in np.unique(found.span) if one >= 0]
    assert spans == [one for one in np.unique(found.of) if one >= 0]
    for side in (found.span, found.of):
        kept = side[side >= 0]
        assert (np.diff(kept) >= 0).all()
    for span in spans:
        own = b"".join(mine[int(i)] for i in np.array(ids)[found.span == span])
        other = b"".join(theirs[int(i)] for i in answer[found.of == span])
        assert own.lstrip(b" ") == other.lstrip(b" ") or {own, other} <= {b"</s>"}, (own, other)


@pytest.mark.parametrize(("student", "teacher"), [*product(KINDS, KINDS)])
def test_spans_have_the_same_bytes_on_both_sides(student: str, teacher: str) -> None:
    for text in TEXTS:
        ids = ids_of(kind(student), text)
        found = translated(between(student, teacher), ids)
        if "normalising" not in (student, teacher):
            check_spans(found, kind(student), kind(teacher), ids)
        assert found.aligned[-1]  # the stop event
        if "unigram" not in (student, teacher):
            assert found.aligned.all()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS)), st.data())
def test_any_tokens_at_all_are_translated(student: str, teacher: str, data: st.DataObject) -> None:
    """Tokens that no text encodes to, with bytes that are not UTF-8, cut anywhere."""
    size = len(kind(student))
    ids = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=30))
    found = translated(between(student, teacher), ids)
    assert len(found.item.response_ids) >= 1
    check_order(found)
    if student != teacher and "normalising" not in (student, teacher):
        check_bytes(found, student, teacher, ids)


def check_order(found: Translation) -> None:
    for side in (found.span, found.of):
        assert (np.diff(side[side >= 0]) >= 0).all()
    assert set(found.span[found.aligned]) == set(found.of[found.of >= 0])


def check_bytes(found: Translation, student: str, teacher: str, ids: list[int]) -> None:
    """Without special tokens, which have no text in common."""
    if not set(ids) & set(kind(student).all_special_ids):
        check_spans(found, kind(student), kind(teacher), ids)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.text(max_size=60))
def test_one_tokenizer_under_other_numbers_keeps_every_token(name: str, text: str) -> None:
    ids = ids_of(kind(name), text)
    found = translated(between(name, name), ids)
    assert found.item.response_ids.tolist() == ids
    assert found.span.tolist() == [*range(len(ids))] == found.of.tolist()


def test_a_students_own_choice_of_tokens_survives_under_other_numbers() -> None:
    ids = [kind("byte-level").get_vocab()[piece] for piece in "Hello"]  # which it would encode as fewer tokens
    assert translated(between("byte-level", "byte-level"), ids).item.response_ids.tolist() == ids


def test_a_character_that_the_limit_cut_has_no_loss() -> None:
    student = make_tokenizer()
    ids = [*student("ok 💥", add_special_tokens=False)["input_ids"]][:-2]  # half of the emoji
    found = translated(Translator(info_of(kind("byte-level")), kind("byte-level"), student, [1]), ids)
    assert found.aligned.tolist() == [True] * 3 + [False] * 2
    assert kind("byte-level").decode(found.item.response_ids) == "ok "


def test_bytes_that_are_no_text_are_read_byte_by_byte() -> None:
    student = make_tokenizer()
    broken = [token_bytes(student).index(b"\xff"), *student(" ok", add_special_tokens=False)["input_ids"]]
    found = translated(Translator(info_of(kind("byte-level")), kind("byte-level"), student, [1]), broken)
    assert found.aligned.all()
    without = translated(Translator(info_of(kind("unigram")), kind("unigram"), student, [1]), broken)
    # Unigram has no token for such a byte, and reads what follows.
    assert without.aligned.tolist() == [False, *[True] * 3] and (without.of >= 0).all()


def test_the_stop_token_becomes_the_one_that_ends_the_teachers_turn() -> None:
    student = make_tokenizer()
    found = translated(Translator(info_of(kind("byte-level")), kind("byte-level"), student, [1]), [10, 11, 1])
    assert found.item.response_ids[-1] == kind("byte-level").eos_token_id and found.aligned[-1]


def test_a_special_token_that_the_teacher_lacks_is_not_read_by_it() -> None:
    student = byte_level()
    note = student.get_vocab()["<|note|>"]
    ids = [*ids_of(student, "Hello")[:-1], note, *ids_of(student, " world")]
    found = translated(between("byte-level", "unigram"), ids)
    assert found.aligned.tolist() == [token != note for token in ids]
    assert kind("unigram").decode(found.item.response_ids) == "Hello world</s>"


def test_the_prompt_is_the_teachers_own_template() -> None:
    found = translated(between("byte-level", "unigram"), [5])
    prompt = found.item.token_ids[: found.item.prompt_length]
    assert kind("unigram").decode(prompt) == "[user] Say it.[assistant] ".replace("] ", "]\n").rstrip() or len(prompt)


@pytest.mark.parametrize("scheme", ["byte-fallback", "byte-fallback first"])
def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_after_a_newline(scheme: str) -> None:
    found = translated(between("byte-level", scheme), ids_of(kind("byte-level"), "Hello"))
    prompt = found.item.token_ids[: found.item.prompt_length]
    pieces = kind(scheme).convert_ids_to_tokens(found.item.response_ids)
    whole = kind(scheme)("[user]\nSay it.[assistant]\nHello", add_special_tokens=False)["input_ids"]
    assert [*prompt, *found.item.response_ids[:-1]] == whole and not pieces[0].startswith("▁")


def test_a_response_beyond_the_teachers_limit_has_a_signal_up_to_there() -> None:
    student, teacher = kind("byte-level"), kind("unigram")
    ids = ids_of(student, "Hello world, hello there, it's a test of the tests. " * 3)
    whole = translated(between("byte-level", "unigram"), ids)
    limit = whole.item.prompt_length + 9
    short = translated(Translator(info_of(teacher, limit), teacher, student, [student.eos_token_id]), ids)
    assert len(short.item.token_ids) == limit
    assert short.aligned.any() and not short.aligned.all()
    check_spans(short, student, teacher, ids)
    with pytest.raises(DataError, match=r"has .* tokens to teacher 't', which takes at most 2"):
        translated(Translator(info_of(teacher, 2), teacher, student, [0]), ids)


def test_a_tokenizer_from_whose_ids_the_text_cannot_be_had_is_refused() -> None:
    with pytest.raises(IncompatibleTeacherError, match=r"tokenizer of teacher 't' makes .*##.* of the text"):
        Translator(info_of(word_piece()), word_piece(), kind("byte-level"), [0])


def test_a_chat_without_a_template_is_refused() -> None:
    bare = byte_level()
    with pytest.raises(DataError, match="is a chat, but teacher 't' has no chat template"):
        translated(Translator(info_of(bare), bare, kind("unigram"), [1]), [5])


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS)), st.integers(0, 10**6))
def test_log_probs_of_spans_are_kept(student: str, teacher: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = ids_of(kind(student), TEXTS[seed % len(TEXTS)])
    found = translated(between(student, teacher), ids)
    answer = Scores(sampled=-rng.exponential(size=len(found.of)).astype(np.float32))
    behaviour = -rng.exponential(size=len(ids)).astype(np.float32)
    scores = found.scores(answer, behaviour)
    assert answer.sampled is not None and scores.sampled is not None
    for span in np.unique(found.span[found.aligned]):
        mine = scores.sampled[found.span == span].sum(dtype=np.float64)
        np.testing.assert_allclose(mine, answer.sampled[found.of == span].sum(dtype=np.float64), rtol=1e-5, atol=1e-5)
        ratios = (behaviour - scores.sampled)[found.span == span]
        np.testing.assert_allclose(ratios, ratios[0], atol=1e-5)
    assert (scores.sampled[~found.aligned] == behaviour[~found.aligned]).all()
