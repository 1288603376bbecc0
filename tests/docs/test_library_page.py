"""The face for Python: light to import, typed, and every example of its page and notebook runs."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opd
import student

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "grpc", "numpy", "transformers", "pydantic", "yaml"}


def test_the_faces_load_nothing_until_they_are_used() -> None:
    code = f"import sys, opd, student; print(sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", [opd, student], ids=["opd", "student"])
def test_every_public_name_is_there_documented_and_typed(module: Any) -> None:
    declared = ast.parse(Path(module.__file__).read_text())
    (typed,) = (node for node in declared.body if isinstance(node, ast.If))
    known = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name in set(module.__all__) - {"__version__"}:
        assert name in known and getattr(module, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", blocks(), ids=["score", "divergences", "train", "session"])
def test_an_example_of_the_page_runs(
    code: str, lone_teacher: Any, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(code.strip().splitlines()) <= 16
    for there, here in (
        ("runs/demo/world-0", str(world)),
        ("127.0.0.1:7070", lone_teacher.address),
        ("runs/from-python", str(tmp_path / "run")),
        ("runs/my-loop", str(tmp_path / "own")),
    ):
        code = code.replace(there, here)
    exec(compile(code, "library.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.usefixtures("forked_servers")
def test_the_notebook_runs(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples" / "first_look.ipynb").read_text())["cells"]
    scope: dict[str, Any] = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        code = "".join(cell["source"])
        code = code.replace('Path("runs/notebook")', f"Path({str(tmp_path)!r})")
        code = code.replace('FOLDER / "world"', f"Path({str(world)!r})")
        exec(compile(code, "first_look.ipynb", "exec"), scope)
    assert "nats   teacher:" in capsys.readouterr().out
    assert scope["summary"]["steps"] == 5
