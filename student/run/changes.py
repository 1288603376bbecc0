"""What is no longer as it was when a run began: its prompt files, and its teachers' weights by their hashes.

Other weights are a warning, not an error: servers take new ones on purpose (`opd fleet update-weights`), and a run that
is stopped and resumed learns from them. What it measured before is against the old ones.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opd.wire.v1 import teacher_pb2 as pb
from student.run.folder import PROVENANCE, RunFolder
from student.run.prompt_record import keep_contents
from student.settings.recipe import Recipe

if TYPE_CHECKING:
    from student.job.job import Job


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
