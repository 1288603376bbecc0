"""Near-duplicates without a model: what counts as equal, and how near two texts are."""

from random import Random

import numpy as np
import pytest

from opd_zoo.data.near import BANDS, ROWS, Index, key_of, normalised, signature

TEXT = "If a train leaves at 5 pm and travels 60 miles per hour, how far does it get by 8 pm on the same day?"


def jaccard(one: str, other: str, n: int) -> float:
    def grams(text: str) -> set[tuple[str, ...]]:
        words = normalised(text)
        return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}

    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


def test_spaces_punctuation_and_case_make_no_difference() -> None:
    assert key_of("  What is\n$2+2$ ?") == key_of("what is 2 2") != key_of("what is 22")
    index = Index(["other", TEXT], n=5)
    assert index.nearest(TEXT.upper().replace(" ", "  ")) == (1, 1.0)


def test_the_share_of_equal_entries_estimates_the_share_of_equal_sequences() -> None:
    words, random = normalised(TEXT * 3), Random(0)
    for changed in (1, 4, 10):
        other = [f"w{i}" if i in random.sample(range(len(words)), changed) else word for i, word in enumerate(words)]
        found = float((signature(" ".join(words), 3) == signature(" ".join(other), 3)).mean())
        assert found == pytest.approx(jaccard(" ".join(words), " ".join(other), 3), abs=3 / np.sqrt(BANDS * ROWS))


def test_a_paraphrase_of_a_text_is_found_among_many_and_an_unrelated_one_is_not() -> None:
    random = Random(1)
    vocabulary = [f"word{i}" for i in range(500)]
    texts = [" ".join(random.choices(vocabulary, k=30)) for _ in range(300)]
    index = Index([*texts, TEXT], n=3)
    place, similarity = index.nearest(TEXT.replace("miles", "kilometres"))
    assert place == 300 and 0.5 < similarity < 1
    assert index.nearest("Nothing like any of them at all, whatever one may think of it.")[1] < 0.2
    assert Index([], n=3).nearest(TEXT) == (-1, 0.0)
