"""KnowRL's choice of hints: the smallest set of a problem's hints with which the model answers best.

    without_i    the accuracy with all hints but i;   all the accuracy with all
    needed       hints with without_i < all - delta
    chosen       needed and, of all subsets of the others, the one of the highest accuracy; of equal ones the smallest

Removing one hint may help while removing two hurts, so what leave-one-out calls superfluous is tried jointly. With more
than `most` such hints, those whose removal helps most are removed beforehand. Source: KnowRL, arXiv 2604.12627 (text:
leave-one-out pruning, then constrained subset search; its selection code is not public, the order is ours).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from typing import Any

from opd.tasks.chat import ChatClient
from opd.tasks.prompt import Prompt


def chosen_hints(
    count: int, accuracy: Callable[[tuple[int, ...]], float], *, delta: float = 0.0, most: int = 6
) -> tuple[int, ...]:
    """Places of the chosen hints, in order.

    Args:
        count: number of hints.
        accuracy: the accuracy with a set of hints, given as places in order; it is asked once about each set.
        delta: how much an accuracy may fall before a hint counts as needed.
        most: most hints of which all subsets are tried.
    """
    known = cache(accuracy)
    every = tuple(range(count))
    whole = known(every)
    without = {i: known(tuple(j for j in every if j != i)) for i in every}
    needed = [i for i in every if without[i] < whole - delta]
    # Ties keep the earlier hint.
    open_ = sorted((i for i in every if i not in needed), key=lambda i: (without[i], i))[:most]
    subsets = [s for size in range(len(open_) + 1) for s in combinations(sorted(open_), size)]
    sets = [tuple(sorted([*needed, *subset])) for subset in subsets]
    return max(sets, key=lambda hints: (known(hints), -len(hints)))


def accuracy_with(
    text: str, answer: str, hints: Sequence[str], client: ChatClient, verifier: Any, samples: int
) -> Callable[[tuple[int, ...]], float]:
    """A measure of the accuracy with a set of hints: the share of right answers of a model, asked once about each set.

    Args:
        text: the problem.
        answer: its answer.
        hints: all hints.
        client: the model.
        verifier: judges its answers; what it cannot tell counts as wrong.
        samples: number of answers with each set.
    """

    @cache
    def measured(places: tuple[int, ...]) -> float:
        shown = f"{text}\n\nHints:\n{told(hints, places)}" if places else text
        right = 0
        for sample in range(samples):
            # With a seed of its own, because equal questions have one answer in the cache.
            question = {
                "model": client.settings.model,
                "messages": [{"role": "user", "content": shown}],
                "temperature": client.settings.temperature,
                "max_tokens": client.settings.max_tokens,
                "seed": sample,
            }
            said = client.post("/chat/completions", question)["choices"][0]["text"]
            verdict = verifier.verify(Prompt.make(text, answer=answer), str(said))
            right += verdict.known and verdict.value >= 1.0
        return right / samples

    return measured


def told(hints: Sequence[str], places: Sequence[int]) -> str:
    """The chosen hints as text, one a line."""
    return "\n".join(hints[place] for place in places)
