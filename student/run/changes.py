"""What is no longer as it was when a run began: its prompt files, its teachers' weights."""

from student.job import Job
from student.run.folder import RunFolder
from student.run.prompt_record import keep_contents
from student.run.teacher_record import changed_teachers


def changes_since(folder: RunFolder, job: Job) -> list[str]:
    """A sentence for each change; records what the run reads from now on.

    Raises:
        RunFolderError: when the record cannot be written.
    """
    return [*keep_contents(folder, job.source.contents()), *changed_teachers(job.recipe, job.models.infos)]
