"""The layers of ARCHITECTURE.md, checked on the source: teacher_server -> opd <- student."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"opd": {"teacher_server", "student"}, "teacher_server": {"student"}, "student": {"teacher_server"}}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_package_imports_one_above_or_beside_it(package: str) -> None:
    broken = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py") if imports(p) & FORBIDDEN[package]}
    assert not broken


def targets(path: Path, modules: set[str], *, types: bool = False) -> set[str]:
    """The project's modules that a file imports, inside functions too; with `types`, also for the type checker only."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
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
    """Methods and RL are found by name: only `student.job.plugins` and what stands above the loop import them."""
    plugins = ("student/methods/", "student/rl/")
    # These apply whatever rewards there are.
    frame = {"student.scoring.rewards.chain", "student.scoring.rewards.rounds"}
    above = (*plugins, "student/job/plugins.py", "opd_lab/", "student/orbit/")
    files = {str(p.relative_to(ROOT)): p for p in (ROOT / "student").rglob("*.py")}
    names = {path.removesuffix(".py").replace("/", "."): path for path in files}
    broken = {
        path: found
        for path, file in files.items()
        if not path.startswith(above)
        and (found := [name for name in targets(file, set(names)) - frame if names[name].startswith(plugins)])
    }
    assert broken == {}


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


def test_no_file_is_longer_than_400_lines() -> None:
    folders = ("opd", "student", "teacher_server", "tests", "benchmarks", "scripts", "examples")
    made = "opd/wire/v1"  # by protoc
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py") if made not in str(p)]
    assert len(files) > 500
    files += [*ROOT.glob("*.md"), *(p for folder in ("docs", "deploy", "protos") for p in (ROOT / folder).rglob("*.*"))]
    # The page that the lab writes, and the contract, which golden files guard as one file.
    longer = {"docs/results.md", "protos/opd/wire/v1/teacher.proto"}
    kinds = {".py", ".md", ".proto"}
    files = [p for p in files if p.suffix in kinds and str(p.relative_to(ROOT)) not in longer]
    assert not {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 400}


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
