"""The contents of a run's prompt files, recorded in its folder, so that a resumed run can report that they changed.

A changed file is a warning and not an error, because people resume with corrections and further rows on purpose. From
then on the run differs from one without the change, because the order of a table's rows depends on their number.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from opd.tasks.source import Contents
from student.run.folder import RunFolder

_NAME = "prompts.json"


def keep_contents(folder: RunFolder, contents: Mapping[str, Contents]) -> list[str]:
    """Record in the run folder what the run reads from now on.

    Args:
        folder: the run folder.
        contents: rows and hashes of the prompt files, by name.

    Returns:
        A sentence for each file whose prompts have changed since the last record; empty for a new run.

    Raises:
        RunFolderError: if the record cannot be written.
    """
    changes = changed_contents(folder, contents)
    if changes or not (folder.path / _NAME).exists():
        folder.write_json(_NAME, {name: held._asdict() for name, held in contents.items()})
    return changes


def changed_contents(folder: RunFolder, contents: Mapping[str, Contents]) -> list[str]:
    """What `keep_contents` returns, without writing anything."""
    before = _read(folder.path / _NAME)
    if before is None or before == contents:
        return []
    effect = "the order of the prompts from here on, and which of them are held out, can differ from the run so far"
    found = []
    for name, held in contents.items():
        old = before.get(name)
        if old is None:
            said = f"are read from {name} for the first time (rows: {held.rows})"
        elif old == held:
            continue
        elif old.rows == held.rows:
            said = f"of {name} have changed since this run read them (rows: {held.rows} as before, but others)"
        else:
            said = f"of {name} have changed since this run read them (rows: {old.rows} then, {held.rows} now)"
        found.append(f"the prompts {said}; {effect}.")
    gone = sorted(before.keys() - contents.keys())
    return [*found, *(f"the prompts of {name} are no longer read; {effect}." for name in gone)]


def _read(path: Path) -> dict[str, Contents] | None:
    """The record; None if there is no readable one."""
    try:
        return {name: Contents(**held) for name, held in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
