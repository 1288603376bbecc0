"""Rows of JSONL and parquet files and of datasets, read from disk on demand; memory holds only where they are."""

import json
import os
import weakref
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from opd.errors import DataError, one_line
from opd.tasks.settings import DatasetSettings, FileSettings

Row = Mapping[str, Any]


class Rows(Protocol):
    """A table on disk."""

    name: str
    """The file or dataset, for messages."""

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """Every row, in order, with its place for messages.

        Raises:
            DataError: if a row cannot be read.
        """
        ...

    def at(self, index: int) -> tuple[str, Row]:
        """A row that an iteration has passed.

        Raises:
            DataError: if it cannot be read any more.
        """
        ...


def open_rows(settings: DatasetSettings | FileSettings) -> Rows:
    """The rows that `settings` name.

    Raises:
        DataError: if they cannot be read.
    """
    return _Dataset(settings) if isinstance(settings, DatasetSettings) else file_rows(settings.file)


def file_rows(path: Path) -> Rows:
    """The rows of a file.

    Raises:
        DataError: if it does not exist or is of another kind.
    """
    kinds: dict[str, type[_Jsonl] | type[_Parquet]] = {".jsonl": _Jsonl, ".json": _Jsonl, ".parquet": _Parquet}
    if path.suffix not in kinds:
        raise DataError(f"{path} is neither .jsonl nor .parquet; convert it to one of them, with one prompt per row.")
    if not path.is_file():
        raise DataError(f"prompt file {path} does not exist; check the path.")
    return kinds[path.suffix](path)


class _Jsonl:
    """Lines of a file that stays open, so that replacing the file does not change the run."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._starts, self._lengths, self._numbers = array("Q"), array("I"), array("I")
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"prompt file {path} cannot be read: {error}.") from error
        weakref.finalize(self, os.close, self._file)

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        self._starts, self._lengths, self._numbers = array("Q"), array("I"), array("I")
        start = 0
        try:
            with open(self._file, "rb", closefd=False) as lines:
                lines.seek(0)
                for number, line in enumerate(lines, 1):
                    if line.strip(b" \t\r\n\v\f") not in (b"", b"\xef\xbb\xbf"):
                        row = self._parsed(line, number)
                        self._starts.append(start)
                        self._lengths.append(len(line))
                        self._numbers.append(number)
                        yield self._place(number), row
                    start += len(line)
        except OSError as error:
            raise DataError(f"prompt file {self.name} cannot be read: {error}.") from error

    def at(self, index: int) -> tuple[str, Row]:
        number = self._numbers[index]
        try:
            line = os.pread(self._file, self._lengths[index], self._starts[index])
        except OSError as error:
            raise DataError(f"prompt file {self.name} cannot be read: {error}.") from error
        return self._place(number), self._parsed(line, number)

    def _place(self, number: int) -> str:
        return f"{self.name} line {number}"

    def _parsed(self, line: bytes, number: int) -> Row:
        try:
            # Editors on Windows write a byte order mark at the start.
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"prompt file {self.name} cannot be read: {error}.") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._place(number)} is not valid JSON ({error}).") from error
        if not isinstance(row, dict):
            raise DataError(f"{self._place(number)} is a {type(row).__name__}; each line must be a JSON object.")
        return row


class _Parquet:
    """Rows in Arrow's columns, which need no Python objects."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name = str(path)
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True, partitioning=None)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"prompt file {path} cannot be read as parquet: {error}.") from error

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        number = 0
        for batch in self._table.to_batches(max_chunksize=4096):
            for row in batch.to_pylist():
                number += 1
                yield f"{self.name} row {number}", row

    def at(self, index: int) -> tuple[str, Row]:
        (row,) = self._table.slice(index, 1).to_pylist()
        return f"{self.name} row {index + 1}", row


def _loaded(settings: DatasetSettings) -> Any:
    """The split of a dataset on the hub or in a folder, including what `save_to_disk` wrote.

    Raises:
        DataError: if a saved dataset has no such split.
    """
    from datasets import load_dataset, load_from_disk

    folder = Path(settings.dataset)
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return load_dataset(settings.dataset, settings.subset, split=settings.split, revision=settings.revision)
    saved = load_from_disk(settings.dataset)
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if settings.split not in splits:
        raise DataError(
            f"dataset {settings.dataset!r} has no split {settings.split!r}, but {', '.join(map(repr, splits))}; "
            "correct prompts.split."
        )
    return splits[settings.split]


class _Dataset:
    """Rows of a Hugging Face dataset, whose files are memory-mapped."""

    def __init__(self, settings: DatasetSettings) -> None:
        self.name = f"dataset {settings.dataset!r}"
        try:
            self._data = _loaded(settings)
        except DataError:
            raise
        except Exception as error:  # the hub client raises errors of many libraries
            reason = one_line(error, 200)
            raise DataError(
                f"{self.name} (subset {settings.subset!r}, split {settings.split!r}) cannot be loaded: "
                f"{type(error).__name__}: {reason}; check the id and the network, or use a local file."
            ) from error

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        for number, row in enumerate(self._data, 1):
            yield f"{self.name} row {number}", row

    def at(self, index: int) -> tuple[str, Row]:
        return f"{self.name} row {index + 1}", self._data[index]
