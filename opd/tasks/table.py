"""Prompts from tables: JSONL and parquet files, and Hugging Face datasets."""

import hashlib
import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from itertools import islice
from math import ceil
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import DataError, short
from opd.tasks.environments.base import ENVIRONMENT, PATH
from opd.tasks.function import load_verifier
from opd.tasks.messages import stored_messages
from opd.tasks.prompt import Prompt
from opd.tasks.rows import Row, Rows, file_rows, open_rows
from opd.tasks.settings import DatasetSettings, FileSettings
from opd.tasks.source import Contents, Labels, Measure, PromptSource, Split, too_long
from opd.tasks.verdict import Verdict, Verifier, extracted, guarded

_MEANT = {"messages", "conversations", "system", "chat_template_kwargs", "tools"}
_MEANT |= {"image", "images", "video", "videos", "audio", "audios"}
"""Columns with a meaning to other trainers that opd does not read."""

log = logging.getLogger(__name__)
_encoder = json.JSONEncoder(sort_keys=True, default=str)


class PromptTable:
    """Prompts made from rows when they are asked for; memory holds some 20 bytes for each.

    Args:
        rows: the rows, all of which are read once here.
        settings: which columns hold what.

    Attributes:
        hashes: [N] uint64, `Prompt.content_hash` of every row.
        contents: what was read.

    Raises:
        DataError: if a row is not a prompt.
    """

    def __init__(self, rows: Rows, settings: DatasetSettings | FileSettings) -> None:
        self._rows, self._settings = rows, settings
        self._labels: dict[tuple[str | None, str | None], int] = {}
        hashes, labels, digest = array("Q"), array("I"), hashlib.sha256()
        unseen, columns = set(settings.keep_columns), set[str]()
        for place, row in islice(rows, settings.limit):
            unseen -= row.keys()
            columns.update(column for column, value in row.items() if value is not None)
            prompt = self._prompt(place, row)
            hashes.append(prompt.content_hash)
            labels.append(self._labels.setdefault((prompt.teacher, prompt.domain), len(self._labels)))
            digest.update(f"{prompt.uid} {_encoder.encode(prompt.extra)}\n".encode())
        if unseen:
            raise DataError(
                f"{rows.name} has no column {', '.join(map(repr, sorted(unseen)))}; correct prompts.keep_columns."
            )
        if ignored := [*_ignored(columns, settings)]:
            log.warning("%s has columns that are not read: %s", rows.name, ", ".join(ignored))
        self.hashes = np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64)
        if repeated := len(self.hashes) - len(np.unique(self.hashes)):
            log.warning(
                "%s asks some prompts again: %d of its %d rows repeat the prompt of another row",
                rows.name,
                repeated,
                len(self.hashes),
            )
        self._label = np.frombuffer(labels, np.uint32) if labels else np.empty(0, np.uint32)
        self.contents = Contents(len(hashes), digest.hexdigest())

    def __getitem__(self, index: int) -> Prompt:
        place, row = self._rows.at(index)
        prompt = self._prompt(place, row)
        if prompt.content_hash != self.hashes[index]:
            raise DataError(f"{place} has changed since the run began; leave prompt files alone while a run uses them.")
        return prompt

    def labels(self, indices: NDArray[np.uint32]) -> Labels:
        """The pairs (teacher, domain) of some rows."""
        names = list(self._labels)
        return frozenset(names[label] for label in np.unique(self._label[indices]))

    def _prompt(self, place: str, row: Row) -> Prompt:
        settings = self._settings
        if row.get(settings.prompt_column) is None:
            raise DataError(
                f"{place} has no {settings.prompt_column!r}, but {', '.join(map(repr, row)) or 'nothing'}; "
                "set prompt_column to the column that holds the prompt."
            )
        if row.get(ENVIRONMENT) is not None:
            row = {**row, ENVIRONMENT: _played(place, row)}
        answer = _within(row, settings.answer_column)
        if isinstance(answer, list):
            raise DataError(
                f"{place} has the answer {short(answer)}; an answer is a text or a number, so name one of them, as in "
                f"answer_column: {settings.answer_column}.0."
            )
        if isinstance(answer, Mapping):
            raise DataError(
                f"{place} has the answer {short(answer)}; name the key within it, as in answer_column: "
                f"{settings.answer_column}.{next(iter(answer), 'key')}."
            )
        teacher, domain = (_text(row.get(column)) for column in (settings.teacher_column, settings.domain_column))
        try:
            content = _content(row[settings.prompt_column], settings.chat)
            # An environment that asks in plain text reads this column itself, as it may read any.
            unread = isinstance(content, str) and row.get(ENVIRONMENT) is not None
            return Prompt.make(
                content,
                answer=_text(answer),
                teacher=teacher or settings.teacher,
                domain=domain or settings.domain,
                system=settings.system,
                template_options=settings.template_options,
                tools=None if unread or settings.tools_column is None else row.get(settings.tools_column),
                place=place,
                # Nulls are left out, because in parquet every row has every column.
                extra={column: _plain(row[column]) for column in self._kept(row) if row.get(column) is not None},
            )
        except DataError as error:
            raise DataError(f"{place}: {error}") from error

    def _kept(self, row: Row) -> Iterable[str]:
        """Columns kept with the prompt: all columns if the row has an environment, which may read any of them."""
        settings = self._settings
        if row.get(ENVIRONMENT) is None:
            return (*settings.keep_columns, PATH)
        known = (settings.prompt_column, settings.answer_column, settings.teacher_column, settings.domain_column)
        return [column for column in row if column not in known or column in settings.keep_columns]


