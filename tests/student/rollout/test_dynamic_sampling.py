"""Dynamic sampling keeps whole groups whose rewards differ, and asks models about nothing else."""

from collections import Counter
from itertools import permutations

import pytest
import thread_ranks
from thread_ranks import Ordered, build, of, place, sampled, together

from student.data.plan import PlannedRow
from student.data.row import Row
from student.plugin.strategy import STRATEGIES


def test_models_are_asked_about_what_it_keeps_and_nothing_else() -> None:
    def answer(planned: PlannedRow) -> Row:
        return sampled(planned, float(not place(planned) and planned.key.sample == 1))

    ((rows, sampling, _),) = together(1, lambda: build("dynamic_sampling"), answer, plan=of(4), groups=6)
    asked = sampling._scorer.asked
    assert asked == sampling.scored and {id(row) for row in asked} == {id(row) for row in rows}
    assert len(asked) == len(rows) < len(sampling.rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_surplus_of_a_round_is_cut_in_the_order_drawn_so_no_prompt_loses_more_than_others(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All orders of four prompts, one of which teaches nothing; two are wanted."""
    prompts = thread_ranks.SOURCE.prompts("train", 4)
    dull = prompts[0].uid

    def answer(planned: PlannedRow) -> Row:
        return sampled(planned, float(planned.key.uid != dull and planned.key.sample % 2 == 0))

    chosen: Counter[str] = Counter()
    for order in permutations(prompts):
        monkeypatch.setattr(thread_ranks, "SOURCE", Ordered(order))
        parts = together(ranks, lambda: build("dynamic_sampling", rounds=2), answer, groups=2)
        found = {row.key.uid for part, _, _ in parts for row in part}
        assert found == set([prompt.uid for prompt in order if prompt.uid != dull][:2])
        chosen.update(found)
    assert dull not in chosen and set(chosen.values()) == {24 * 2 // 3}


def test_it_says_how_its_formula_is_known() -> None:
    assert STRATEGIES.load("dynamic_sampling").evidence in {"text and code", "text", "abstract", "inferred", "own"}
