"""Procedural tasks: problems drawn from a random stream, and split into training and held-out ones by content."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import ClassVar, Protocol

from opd.config import Settings, parse_settings
from opd.errors import ConfigError, DataError, PluginError, short
from opd.tasks.prompt import Prompt
from opd.tasks.registry import TASKS
from opd.tasks.settings import TaskSettings
from opd.tasks.source import Contents, Labels, Measure, PromptSource, Split, too_long
from opd.tasks.verdict import Verdict, extracted, guarded

HELDOUT_SHARE = 8
"""One in this many problems is held out."""

_PATIENCE = 200
"""Draws per wanted prompt after which a split counts as exhausted."""


class Task(Protocol):
    """What a procedural task provides: a class with its settings, created as `Task(settings)`.

    A task may also have `labels() -> Labels`, all pairs (teacher, domain) that `draw` can give its problems. Without
    it, only the first prompts can be checked for a teacher before a run. A task whose problems are already divided has
    `draw_from(random, split) -> Prompt`, with split "train" or "heldout", in place of the division by content.
    """

    Options: ClassVar[type[Settings]]

    def draw(self, random: Random) -> Prompt:
        """Draw a problem, which depends on the random stream only."""
        ...

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge a completion of a prompt from `draw`; an exception counts as unknown."""
        ...

    def close(self) -> None:
        """Release what the verifier holds."""
        ...


