"""Prompts from tables: JSONL and parquet files, and Hugging Face datasets."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from opd.errors import DataError
from opd.tasks.environments.base import ENVIRONMENT, PATH
from opd.tasks.function import load_verifier
from opd.tasks.prompt import Prompt
from opd.tasks.settings import DatasetSettings, FileSettings
from opd.tasks.source import Labels, Split, too_long
from opd.tasks.verdict import Verdict, Verifier, extracted, guarded

_PLAYED = (ENVIRONMENT, PATH)
"""Columns that say how a prompt is played."""


class TableSource:
    """A finite list of prompts: training rows reshuffled every epoch, held-out rows in a fixed order."""

    def __init__(self, train: Sequence[Prompt], heldout: Sequence[Prompt], verifier: Verifier, seed: int) -> None:
        self._train, self._heldout, self._verifier, self._seed = list(train), list(heldout), verifier, seed
        self._epoch, self._order = -1, list[int]()

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        """See `PromptSource.prompts`."""
        if split == "train":
            return [self._at(index) for index in range(start, start + count)]
        if start + count > len(self._heldout):
            raise DataError(
                f"the data has {len(self._heldout)} held-out prompts, but {start + count} are wanted; ask for fewer, "
                "raise the share `heldout`, or name a `heldout_file`."
            )
        return list(self._heldout[start : start + count])

    def limit(self, measure: Callable[[Prompt], int], longest: int, *, drop: bool) -> int:
        """See `PromptSource.limit`; measures every row."""
        lengths = {id(prompt): measure(prompt) for prompt in (*self._train, *self._heldout)}
        long = [(p, lengths[id(p)]) for p in (*self._train, *self._heldout) if lengths[id(p)] > longest]
        if long and not drop:
            raise too_long(long, longest)
        train = [prompt for prompt in self._train if lengths[id(prompt)] <= longest]
        if not train:
            raise DataError(
                f"all {len(self._train)} training prompts are longer than {longest} tokens, the shortest has "
                f"{min(lengths[id(prompt)] for prompt in self._train)}; raise rollout.max_prompt_tokens."
            )
        self._train, self._epoch = train, -1
        self._heldout = [prompt for prompt in self._heldout if lengths[id(prompt)] <= longest]
        return len(long)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """See `PromptSource.verify`."""
        return guarded(self._verifier.verify, prompt, completion)

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """See `PromptSource.extract`."""
        return extracted(self._verifier, prompt, completion)

    def labels(self) -> Labels:
        """See `PromptSource.labels`; looks at every row."""
        return frozenset((prompt.teacher, prompt.domain) for prompt in (*self._train, *self._heldout))

    def close(self) -> None:
        """See `PromptSource.close`."""
        self._verifier.close()

    def _at(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._train))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._train)))
            Random(f"{self._seed}/epoch/{epoch}").shuffle(self._order)
        return self._train[self._order[position]]


def build_table(settings: DatasetSettings | FileSettings, seed: int) -> TableSource:
    """Read the table that `settings` name and cut it into training and held-out rows.

    Raises:
        ConfigError: for an unknown verifier.
        DataError: for data that cannot be read, lacks the prompt column, or leaves nothing to train on.
    """
    verifier = load_verifier(settings.verifier, settings.verifier_timeout)
    if isinstance(settings, DatasetSettings):
        name, rows = f"dataset {settings.dataset!r}", _dataset_rows(settings)
    else:
        name, rows = str(settings.file), _file_rows(settings.file)
    prompts = list(_parse(rows, settings, name))
    if isinstance(settings, FileSettings) and settings.heldout_file is not None:
        path = settings.heldout_file
        heldout = list(_parse(_file_rows(path), settings, str(path)))
    else:
        heldout = _share(prompts, settings.heldout)
    hidden = {prompt.content_hash for prompt in heldout}
    train = [prompt for prompt in prompts if prompt.content_hash not in hidden]
    if not train:
        raise DataError(f"{name} leaves no prompt to train on ({len(prompts)} read, {len(heldout)} held out).")
    return TableSource(train, heldout, verifier, seed)


def _share(prompts: Sequence[Prompt], share: float) -> list[Prompt]:
    """The first row of each content with the smallest hashes: independent of order, seed and repeated rows."""
    if share == 0:
        return []
    distinct = {prompt.content_hash: prompt for prompt in reversed(prompts)}
    count = min(ceil(share * len(distinct)), len(distinct) - 1)
    return [distinct[key] for key in sorted(distinct)[:count]]


def _parse(
    rows: Iterable[tuple[str, Mapping[str, Any]]], settings: DatasetSettings | FileSettings, name: str
) -> Iterator[Prompt]:
    unseen = set(settings.keep_columns)
    for place, row in islice(rows, settings.limit):
        unseen -= row.keys()
        if row.get(settings.prompt_column) is None:
            raise DataError(
                f"{place} has no {settings.prompt_column!r}, but {', '.join(map(repr, row)) or 'nothing'}; "
                "set prompt_column to the column that holds the prompt."
            )
        answer, teacher, domain = (
            _text(row.get(column))
            for column in (settings.answer_column, settings.teacher_column, settings.domain_column)
        )
        try:
            yield Prompt.make(
                _content(row[settings.prompt_column], settings.chat),
                answer=answer,
                teacher=teacher or settings.teacher,
                domain=domain or settings.domain,
                system=settings.system,
                template_options=settings.template_options,
                place=place,
                extra={
                    column: row[column] for column in (*settings.keep_columns, *_PLAYED) if row.get(column) is not None
                },
            )
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
    if unseen:
        raise DataError(f"{name} has no column {', '.join(map(repr, sorted(unseen)))}; correct keep_columns.")


def _content(value: Any, chat: bool) -> Any:
    """What `Prompt.make` takes, from the prompt column.

    Raises:
        DataError: when the last message is the assistant's.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if chat and value else value
    last = value[-1] if isinstance(value, list) and value else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        raise DataError(
            "the last message is from the assistant, but the student is to write the next one; remove it (a reference "
            "answer belongs in answer_column)."
        )
    return value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _file_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    readers = {".jsonl": _jsonl_rows, ".json": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"{path} is neither .jsonl nor .parquet; convert it, one prompt per row.")
    if not path.is_file():
        raise DataError(f"prompt file {path} does not exist; check the path.")
    return readers[path.suffix](path)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as lines:  # editors on Windows put a mark at the start
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{path} line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{place} is not valid JSON ({error}).") from error
                if not isinstance(row, dict):
                    raise DataError(f"{place} is a {type(row).__name__}; each line must be a JSON object.")
                yield place, row
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompt file {path} cannot be read: {error}.") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"prompt file {path} cannot be read as parquet: {error}.") from error


def _dataset_rows(settings: DatasetSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from datasets import load_dataset

    try:
        data = load_dataset(settings.dataset, settings.subset, split=settings.split, revision=settings.revision)
    except Exception as error:  # the hub client raises errors of many libraries
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"dataset {settings.dataset!r} (subset {settings.subset!r}, split {settings.split!r}) cannot be loaded: "
            f"{type(error).__name__}: {reason}; check the id and the network, or use a local file."
        ) from error
    for number, row in enumerate(data, 1):
        yield f"dataset {settings.dataset!r} row {number}", row
