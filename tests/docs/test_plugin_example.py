"""The plug-in that docs/methods.md writes is a plug-in."""

import os
import re
import sys
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parents[2]


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "methods.md").read_text(), flags=re.DOTALL)
    return str(text)


def test_the_term_of_the_documentation_is_listed_and_passes_the_conformance_tests(tmp_path: Path) -> None:
    group, entry = block("toml").strip().splitlines()
    package, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "huber.py").write_text(block("python"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{group.split(chr(34))[1]}]\n{entry.replace(chr(34), '')}\n",
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    # Not a worker of the run that this test belongs to.
    env = {key: value for key, value in env.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "tests/student/methods/test_conformance.py", "-k", "huber"]
    result = forked.run(command, cwd=ROOT, env=env)
    assert result.returncode == 0, result.stdout
    shown = forked.run([sys.executable, "-m", "opd.cli", "plugins", "show", "huber"], env=env)
    assert shown.returncode == 0 and "Bound of the log-ratio" in shown.stdout, shown.stderr
