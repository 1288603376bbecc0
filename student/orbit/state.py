"""What `opd orbit` has done so far: one small file, renamed into place after every change."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from opd.errors import RunFolderError


@dataclass(slots=True)
class State:
    """Progress of the stages.

    Attributes:
        path: the file.
        recipe: SHA-256 of the recipe that the stages follow.
        checkpoints: stage to the folder of the model that it ended with.
        running: the stage that was begun and has not ended, "" for none.
        teachers: mode to the folder whose weights its servers were given last.
        warnings: what a person should look at, by stage.
    """

    path: Path
    recipe: str
    checkpoints: dict[str, str] = field(default_factory=dict)
    running: str = ""
    teachers: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, recipe: str, *, resume: bool) -> "State":
        """The state of a new run, or of one that goes on.

        Raises:
            RunFolderError: when the folder is in use and `resume` is not set, or holds no state of this recipe.
        """
        path = folder / "state.json"
        if not resume:
            if folder.exists() and any(folder.iterdir()):
                raise RunFolderError(f"folder {folder} is not empty; continue with --resume or choose another run.")
            return cls(path, recipe)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read ({error.strerror}); start without --resume.") from error
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged ({error}); restore it or start another run.") from error
        if data["recipe"] != recipe:
            raise RunFolderError(
                f"the stages in {folder} follow another recipe; use the one that is saved there as orbit.yaml."
            )
        return cls(path, **data)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        data = {name: value for name, value in asdict(self).items() if name != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
