"""Puts rows into the tokens of a teacher that has another tokenizer: its own template, its own tokens of the same text.

    prompt      rendered by the teacher's chat template, and encoded by its tokenizer
    response    the bytes that the student wrote, encoded by the teacher's tokenizer (its canonical tokens of them)
    stop        the token that ends the student's response becomes the one with which the teacher ends its own
    special     other special tokens become those of the same text; the teacher does not read what it does not have

Bytes that are not UTF-8 become the teacher's single-byte tokens; it does not read those that it lacks, nor a character
that the length limit has cut. If both tokenizers have the same pieces under other
numbers, the ids are renumbered instead, and so keep the student's own choice of tokens.
"""

import threading
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import ConfigError, DataError, IncompatibleTeacherError
from opd.fleet.source import ScoreSource
from opd.tasks.encode import encode_prompts
from opd.tasks.prompt import Prompt
from opd.tasks.stops import answer_end
from opd.wire.tokenizer import tokenizer_from
from opd.wire.types import ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from student.data.row import Row
from student.data.translation import Translation
from student.scoring.reader import Reader
from student.scoring.spans import Ints, boundaries, group, longest_prefixes

_CACHED = 4096
_SHOWN = 60
_NONE = np.empty(0, np.int64)


class Translator:
    """Translates the rows of a student for one teacher.

    Args:
        info: the teacher.
        teacher: its tokenizer.
        student: the student's tokenizer.
        stops: ids that end the student's responses.
        dense: whether the teacher's probabilities of other tokens are wanted, on the student's ids.

    Raises:
        IncompatibleTeacherError: if the bytes of a text cannot be had back from the ids of either.
    """

    def __init__(
        self, info: pb.TeacherInfo, teacher: Any, student: Any, stops: Collection[int], *, dense: bool = False
    ) -> None:
        self.name, self._limit = info.name, info.limits.max_sequence_tokens
        self.teacher = Reader(teacher, f"teacher {info.name!r}")
        self.student = Reader(student, f"student {student.name_or_path!r}")
        self._stops = np.array(sorted(stops), np.int64)
        self._ends = frozenset(info.stop_token_ids) or frozenset({info.tokenizer.eos_id} - {-1})
        self._end: dict[bool, int] = {}
        self._numbers, self._same = _numbers(self.student, self.teacher)
        if not self._same and self.student.unknown >= 0:
            self._numbers[self.student.unknown] = -1  # which text it stands for is not known
        self._onto = self._longest() if dense else None
        self._prompts: dict[str, NDArray[np.uint32]] = {}
        self._lock = threading.Lock()  # rows that are sampled ahead are translated in another thread

    def translate(self, row: Row, prompt: Prompt) -> Translation:
        """The row to the teacher, under `prompt`, which the teacher reads in place of the row's ids.

        Raises:
            ConfigError: for an episode.
            DataError: if the teacher's template refuses the prompt, or the prompt leaves no room for a response.
        """
        if row.episode is not None:
            raise ConfigError(
                f"teacher {self.name!r} has another tokenizer, with which episodes are not scored; use a "
                "teacher of the student's family for them."
            )
        with self._lock:
            before = self._prompt(prompt)
            ids, of, span, at, sizes = self._response(row.response_ids.astype(np.int64), prompt)
        room = self._limit - len(before)
        if room < 1:
            raise DataError(
                f"{prompt.name} has {len(before)} tokens to teacher {self.name!r}, which takes at most {self._limit}; "
                "leave such prompts out, or serve the teacher with a higher limit."
            )
        if len(ids) > room:  # the span that is cut has no log-prob as a whole
            lost = of[room:]
            span, of = np.where(np.isin(span, lost), -1, span), np.where(np.isin(of, lost), -1, of)[:room]
            at = np.where(at < room, at, -1)
        if not len(ids):  # a request needs a token to score
            ids, of = np.zeros(1, np.int64), np.full(1, -1)
        item = ScoreItem(np.concatenate([before, ids[:room].astype(np.uint32)]), len(before))
        return Translation(item, span, of, at, sizes, self._onto)

    def preview(self, prompt: Prompt) -> str:
        """A prompt as the teacher reads it, and the spans that its last text would have as a response."""
        text = str(prompt.messages[-1]["content"] if prompt.messages else prompt.text)[:_SHOWN]
        ids = np.array(self.student.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        with self._lock:
            before = self._prompt(prompt)
            answer, of, span, *_ = self._response(ids, prompt)
        pieces = [
            "".join(f"[{side.words.shown(one)}]" for one in mine[at == place])
            for place in np.unique(span[span >= 0])
            for side, mine, at in ((self.student, ids, span), (self.teacher, answer, of))
        ]
        pairs = "  ".join(f"{own} = {other}" for own, other in zip(pieces[::2], pieces[1::2], strict=True))
        lost = int((span < 0).sum())
        return (
            f"  {self.name} has another tokenizer and reads it as {len(before)} tokens of its own: "
            f"{self.teacher.tokenizer.decode(before)!r}\n"
            f"  spans of student and {self.name} in {text!r}: {pairs or 'none'}; tokens without one: {lost}"
        )

    def _prompt(self, prompt: Prompt) -> NDArray[np.uint32]:
        found = self._prompts.get(prompt.uid)
        if found is None:
            if prompt.messages is not None and not self.teacher.tokenizer.chat_template:
                raise DataError(
                    f"{prompt.name} is a chat, but teacher {self.name!r} has no chat template; use plain prompts, or "
                    "serve a teacher that was trained on chats."
                )
            found = np.array(encode_prompts([prompt], self.teacher.tokenizer)[0], np.uint32)
            if len(self._prompts) >= _CACHED:
                self._prompts.clear()
            self._prompts[prompt.uid] = found
        return found

    def _response(self, mine: Ints, prompt: Prompt) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """The teacher's [U] ids, and `of`, `span`, `at` and `sizes` of `Translation`."""
        words = self.student.words
        events, numbers = words.special[mine], self._numbers[mine]
        if np.isin(mine[-1], self._stops):
            events[-1], numbers[-1] = True, self._stop(prompt)
        sizes = np.where(events, 0, words.lengths[mine])
        if self._same:
            kept = numbers >= 0
            span, at = np.where(kept, np.arange(len(mine)), -1), np.where(kept, np.cumsum(kept) - 1, -1)
            return numbers[kept], np.flatnonzero(kept), span, at, sizes
        spaced = self.student.begins_with_space(prompt) and words.text(mine[:1])[:1].tobytes() == b" "
        if spaced and not events[0]:
            sizes[0] -= 1
        opens = self.teacher.begins_with_space(prompt)
        ids, starts, ends = self._encoded(mine, events, numbers, opens=opens, skip=int(spaced))
        widths = np.where(events, 1, sizes)  # an event takes a place of its own
        span, of = group(np.cumsum(widths), ends)
        # What it does not read, or reads as unknown, has no log-prob; of a span, all or nothing is compared.
        read = ids >= 0
        span = np.where(np.isin(span, of[~read | (ids == self.teacher.unknown)]), -1, span)
        at = boundaries(np.cumsum(widths) - widths, starts[read])
        if spaced != opens:  # first tokens with a space and without are different tokens
            at[0] = -1
        return ids[read], np.where(np.isin(of, span), of, -1)[read], span, at, sizes

    def _encoded(
        self, mine: Ints, events: NDArray[np.bool_], numbers: Ints, *, opens: bool, skip: int
    ) -> tuple[Ints, Ints, Ints]:
        """The teacher's ids, -1 for what it cannot read, and where they start and end.

        Offsets are those in the text, where each event counts as one byte.
        """
        ids, starts, ends, done = [_NONE], [_NONE], [_NONE], 0
        for start, end in _runs(events):
            data = self.student.words.text(mine[start:end]).tobytes()[skip if not start else 0 :]
            found, offsets = self.teacher.read(data, spaced=opens and not start, last=end == len(mine))
            ids.append(found)
            starts.append(done + np.append(0, offsets)[: len(offsets)])
            ends.append(done + offsets)
            done += len(data)
            if end < len(mine):
                ids.append(numbers[end : end + 1])
                starts.append(np.array([done]))
                done += 1
                ends.append(np.array([done]))
        return np.concatenate(ids), np.concatenate(starts), np.concatenate(ends)

    def _longest(self) -> Ints:
        """[V] for each id of the teacher, the student's id that takes its probability; -1 for none."""
        mine, theirs = self.student.words, self.teacher.words
        found = longest_prefixes(mine.pieces(), theirs.pieces())
        for token in np.flatnonzero(self._numbers >= 0):
            if self._same or mine.special[token]:
                found[self._numbers[token]] = int(token)
        own = self.student.tokenizer.eos_token_id
        stop = own if own in self._stops or not len(self._stops) else int(self._stops[0])
        for end in self._ends:
            if found[end] not in self._stops:
                found[end] = -1 if stop is None else stop
        return found

    def _stop(self, prompt: Prompt) -> int:
        chat = prompt.messages is not None
        if chat not in self._end:
            end = answer_end(prompt, self.teacher.tokenizer, self._ends)
            self._end[chat] = -1 if end is None else end
        return self._end[chat]


def _runs(events: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(start, end) of the text before each event, and of that after the last one."""
    start = 0
    for event in np.flatnonzero(events):
        yield start, int(event)
        start = int(event) + 1
    if start < len(events):
        yield start, len(events)


def _numbers(student: Reader, teacher: Reader) -> tuple[Ints, bool]:
    """[V] the teacher's id of the same piece, -1 where it has none, and whether all are the same but added tokens."""
    mine, theirs = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    special, other = student.words.special, teacher.words.special
    found = np.full(len(special), -1, np.int64)
    for piece, token in mine.items():
        number = theirs.get(piece, -1)
        if number >= 0 and other[number] == special[token]:
            found[token] = number
    own, added = student.tokenizer.added_tokens_decoder, teacher.tokenizer.added_tokens_decoder
    alike = {piece for piece, token in mine.items() if token not in own}
    same = alike == {piece for piece, token in theirs.items() if token not in added}
    ids = np.flatnonzero((found >= 0) & ~special)
    return found, same and np.array_equal(student.words.text(ids), teacher.words.text(found[ids]))


def translator_of(
    fleet: ScoreSource, info: pb.TeacherInfo, student: Any, stops: Collection[int], *, dense: bool = False
) -> Translator:
    """The translator for a teacher with another tokenizer, which is fetched from it; `dense` as for `Translator`.

    Raises:
        IncompatibleTeacherError: if its servers do not send it, or the bytes of a text are not to be had from its ids.
    """
    document = fleet.tokenizer(info.name)
    if not document:
        raise IncompatibleTeacherError(
            f"teacher {info.name!r} has another tokenizer than student {student.name_or_path!r}, and this source of "
            "scores does not send it; use a live teacher of a current version."
        )
    return Translator(info, tokenizer_from(document, info.tokenizer, info.name), student, stops, dense=dense)
