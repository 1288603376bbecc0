"""What is no longer as it was when a run began: its prompt files, and its teachers' weights by their hashes.

Both are warnings and not errors. People resume with corrected prompts and further rows on purpose; from then on the run
differs from one without the change, because the order of a table's rows depends on their number. Servers take new
weights on purpose (`opd fleet update-weights`), and a run that is stopped and resumed learns from them; what it had
measured is against the old ones.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opd.tasks.source import Contents
from opd.wire.v1 import teacher_pb2 as pb
from student.run.folder import PROVENANCE, RunFolder
from student.settings.recipe import Recipe

if TYPE_CHECKING:
    from student.job.job import Job

_PROMPTS = "prompts.json"


def changes_since(folder: RunFolder, job: "Job") -> list[str]:
    """A sentence for each change; records what the run reads from now on.

    Raises:
        RunFolderError: if the record cannot be written.
    """
    return [*keep_contents(folder, job.source.contents()), *changed_teachers(job.recipe, job.models.infos)]


def changed_teachers(recipe: Recipe, infos: Mapping[str, pb.TeacherInfo]) -> list[str]:
    """A sentence for each teacher whose weights are others than when the run began.

    Args:
        recipe: of the run; a teacher whose weights the run itself replaces is left out.
        infos: what the servers say of the teachers now.
    """
    following = None if recipe.teachers is None else recipe.teachers.ema.served
    try:
        began = json.loads((recipe.run / PROVENANCE).read_text(encoding="utf-8"))["fleet"]
        before = {name: str(info.get("weights_hash", "")) for name, info in began.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # a record for people: a run goes on without it
    return [
        f"teacher {name!r} now has weights {info.weights_hash[:12]}, but had {before[name][:12]} when the run began; "
        "from here on the student learns from the new ones."
        for name, info in infos.items()
        if name != following and before.get(name) and info.weights_hash and info.weights_hash != before[name]
    ]


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
    if changes or not (folder.path / _PROMPTS).exists():
        folder.write_json(_PROMPTS, {name: held._asdict() for name, held in contents.items()})
    return changes


def changed_contents(folder: RunFolder, contents: Mapping[str, Contents]) -> list[str]:
    """What `keep_contents` returns, without writing anything."""
    before = _read(folder.path / _PROMPTS)
    if before is None or before == contents:
        return []
    effect = "the order of the prompts from here on, and which of them are held out, can differ from the run so far"
    changes = []
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
        changes.append(f"the prompts {said}; {effect}.")
    gone = sorted(before.keys() - contents.keys())
    return [*changes, *(f"the prompts of {name} are no longer read; {effect}." for name in gone)]


def _read(path: Path) -> dict[str, Contents] | None:
    """The record; None if there is no readable one."""
    try:
        return {name: Contents(**held) for name, held in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
