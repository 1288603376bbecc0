"""Several sources, interleaved in fixed proportions, with one position counter for all of them."""

from collections.abc import Sequence
from dataclasses import replace

from opd.tasks.prompt import Prompt
from opd.tasks.source import Contents, Labels, Measure, PromptSource, Split
from opd.tasks.verdict import Verdict

_PART = "part"
"""Key in `Prompt.extra` with the index of the source."""


class MixedSource(PromptSource):
    """Weighted round robin: weights 2 and 1 repeat the pattern a, b, a.

    The pattern is fixed, so a position determines the source and the position in it, and every source gives each of its
    prompts exactly as often as on its own.
    """

    def __init__(self, parts: Sequence[tuple[PromptSource, int]]) -> None:
        self._sources = [source for source, _ in parts]
        self._weights = [weight for _, weight in parts]
        # The k-th of w prompts of a source is at (k + 1/2) / w of the pattern, so they are evenly spread.
        slots = sorted(
            ((k + 0.5) / weight, part, k) for part, weight in enumerate(self._weights) for k in range(weight)
        )
        self._pattern = [(part, k) for _, part, k in slots]

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        found = []
        for index in range(start, start + count):
            # Only arithmetic, so that a resumed run knows every source's position from one number.
            block, slot = divmod(index, len(self._pattern))
            part, rank = self._pattern[slot]
            (prompt,) = self._sources[part].prompts(split, 1, block * self._weights[part] + rank)
            found.append(replace(prompt, extra={**prompt.extra, _PART: part}))
        return found

    def limit(self, measure: Measure, longest: int, *, drop: bool) -> int:
        return sum(source.limit(measure, longest, drop=drop) for source in self._sources)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        source = self._source_of(prompt)
        if source is None:
            return Verdict.unknown("the prompt does not come from one of this mix's sources")
        return source.verify(prompt, completion)

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        source = self._source_of(prompt)
        return None if source is None else source.extract(prompt, completion)

    def _source_of(self, prompt: Prompt) -> PromptSource | None:
        part = prompt.extra.get(_PART)
        return self._sources[part] if isinstance(part, int) and 0 <= part < len(self._sources) else None

    def labels(self) -> Labels | None:
        """See `PromptSource.labels`; unknown if those of one source are."""
        found = [source.labels() for source in self._sources]
        known = [labels for labels in found if labels is not None]
        return frozenset().union(*known) if len(known) == len(found) else None

    def contents(self) -> dict[str, Contents]:
        """See `PromptSource.contents`; names get a number if two sources read different rows or columns of one file."""
        found: dict[str, Contents] = {}
        for number, source in enumerate(self._sources, 1):
            for name, held in source.contents().items():
                found[name if found.get(name, held) == held else f"{name} (source {number} of the mix)"] = held
        return found

    def close(self) -> None:
        for source in self._sources:
            source.close()
