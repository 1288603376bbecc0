"""The layers of ARCHITECTURE.md, checked on the source: teacher_server -> opd <- student <- opd_zoo, opd_lab."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {
    "opd": {"teacher_server", "student", "opd_zoo", "opd_lab"},
    "teacher_server": {"student", "opd_zoo", "opd_lab"},
    "student": {"teacher_server", "opd_zoo", "opd_lab"},
    "opd_zoo": {"teacher_server", "opd_lab"},
    "opd_lab": {"teacher_server"},
}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The imports of a file, inside functions too, and its conditions: what the tests here look at."""
    kinds = (ast.Import, ast.ImportFrom, ast.If)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


def naming(package: str, folder: Path) -> Iterator[Path]:
    """The files in which a package's name stands: the others need not be parsed to know that they do not import it."""
    return (path for path in folder.rglob("*.py") if package in path.read_text())


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_package_imports_one_above_or_beside_it(package: str) -> None:
    files = [path for name in FORBIDDEN[package] for path in naming(name, ROOT / package)]
    assert not {str(path.relative_to(ROOT)) for path in files if imports(path) & FORBIDDEN[package]}


def test_no_test_of_the_trunk_imports_the_zoo() -> None:
    folders = (ROOT / "tests" / package for package in ("opd", "teacher_server", "student"))
    trunk = [path for folder in folders for path in naming("opd_zoo", folder)]
    assert not {str(path.relative_to(ROOT)) for path in trunk if "opd_zoo" in imports(path)}


def targets(path: Path, modules: set[str], *, types: bool = False) -> set[str]:
    """The project's modules that a file imports, inside functions too; with `types`, also for the type checker only."""
    nodes = nodes_of(path)
    typing_only = (
        set()
        if types
        else {
            id(inner)
            for node in nodes
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
    )
    found = set()
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= inner or {node.module or ""}
    return found & modules


def test_the_loop_knows_no_plug_in() -> None:
    """Methods and RL are found by name: only `student.job.plugins`, its rules and what stands above import them."""
    plugins = ("student/methods/", "student/rl/")
    above = (*plugins, "student/job/plugins.py", "student/job/rules.py", "student/job/job.py", "student/orbit/")
    files = {str(p.relative_to(ROOT)): p for p in (ROOT / "student").rglob("*.py")}
    names = {path.removesuffix(".py").replace("/", "."): path for path in files}
    broken = {
        path: found
        for path, file in files.items()
        if not path.startswith(above)
        and (found := [name for name in targets(file, set(names)) if names[name].startswith(plugins)])
    }
    assert broken == {}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_rooms_of_a_package_import_each_other_one_way(package: str) -> None:
    """A room is a folder, or a file beside the folders; its floor follows from what it imports when it runs."""
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in (ROOT / package).rglob("*.py")
    }
    rooms: dict[str, set[str]] = {}
    for name, path in files.items():
        room = ".".join(name.split(".")[:2])
        rooms.setdefault(room, set()).update(
            ".".join(target.split(".")[:2]) for target in targets(path, set(files)) if target != package
        )
    while leaves := [room for room, wanted in rooms.items() if not (wanted - {room}) & rooms.keys()]:
        for room in leaves:
            del rooms[room]
    assert not rooms, "rooms in circles, or above them"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in (ROOT / package).rglob("*.py")
    }
    waiting = {name: targets(path, set(files), types=True) - {name} for name, path in files.items()}
    while leaves := [name for name, wanted in waiting.items() if not wanted & waiting.keys()]:
        for name in leaves:
            del waiting[name]
    assert not waiting, "modules in circles, or above them"


LONGER = {
    "docs/results.md": "the page that the lab writes",
    "protos/opd/wire/v1/teacher.proto": "the contract, which golden files guard as one file",
    "teacher_server/engines/vllm.py": "two ways to run one vLLM, which share how it is started, filled and emptied",
}
"""Files of more than 400 lines, each with its reason. The limit is a guide: a file is split by idea, never squeezed."""


def test_a_file_of_more_than_400_lines_has_its_reason() -> None:
    folders = (*FORBIDDEN, "tests", "benchmarks", "scripts", "examples")
    made = "opd/wire/v1"  # by protoc
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py") if made not in str(p)]
    assert len(files) > 500
    files += [*ROOT.glob("*.md"), *(p for folder in ("docs", "deploy", "protos") for p in (ROOT / folder).rglob("*.*"))]
    kinds = {".py", ".md", ".proto"}
    files = [p for p in files if p.suffix in kinds]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    assert {name for name, lines in lengths.items() if lines > 400} <= LONGER.keys()


def test_importing_opd_needs_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, opd, opd.maths, opd.registry; print(sorted({'torch', 'grpc', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_listing_verbs_and_plugins_needs_no_torch() -> None:
    code = (
        "import sys, opd.cli, opd.plugins_cli\nopd.cli._add_verbs()\n"
        "[list(r) for r in opd.plugins_cli.registries()]\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
