"""The recorded paths of episodes, which methods have replayed up to the point where the student takes over."""

from collections.abc import Iterable

from opd.errors import DataError
from opd.tasks.environments.base import ENVIRONMENT, PATH
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow


def is_played(row: PlannedRow) -> bool:
    """Whether the student is to play the row as an episode, which is not given to it."""
    return ENVIRONMENT in row.prompt.extra and not (row.episode is not None and row.episode.given)


def path_of(prompt: Prompt, reader: str, instead: str = "") -> list[str]:
    """The actions of a prompt's path.

    Args:
        prompt: an episode's.
        reader: what needs the path, for the message.
        instead: what else would help, a clause for the message.

    Raises:
        DataError: if there is none.
    """
    path = prompt.extra.get(PATH)
    if not path:
        raise DataError(
            f"{prompt.name} has no recorded path, which {reader} needs; put one into its column 'path'"
            f"{f', or {instead}' if instead else ''}."
        )
    return list(path)


def check_paths(prompts: Iterable[Prompt], reader: str, instead: str = "") -> None:
    """Refuse episodes without a path; see `path_of`.

    Raises:
        DataError: naming the first prompt of one.
    """
    for prompt in prompts:
        if ENVIRONMENT in prompt.extra:
            path_of(prompt, reader, instead)
