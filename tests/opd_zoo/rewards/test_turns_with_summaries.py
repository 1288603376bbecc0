"""What rewards and judges of turns make of an episode that the student has summarised."""

from typing import Any

import numpy as np
import pytest
from rows import make_row
from summarised import PATH, played

from opd_lab.tiny.tokenizer import make_tokenizer
from opd_zoo.rewards.profiling import Profiling, ProfilingSettings
from opd_zoo.turns import with_answer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def test_a_summary_is_paid_nothing_where_turns_without_measures_are_punished(tokenizer: Any) -> None:
    row, _ = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]])
    row.notes["correct/0"] = 1.0
    Profiling(ProfilingSettings(name="profiling", penalty=-1.0)).reward([row], None)  # type: ignore[arg-type]
    assert row.turn_rewards == (1.0, -1.0, 0.0, -1.0, 0.0, -1.0)


def test_a_judge_of_turns_reads_what_the_student_had_read_and_what_was_answered(tokenizer: Any) -> None:
    row, _ = played(tokenizer, [PATH[0], PATH[1], "7", PATH[2], "8", PATH[3]])
    a, b, c, d = PATH
    start = tokenizer.decode(row.prompt_ids, skip_special_tokens=True)
    read = [tokenizer.decode(with_answer(row, turn), skip_special_tokens=True).removeprefix(start) for turn in range(6)]
    assert read == [f"{a}{a}", f"{a}{a}{b}{b}", f"{a}{a}{b}sum7{b}", f"7{b}{c}{c}", f"7{b}{c}sum8{c}", f"8{c}{d}"]
    plain = make_row([5, 6, 7], prompt_ids=np.array([1], np.uint32))
    assert with_answer(plain, 0).tolist() == [1, 5, 6, 7]
