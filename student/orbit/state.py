"""The progress of `opd orbit`, in one small file that is replaced by a rename after every change."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from opd.errors import RunFolderError
from opd.files import write_whole


@dataclass(slots=True)
class State:
    """Progress of the stages.

    Attributes:
        path: the file.
        settings: SHA-256 of the settings of each stage, see `student.orbit.recipe.stage_hashes`.
        checkpoints: folder of the final model of each stage that is done.
        running: name of the stage that was begun and has not ended; "" if there is none.
        teachers: for each mode, the folder whose weights its servers were last given.
        servers: for each mode, the addresses at which its teacher is served, or was last.
        warnings: sentences for the user, by stage, or by "teacher MODE" for servers that did not take the weights.
    """

    path: Path
    settings: dict[str, str] = field(default_factory=dict)
    checkpoints: dict[str, str] = field(default_factory=dict)
    running: str = ""
    teachers: dict[str, str] = field(default_factory=dict)
    servers: dict[str, list[str]] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, wanted: Mapping[str, str], *, resume: bool) -> "State":
        """Return the state of a new or a resumed run.

        The settings of stages that are done must be unchanged. Those of other stages may differ.

        Args:
            folder: run folder.
            wanted: hashes of the settings of all stages, by stage.
            resume: whether the run is resumed.

        Raises:
            RunFolderError: when the folder is not empty and `resume` is False, or, with `resume`, when there is no
                readable state or a stage that is done had other settings.
        """
        path = folder / "state.json"
        if not resume:
            # The lock's file exists already, because the lock is taken before the state is read.
            if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
                if not path.exists():
                    raise RunFolderError(f"folder {folder} is not empty and holds no ORBIT run; choose another one.")
                raise RunFolderError(
                    f"folder {folder} holds a run already; continue it with --resume, or choose another folder."
                )
            return cls(path)
        try:
            state = cls(path, **json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read ({error.strerror}); is there a run to resume?") from error
        except (ValueError, TypeError) as error:
            raise RunFolderError(
                f"{path} is damaged or of another version of opd ({error}); restore it or start another run."
            ) from error
        for stage in state.checkpoints:
            if state.settings.get(stage) != wanted.get(stage):
                raise RunFolderError(
                    f"stage {stage} in {folder} is done and had other settings than this recipe gives it; use those of "
                    "orbit.yaml there, or start another run. Only what is not done yet may change."
                )
        return state

    def save(self) -> None:
        """Write the file atomically."""
        data = {name: value for name, value in asdict(self).items() if name != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(data, indent=1))