class ProceduralSource(PromptSource):
    """The stream of prompts of a procedural task.

    A problem's content hash decides whether it belongs to the held-out split, whatever seed drew it. So no seed, order
    or repetition can bring a held-out problem into training.
    """

    def __init__(self, task: Task, seed: int, settings: TaskSettings) -> None:
        self.task = task
        self.seed = seed
        self._settings = settings
        self._heldout: list[Prompt] = []
        self._stream = self._distinct_heldout()
        self._fits: Callable[[Sequence[Prompt]], list[bool]] = lambda prompts: [True] * len(prompts)

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        if split == "train":
            return self._drawn("train", range(start, start + count))
        while len(self._heldout) < start + count:
            prompt = next(self._stream, None)
            if prompt is None:
                raise DataError(
                    f"task {self._settings.task!r} has about {len(self._heldout)} distinct held-out prompts with these "
                    f"options, but {start + count} are wanted; ask for fewer or make the task larger."
                )
            self._heldout.append(prompt)
        return self._heldout[start : start + count]

    def limit(self, measure: Measure, longest: int, *, drop: bool) -> int:
        """See `PromptSource.limit`; the stream is endless, so prompts are measured as they are drawn."""

        def fits(prompts: Sequence[Prompt]) -> list[bool]:
            lengths = list(measure(prompts))
            for prompt, tokens in zip(prompts, lengths, strict=True):
                if tokens > longest and not drop:
                    raise too_long(prompt, tokens, 1, longest)
            return [tokens <= longest for tokens in lengths]

        self._fits = fits
        self._heldout, self._stream = [], self._distinct_heldout()
        return 0

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return guarded(self.task.verify, prompt, completion)

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        return extracted(self.task, prompt, completion)

    def labels(self) -> Labels | None:
        """See `PromptSource.labels`: those that the settings fix, else those that the task declares."""
        settings = self._settings
        if settings.teacher is not None:
            return frozenset({(settings.teacher, settings.domain)})
        declared = getattr(self.task, "labels", None)
        if declared is None:
            return None
        return frozenset((teacher, settings.domain or domain or settings.task) for teacher, domain in declared())

    def contents(self) -> dict[str, Contents]:
        """See `PromptSource.contents`; empty, because settings and seed determine everything."""
        return {}

    def close(self) -> None:
        self.task.close()

    def _drawn(self, split: Split, indices: Sequence[int]) -> list[Prompt]:
        """For each index, the first prompt of its stream that fits; they are measured together, which is faster."""
        streams = [self._draws(split, index) for index in indices]
        found = [next(stream) for stream in streams]
        # Each index continues in its own stream, so that drawing again for one does not move other prompts.
        while long := [place for place, fits in enumerate(self._fits(found)) if not fits]:
            for place in long:
                found[place] = next(streams[place])
        return found

    def _draws(self, split: Split, index: int) -> Iterator[Prompt]:
        """Problems of a split, from a stream that depends only on seed, split and index.

        Raises:
            DataError: after many draws, if the split or the length limit admits too few problems.
        """
        # Random hashes a string seed with SHA-512, so the stream is the same in every process and version.
        random = Random(f"{self.seed}/{split}/{index}")
        divided = getattr(self.task, "draw_from", None)
        for _ in range(_PATIENCE * HELDOUT_SHARE):
            drawn = self.task.draw(random) if divided is None else divided(random, split)
            if not isinstance(drawn, Prompt):
                raise PluginError(f"task {self._settings.task!r} drew {short(drawn)}; draw returns a Prompt.")
            if divided is not None or (drawn.content_hash % HELDOUT_SHARE == 0) == (split == "heldout"):
                yield self._label(drawn)
        raise DataError(
            f"task {self._settings.task!r} has no {split} prompt within the length limit with these options; make the "
            f"task larger, so that one problem in {HELDOUT_SHARE} can be held out, or raise rollout.max_prompt_tokens."
        )

    def _label(self, drawn: Prompt) -> Prompt:
        settings = self._settings
        if settings.mark and drawn.messages is not None:
            raise DataError(
                f"the prompts of task {settings.task!r} are chat messages, which cannot have a mark; leave mark out."
            )
        teacher = settings.teacher or drawn.teacher
        domain = settings.domain or drawn.domain or settings.task
        changed = settings.mark or settings.chat or settings.system is not None or settings.template_options
        if drawn.messages is None and not changed and (teacher, domain) == (drawn.teacher, drawn.domain):
            return drawn  # it would come out the same, and its hashes take half the time of a draw
        content = drawn.messages if drawn.messages is not None else f"{settings.mark}{drawn.text}"
        if settings.chat and drawn.messages is None:
            content = ({"role": "user", "content": str(content)},)
        return Prompt.make(
            content or "",
            answer=drawn.answer,
            teacher=teacher,
            domain=domain,
            extra=drawn.extra,
            system=settings.system,
            template_options=settings.template_options,
            tools=drawn.tools,
        )

    def _distinct_heldout(self) -> Iterator[Prompt]:
        seen: set[int] = set()
        index = misses = 0
        # A task has finitely many problems, but their number is unknown: after many draws in a row without a new one,
        # the split counts as exhausted. The more were found, the rarer new ones are, so the patience grows.
        while misses < _PATIENCE + 4 * len(seen):
            (prompt,) = self._drawn("heldout", [index])
            index += 1
            if prompt.content_hash in seen:
                misses += 1
                continue
            misses = 0
            seen.add(prompt.content_hash)
            yield prompt


def load_task(settings: TaskSettings) -> Task:
    """The task that `settings` name, with its options validated.

    Raises:
        ConfigError: for an unknown task, a wrong option, or a task without one of its methods.
    """
    cls = TASKS.load(settings.task)
    draws = hasattr(cls, "draw") or hasattr(cls, "draw_from")
    lacks = ([] if draws else ["draw"]) + [name for name in ("verify", "close") if not hasattr(cls, name)]
    if lacks:
        raise ConfigError(
            f"task {settings.task!r} lacks the method {' and '.join(lacks)}; docs/tiny.md shows a task of your own."
        )
    options = parse_settings(cls.Options, settings.options, source=f"options of task {settings.task}")
    task: Task = cls(options)
    return task


def build_procedural(settings: TaskSettings, seed: int) -> ProceduralSource:
    """The prompt source of the task that `settings` name."""
    return ProceduralSource(load_task(settings), seed, settings)
