"""Modes: the same problems asked with several thinking budgets, each with a mark in the prompt and its own teacher.

    modes:
      long:  {budget: 4096, system: "Think as long as you need."}
      short: {budget: 512, system: "Answer after a few words of thought."}

A prompt in a mode has the mode's mark, its budget as length limit, its name as domain, so that routes, metrics and
evaluations can tell modes apart, and its teacher. Source: ORBIT, arXiv 2601.08310.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

from pydantic import Field, model_validator

from opd.config import Settings
from opd.errors import ConfigError
from opd.tasks.encode import encode_prompt
from opd.tasks.messages import Message
from opd.tasks.prompt import Prompt
from opd.tasks.source import Contents, Labels, Measure, PromptSource, Split
from opd.tasks.verdict import Verdict

MODE, UNMARKED = "mode", "unmarked"
"""Keys in `Prompt.extra`: the mode's name, and the text or messages without the mark."""


class ModeSettings(Settings):
    """One way of asking the problems."""

    budget: int = Field(ge=1, description="Maximum tokens of a response in this mode.")
    prefix: str = Field("", description="Text put before the prompt; in a chat, before the last user message.")
    suffix: str = Field("", description="Text put after the prompt; in a chat, after the last user message.")
    system: str = Field(
        "", description="System message of chat prompts in this mode, appended to the one of a prompt that has one."
    )
    teacher: str | None = Field(
        None, description="Name of the teacher for rows in this mode. Default: the mode's name."
    )
    weight: int = Field(
        1,
        ge=0,
        le=1000,
        description="Share of the training rows that are in this mode: with weights 3 and 1, three rows are in the "
        "first for every one in the second. A mode of weight 0 is not trained but evaluated, which shows what the "
        "student does with a mark that it does not know.",
    )
    teacher_accuracy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Accuracy (fraction) of the mode's teacher within the budget, with which the metric mode/recovery "
        "compares the student's; `opd orbit` fills it in.",
    )

    @model_validator(mode="after")
    def _marked(self) -> "ModeSettings":
        if not (self.prefix or self.suffix or self.system):
            raise ValueError("a mode needs a mark that the student can read; set prefix, suffix or system")
        return self

    def mark(self, prompt: Prompt, name: str) -> Prompt:
        """The prompt in this mode; a prompt that is in another mode is first taken out of it."""
        prompt = unmark(prompt)
        content: str | Sequence[Message]
        if prompt.messages is None:
            if self.system:
                raise ConfigError(
                    f"mode {name!r} has a system text, but {prompt.name} is plain text; set chat: true or use prefix."
                )
            content = f"{self.prefix}{prompt.text}{self.suffix}"
        else:
            content = self._mark_messages(prompt.messages)
        return replace(
            Prompt.make(
                content,
                answer=prompt.answer,
                teacher=self.teacher or name,
                domain=name,
                extra={**prompt.extra, MODE: name, UNMARKED: _content(prompt)},
                template_options=prompt.template_options,
                tools=prompt.tools,
                place=prompt.place,
            ),
            # That of the problem without the mark, so that a problem is on the same side of the split in all its modes.
            content_hash=prompt.content_hash,
            max_new_tokens=self.budget,
        )

    def _mark_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        marked: list[dict[str, Any]] = [dict(message) for message in messages]
        if self.system:
            if marked[0]["role"] == "system":
                marked[0]["content"] += f"\n{self.system}"
            else:
                marked.insert(0, {"role": "system", "content": self.system})
        last = max((i for i, message in enumerate(marked) if message["role"] == "user"), default=len(marked) - 1)
        marked[last]["content"] = f"{self.prefix}{marked[last]['content']}{self.suffix}"
        return marked


def mode_of(prompt: Prompt) -> str | None:
    """The mode that a prompt is in; None if it is in none."""
    return prompt.extra.get(MODE)


def unmark(prompt: Prompt) -> Prompt:
    """The prompt without its mode's mark; uid, domain and teacher remain those of the marked prompt."""
    content = prompt.extra.get(UNMARKED)
    if content is None:
        return prompt
    extra = {key: value for key, value in prompt.extra.items() if key not in (MODE, UNMARKED)}
    if isinstance(content, str):
        return replace(prompt, text=content, messages=None, extra=extra)
    return replace(prompt, text=None, messages=tuple(content), extra=extra)


