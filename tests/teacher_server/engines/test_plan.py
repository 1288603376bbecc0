"""Plans hold every row once, respect the token budget, and share prompts where that is cheaper."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from teacher_server.engines.plan import Pass, plan_independent, plan_passes, settled_width


def _prompt(number: int, length: int) -> bytes:
    return number.to_bytes(4, "little") * length


def _plan(rows: list[tuple[int, int, int]], max_tokens: int, share: bool = True, packed: bool = False) -> list[Pass]:
    prompts = [_prompt(number, length) for number, length, _ in rows]
    return plan_passes(prompts, [(p, t) for _, p, t in rows], max_tokens=max_tokens, share=share, packed=packed)


_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 400)), max_size=40)


@given(_rows, st.integers(1, 3000), st.booleans(), st.booleans())
def test_every_row_is_in_exactly_one_pass(rows, max_tokens: int, share: bool, packed: bool) -> None:
    plan = _plan(rows, max_tokens, share, packed)
    assert sorted(row for one in plan for row in one.rows) == list(range(len(rows)))


@given(_rows, st.integers(1, 3000), st.booleans(), st.booleans())
def test_a_pass_of_several_rows_stays_within_the_token_budget(rows, max_tokens: int, share: bool, packed: bool) -> None:
    for one in _plan(rows, max_tokens, share, packed):
        widths = [rows[row][2] - 1 if one.shared else rows[row][1] + rows[row][2] - 1 for row in one.rows]
        if len(widths) > 1:
            assert (sum(widths) if packed and not one.shared else len(widths) * max(widths)) <= max_tokens


@given(_rows, st.integers(1, 3000))
def test_prompts_of_a_shared_pass_have_one_length(rows, max_tokens: int) -> None:
    for one in _plan(rows, max_tokens):
        assert not one.shared or len({rows[row][1] for row in one.rows}) == 1


def test_samples_of_a_long_prompt_pay_it_once() -> None:
    assert _plan([(7, 1000, 50)] * 8, 16_384) == [Pass(tuple(range(8)), shared=True)]


def test_groups_with_prompts_of_one_length_share_one_pass() -> None:
    plan = _plan([(group, 200, 30) for group in range(3) for _ in range(4)], 16_384)
    assert len(plan) == 1 and plan[0].shared and len(plan[0].rows) == 12


def test_sharing_is_not_worth_a_forward_for_a_short_prompt() -> None:
    assert not any(one.shared for one in _plan([(7, 4, 50)] * 3, 16_384))


def test_different_prompts_are_never_shared() -> None:
    assert not any(one.shared for one in _plan([(i, 1000, 50) for i in range(4)], 16_384))


def test_rows_of_very_different_length_are_not_padded_to_each_other() -> None:
    plan = _plan([(i, 10, 2000 if i == 0 else 20) for i in range(9)], 100_000)
    assert sorted(len(one.rows) for one in plan) == [1, 8]


def test_packing_ignores_lengths() -> None:
    plan = _plan([(i, 10, 2000 if i == 0 else 20) for i in range(9)], 100_000, packed=True)
    assert len(plan) == 1


def test_a_group_too_large_for_one_pass_keeps_its_rows_adjacent_so_that_the_prompt_is_reused() -> None:
    plan = _plan([(7, 3000, 400)] * 8 + [(8, 3000, 400)] * 8, 4000)
    groups = [{row // 8 for row in one.rows} for one in plan]
    assert all(one.shared for one in plan)
    assert sum(a != b for a, b in itertools.pairwise(groups)) <= 2


@given(st.integers(1, 5000), st.integers(1, 6000))
def test_a_settled_width_belongs_to_the_row_alone_and_wastes_little(tokens: int, most: int) -> None:
    width = settled_width(tokens, most)
    assert width >= tokens
    assert width <= max(most, tokens)
    assert width - tokens < 16
    if width < most:
        assert width % 16 == 0


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), max_size=40), st.integers(16, 500))
def test_independent_passes_hold_every_row_once_at_its_width_within_the_budget(
    lengths: list[tuple[int, int]], max_tokens: int
) -> None:
    passes = plan_independent(lengths, max_tokens=max_tokens, most=170)
    assert sorted(row for one in passes for row in one.rows) == list(range(len(lengths)))
    for one in passes:
        assert {settled_width(sum(lengths[row]) - 1, 170) for row in one.rows} == {one.width}
        assert len(one.rows) == 1 or len(one.rows) * one.width <= max_tokens