class Share:
    """Some prompts of a table, in a given order.

    Args:
        table: the table.
        indices: the prompts' indices in it.
    """

    def __init__(self, table: PromptTable, indices: NDArray[np.uint32]) -> None:
        self.table, self.indices = table, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Prompt:
        return self.table[int(self.indices[position])]

    def __iter__(self) -> Iterator[Prompt]:
        return (self.table[int(index)] for index in self.indices)

    def labels(self) -> Labels:
        """The pairs (teacher, domain) of these prompts."""
        return self.table.labels(self.indices)

    def hashes(self) -> NDArray[np.uint64]:
        """The content hashes of these prompts."""
        return self.table.hashes[self.indices]

    def kept(self, keep: NDArray[np.bool_]) -> "Share":
        """The prompts that a mask keeps."""
        return Share(self.table, self.indices[keep])


class TableSource(PromptSource):
    """A finite list of prompts: training rows are reshuffled every epoch, held-out rows have a fixed order.

    Args:
        train: prompts to train on.
        heldout: prompts to evaluate on.
        verifier: judges the answers.
        seed: decides the order in each epoch.
        contents: what was read, by file or dataset.
    """

    def __init__(
        self, train: Share, heldout: Share, verifier: Verifier, seed: int, contents: Mapping[str, Contents]
    ) -> None:
        self._train, self._heldout, self._verifier, self._seed = train, heldout, verifier, seed
        self._contents = dict(contents)
        self._epoch, self._order = -1, array("I")

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        if split == "train":
            return [self._at(index) for index in range(start, start + count)]
        if start + count > len(self._heldout):
            raise DataError(
                f"the data has {len(self._heldout)} held-out prompts, but {start + count} are wanted; lower "
                "eval.prompts, raise prompts.heldout, which is a share of the data, or give prompts.heldout_file."
            )
        return [self._heldout[index] for index in range(start, start + count)]

    def heldout_hashes(self) -> NDArray[np.uint64]:
        """The content hashes of the held-out prompts."""
        return self._heldout.hashes()

    def leave_out(self, hashes: NDArray[np.uint64]) -> None:
        """Exclude prompts with these contents, which other tables of a mix hold out, from training.

        Raises:
            DataError: if no prompt is left to train on.
        """
        left = ~np.isin(self._train.hashes(), hashes)
        if not left.any():
            raise DataError(
                f"{' and '.join(self._contents)} leaves no prompt to train on, because other sources of the mix hold "
                "all of them out; leave it out of the mix."
            )
        self._train, self._epoch = self._train.kept(left), -1

    def limit(self, measure: Measure, longest: int, *, drop: bool) -> int:
        """See `PromptSource.limit`; measures every row."""
        lengths = [np.fromiter(measure(share), np.int64) for share in (self._train, self._heldout)]
        fits = [found <= longest for found in lengths]
        count = sum(int((~fit).sum()) for fit in fits)
        if count and not drop:
            share, found, fit = next(
                part for part in zip((self._train, self._heldout), lengths, fits, strict=True) if not part[2].all()
            )
            first = int((~fit).argmax())
            raise too_long(share[first], int(found[first]), count, longest)
        if not fits[0].any():
            raise DataError(
                f"all {len(self._train)} training prompts are longer than {longest} tokens, the shortest has "
                f"{lengths[0].min()}; raise rollout.max_prompt_tokens."
            )
        self._train, self._epoch = self._train.kept(fits[0]), -1
        self._heldout = self._heldout.kept(fits[1])
        return count

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return guarded(self._verifier.verify, prompt, completion)

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        return extracted(self._verifier, prompt, completion)

    def labels(self) -> Labels:
        """See `PromptSource.labels`; covers every row."""
        return self._train.labels() | self._heldout.labels()

    def contents(self) -> dict[str, Contents]:
        """See `PromptSource.contents`; includes rows that are held out or too long."""
        return dict(self._contents)

    def close(self) -> None:
        self._verifier.close()

    def _at(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._train))
        if epoch != self._epoch:
            # A string seed is hashed the same way in every process. The array takes 4 bytes per row, a list would take
            # 36.
            self._epoch, self._order = epoch, array("I", range(len(self._train)))
            Random(f"{self._seed}/epoch/{epoch}").shuffle(self._order)
        return self._train[self._order[position]]