def asked_content(prompt: Prompt) -> int:
    """Hash of the prompt with its mark; `content_hash` of a prompt in a mode is that of the problem without it."""
    return prompt.content_hash if mode_of(prompt) is None else Prompt.make(_content(prompt)).content_hash


def _content(prompt: Prompt) -> Any:
    return prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]


class ModesSource(PromptSource):
    """A source whose prompts are asked in modes.

    Training prompts take the modes in turn, by weight. A held-out prompt is asked in every mode, one after the other,
    so that modes are compared on the same problems.
    """

    def __init__(self, source: PromptSource, modes: Mapping[str, ModeSettings]) -> None:
        self._source = source
        self.modes = dict(modes)
        slots = sorted(
            ((k + 0.5) / m.weight, i, name) for i, (name, m) in enumerate(modes.items()) for k in range(m.weight)
        )
        self._pattern = [name for _, _, name in slots]
        if not slots:
            raise ConfigError(
                f"modes {', '.join(modes)} all have weight 0, so none is trained; give at least one a weight above 0."
            )

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        order = self._pattern if split == "train" else list(self.modes)
        found: list[Prompt] = []
        each = 1 if split == "train" else len(order)
        for index in range(start, start + count):
            (prompt,) = self._source.prompts(split, 1, index // each)
            name = order[index % len(order)]
            found.append(self.modes[name].mark(prompt, name))
        return found

    def limit(self, measure: Measure, longest: int, *, drop: bool) -> int:
        """See `PromptSource.limit`; a prompt is measured with its longest mark."""

        def marked(prompts: Iterable[Prompt]) -> Iterator[int]:
            each = iter(measure(mode.mark(prompt, name) for prompt in prompts for name, mode in self.modes.items()))
            # In `each`, all modes of a prompt follow one another.
            return map(max, zip(*[each] * len(self.modes), strict=True))

        return self._source.limit(marked, longest, drop=drop)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return self._source.verify(unmark(prompt), completion)

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        return self._source.extract(unmark(prompt), completion)

    def labels(self) -> Labels | None:
        """See `PromptSource.labels`: the modes' teachers."""
        return frozenset((mode.teacher or name, name) for name, mode in self.modes.items())

    def contents(self) -> dict[str, Contents]:
        return self._source.contents()

    def close(self) -> None:
        self._source.close()


def check_marks(modes: Mapping[str, ModeSettings], prompt: Prompt, tokenizer: Any) -> None:
    """Refuse modes that the student cannot tell apart.

    Args:
        modes: by name.
        prompt: any prompt of the source.
        tokenizer: the student's.

    Raises:
        ConfigError: when a prompt has the same ids in two modes, or in one mode begins with all its ids in the other,
            or when a trained mode's mark is the beginning of another's.
    """
    ids = {name: encode_prompt(mode.mark(prompt, name), tokenizer) for name, mode in modes.items()}
    for one, other in combinations(ids, 2):
        short, long = sorted((one, other), key=lambda name: len(ids[name]))
        if ids[long][: len(ids[short])] == ids[short]:
            how = "has the same ids" if len(ids[long]) == len(ids[short]) else "is the beginning of what it is"
            raise ConfigError(
                f"a prompt in mode {short!r} {how} in mode {long!r}, so that the student cannot tell them apart; give "
                "them other marks."
            )
    # Modes that are never trained may have marks that begin like those of others.
    marks = {name: _mark_ids(mode, tokenizer) for name, mode in modes.items() if mode.weight}
    for one, other in permutations(marks, 2):
        mine, theirs = marks[one], marks[other]
        if mine.keys() == theirs.keys() and all(theirs[place][: len(ids)] == ids for place, ids in mine.items()):
            raise ConfigError(
                f"the mark of mode {one!r} is the beginning of that of mode {other!r} in tokens, so that a student "
                "that has read it does not know yet which one it is; give them other marks."
            )


def _mark_ids(mode: ModeSettings, tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of a mode's mark by the place where it stands."""
    texts = {"prefix": mode.prefix, "suffix": mode.suffix, "system": mode.system}
    return {
        place: list(tokenizer(text, add_special_tokens=False)["input_ids"]) for place, text in texts.items() if text
    }
