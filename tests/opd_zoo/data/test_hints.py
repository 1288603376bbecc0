"""KnowRL's choice: sets that leave-one-out gets wrong, ties, and what is asked."""

from opd_zoo.data.hints import chosen_hints


def test_where_single_removals_help_but_the_pair_hurts_the_pair_is_not_removed() -> None:
    table = {(0, 1, 2): 0.5, (1, 2): 0.6, (0, 2): 0.6, (0, 1): 0.3, (2,): 0.2, (0,): 0.1, (1,): 0.1, (): 0.0}
    alone = tuple(i for i in range(3) if table[tuple(j for j in range(3) if j != i)] < table[0, 1, 2])
    assert table[alone] == 0.2  # what leave-one-out keeps
    assert table[chosen_hints(3, table.__getitem__)] == 0.6


def test_of_equal_sets_the_smallest_is_taken_and_a_needed_hint_stays() -> None:
    def accuracy(hints: tuple[int, ...]) -> float:
        return 0.9 if 1 in hints else 0.4

    assert chosen_hints(4, accuracy) == (1,)
    assert chosen_hints(3, lambda hints: 0.5) == ()
    asked: list[tuple[int, ...]] = []
    chosen_hints(5, lambda hints: asked.append(hints) or 0.5, most=2)  # type: ignore[func-returns-value]
    assert len(asked) == len(set(asked)) <= 1 + 5 + 4


def test_a_fall_within_delta_does_not_make_a_hint_needed() -> None:
    table = {(0, 1): 0.8, (0,): 0.75, (1,): 0.3, (): 0.1}
    assert chosen_hints(2, table.__getitem__) == (0, 1)
    assert chosen_hints(2, table.__getitem__, delta=0.1) == (0, 1)  # tried, and still the best
    table[0, 1] = table[0,] = 0.8
    assert chosen_hints(2, table.__getitem__, delta=0.1) == (0,)