def build_table(settings: DatasetSettings | FileSettings, seed: int) -> TableSource:
    """Read the table that `settings` name and split it into training and held-out rows.

    Raises:
        ConfigError: for an unknown verifier.
        DataError: for data that cannot be read, lacks the prompt column, or leaves nothing to train on.
    """
    verifier = load_verifier(settings.verifier, settings.verifier_timeout, settings.verifier_options)
    rows = open_rows(settings)
    table = PromptTable(rows, settings)
    contents = {rows.name: table.contents}
    if isinstance(settings, FileSettings) and settings.heldout_file is not None:
        other = PromptTable(file_rows(settings.heldout_file), settings)
        heldout = Share(other, np.arange(len(other.hashes), dtype=np.uint32))
        contents[str(settings.heldout_file)] = other.contents
    else:
        heldout = Share(table, _share(table.hashes, settings.heldout))
    # By content, so that a prompt that occurs twice in the file is not both trained on and held out.
    left = ~np.isin(table.hashes, heldout.hashes())
    train = Share(table, left.nonzero()[0].astype(np.uint32))
    if not len(train):
        raise DataError(f"{rows.name} leaves no prompt to train on ({len(left)} read, {len(heldout)} held out).")
    return TableSource(train, heldout, verifier, seed, contents)


def _share(hashes: NDArray[np.uint64], share: float) -> NDArray[np.uint32]:
    """The first row of each of the contents with the smallest hashes; independent of order, seed and repeated rows."""
    if share == 0:
        return np.empty(0, np.uint32)
    distinct, first = np.unique(hashes, return_index=True)  # in ascending order of the hashes
    count = min(ceil(share * len(distinct)), len(distinct) - 1)
    return first[: max(count, 0)].astype(np.uint32)


def _ignored(columns: Iterable[str], settings: DatasetSettings | FileSettings) -> Iterator[str]:
    """Columns that are not read although their names say that they are meant for opd: known ones, and misspelt ones."""
    known = (settings.prompt_column, settings.answer_column, settings.teacher_column, settings.domain_column)
    read = {*known, settings.tools_column or "", *settings.keep_columns, ENVIRONMENT, PATH}
    read |= {column.partition(".")[0] for column in read}
    if ENVIRONMENT in columns:  # which may read any of them
        return
    for column in sorted(set(columns) - read):
        near = get_close_matches(column.lower(), [name for name in read - set(columns) if name], 1, 0.8)
        if near:
            yield f"{column!r} (did you mean {near[0]!r}?)"
        elif column.lower() in _MEANT:
            yield repr(column)


def _content(value: Any, chat: bool) -> Any:
    """The value of a prompt column, as `Prompt.make` takes it; messages may be stored as JSON text.

    Raises:
        DataError: if the last message is the assistant's.
    """
    value = stored_messages(value) if isinstance(value, str) else value
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if chat and value else value
    last = value[-1] if isinstance(value, list) and value else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        raise DataError(
            "the last message is from the assistant, but the student is to write the next one; remove it (a reference "
            "answer belongs in answer_column)."
        )
    return value


def _within(row: Row, column: str) -> Any:
    """A value in a row; also within an object or a list, as in "reward_model.ground_truth" and "answers.0"."""
    if column in row or "." not in column:
        return row.get(column)
    first, rest = column.split(".", 1)
    inner = row.get(first)
    if isinstance(inner, list):
        inner = {str(place): held for place, held in enumerate(inner)}
    return _within(inner, rest) if isinstance(inner, Mapping) else None


def _text(value: Any) -> str | None:
    if isinstance(value, float | Decimal) and "E" in str(value).upper():
        return f"{Decimal(str(value)):f}"  # mathematics reads 1e-05 as e - 5
    return None if value is None else str(value)


def _played(place: str, row: Row) -> dict[str, Any]:
    """The environment of a row without options that are null, because in parquet every row has the options of all.

    Raises:
        DataError: if it has no name, or the path that goes with it is not a list.
    """
    environment, path = row[ENVIRONMENT], row.get(PATH)
    named = isinstance(environment, Mapping) and isinstance(environment.get("name"), str)
    options = (environment.get("options") or {}) if named else None
    if not isinstance(options, Mapping):
        raise DataError(
            f'{place} has the environment {short(environment)}; give {{"name": ..., "options": {{...}}}}, or rename '
            "the column where it means something else."
        )
    if isinstance(path, str):
        raise DataError(f"{place} has the path {short(path)}; give a list of actions, each a text.")
    return {**environment, "options": {key: value for key, value in options.items() if value is not None}}


def _plain(value: Any) -> Any:
    """A value as JSON, for checkpoints and the processes of environments; dates from parquet become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)
