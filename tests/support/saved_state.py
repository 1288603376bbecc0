"""A state written to a folder as a checkpoint holds it, for `load_state` to read."""

from pathlib import Path
from typing import Any

from student.state.state_io import state_parts


def save_state(folder: Path, name: str, state: dict[str, Any]) -> None:
    """Write the parts of `state_parts` below `folder`; of sharded tensors every rank writes its own."""
    for part in state_parts(name, state):
        list(part.write(folder))
