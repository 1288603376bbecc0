"""DeepMath's decontamination, and ATLAS's lineage: which prompts repeat a benchmark, and where each comes from.

    decontaminate   drop a prompt of similarity >= `least` to a text of the benchmarks; with a judge, those of
                    similarity >= `asked` are shown to it beside the nearest text, and dropped where it says yes
    trace           the first source, in the order given, with a text of similarity >= `least` to the prompt

Both read the table as a stream and keep an index of the benchmarks or sources alone. Similarities are shares of equal
word sequences (`opd_zoo.data.near`); DeepMath retrieves by embeddings and asks a judge about all. Sources:
DeepMath-103K, arXiv 2504.11456, zwhe99/DeepMath; ATLAS (Celine-hxy/ATLAS; atomic sources by normalised text; its
scores of sources by trained checkpoints are not built).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from opd_zoo.data.near import Index


@dataclass(frozen=True, slots=True)
class Found:
    """A row, with the decision about it.

    Attributes:
        row: its columns.
        name: the benchmark or source of the nearest text; "" for none.
        similarity: how near it is, 0 to 1.
        kept: whether the row stays.
    """

    row: dict[str, Any]
    name: str
    similarity: float
    kept: bool


class Named:
    """An index over several named collections of texts.

    Args:
        collections: (name, texts), in order.
        n: words of a shingle.
    """

    def __init__(self, collections: Sequence[tuple[str, Iterable[str]]], n: int) -> None:
        self.ends: list[tuple[int, str]] = []
        self.index = Index(self._all(collections), n)

    def _all(self, collections: Sequence[tuple[str, Iterable[str]]]) -> Iterator[str]:
        count = 0
        for name, texts in collections:
            for text in texts:
                count += 1
                yield text
            self.ends.append((count, name))

    def nearest(self, text: str) -> tuple[str, int, float]:
        """(name, place among all texts, similarity) of the nearest text; ("", -1, 0.0) for none."""
        place, similarity = self.index.nearest(text)
        name = next((name for end, name in self.ends if place < end), "") if place >= 0 else ""
        return name, place, similarity


def decontaminate(
    rows: Iterable[tuple[dict[str, Any], str]],
    benchmarks: Named,
    *,
    least: float,
    asked: float = 1.1,
    same: Callable[[str, int], bool] = lambda text, place: False,
) -> Iterator[Found]:
    """What becomes of each row.

    Args:
        rows: rows with their texts.
        benchmarks: what they must not repeat.
        least: similarity from which a row is dropped.
        asked: similarity from which `same` decides, below `least`.
        same: whether a text means the same as the text at a place of the benchmarks.
    """
    for row, text in rows:
        name, place, similarity = benchmarks.nearest(text)
        dropped = similarity >= least or (similarity >= asked and same(text, place))
        yield Found(row, name, similarity, not dropped)


def trace(rows: Iterable[tuple[dict[str, Any], str]], sources: Named, *, least: float) -> Iterator[Found]:
    """Each row with the column `source`, null for none; rows that go back to a text that came before are dropped."""
    seen = set[int]()
    for row, text in rows:
        name, place, similarity = sources.nearest(text)
        known = similarity >= least
        # Rows that go back to one text of the sources are the same problem, however they are worded.
        repeated = known and place in seen
        seen |= {place} if known else set()
        yield Found({**row, "source": name if known else None}, name if known else "", similarity, not repeated)
