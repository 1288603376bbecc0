"""What people download: the source archive and the wheel hold what the project's pages promise."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "opd", "protos", "scripts", "student", "teacher_server", "tests")
ALONE = (
    "pyproject.toml",
    "MANIFEST.in",
    "Makefile",
    "constraints.txt",
    "LICENSE",
    "README.md",
    ".pre-commit-config.yaml",
)
PASSING = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `opd-*.tar.gz` and `opd-*.whl`, built from a copy: setuptools writes beside what it packs."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=PASSING)
    for file in (*ALONE, *(path.name for path in ROOT.glob("*.md"))):
        shutil.copy(ROOT / file, copy)
    command = [sys.executable, "-W", "ignore", "-c", "import setuptools; setuptools.setup()"]
    for kind in ("sdist", "bdist_wheel"):
        done = subprocess.run(
            [*command, "-q", kind, "-d", str(out)], cwd=copy, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return out


def test_the_source_archive_holds_docs_examples_tests_and_all_the_rest(built: Path) -> None:
    (archive,) = built.glob("opd-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed_files = {Path(*Path(member.name).parts[1:]) for member in packed if member.isfile()}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc"}
    assert len(wanted) > 500 and {*wanted, *map(Path, ALONE)} - packed_files == set()


def test_the_wheel_holds_the_packages_and_the_recipes_and_no_tests(built: Path) -> None:
    (wheel,) = built.glob("opd-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = [*(ROOT / "examples" / "recipes").glob("*.yaml"), *(ROOT / "examples" / "first-hour").glob("*/*.*")]
    for path in (*shipped, ROOT / "examples" / "prepare_prompts.py"):
        place = path.relative_to(ROOT / "examples").as_posix()
        assert any(name.endswith(f"data/share/opd/{place}") for name in names), place
    code = {
        path.relative_to(ROOT).as_posix()
        for package in ("opd", "student", "teacher_server")
        for path in (ROOT / package).rglob("*.py")
    }
    assert code <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]
    assert "opd/py.typed" in names


def needed(names: list[str]) -> set[str]:
    """Canonical names of everything that the requirements `names` pull in here."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": e}) for e in (*wanted.extras, "")):
            continue
        key = f"{name}[{','.join(sorted(wanted.extras))}]"
        if name == "opd" or key in found:
            continue
        found.add(key)
        for text in requires(name) or ():
            further = Requirement(text)
            marker = further.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*wanted.extras, "")):
                further.marker = None
                waiting.append(further)
    return {key.partition("[")[0] for key in found}


@pytest.mark.skipif(find_spec("mypy") is None, reason="the extra dev is not installed")
def test_the_constraints_pin_all_that_the_environment_of_development_pulls_in() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    missing = needed([*project["dependencies"], *extras["dev"], *extras["test"], *extras["otel"]]) - pinned
    assert missing == set() and len(pinned) > 100
