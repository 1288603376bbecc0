"""Every public method has a docstring, here or in a base class; no docstring only says where to read another one."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("opd", "teacher_server", "student", "opd_zoo", "opd_lab", "benchmarks", "scripts", "examples")
Method = ast.FunctionDef | ast.AsyncFunctionDef
CLASSES: dict[str, list[ast.ClassDef]] = defaultdict(list)
PLACES: dict[ast.ClassDef, str] = {}
for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "wire/v1" not in path.as_posix()):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            CLASSES[node.name].append(node)
            PLACES[node] = path.relative_to(ROOT).as_posix()


def methods(node: ast.ClassDef) -> Iterator[Method]:
    return (part for part in node.body if isinstance(part, Method))


def bases(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        yield named.attr if isinstance(named, ast.Attribute) else ast.unparse(named)


def inherits_docstring(node: ast.ClassDef, method: str) -> bool:
    """Whether a base class documents a method; one of another project is trusted to."""
    return any(
        base not in CLASSES
        or any(
            any(own.name == method and ast.get_docstring(own) for own in methods(found))
            or inherits_docstring(found, method)
            for found in CLASSES[base]
        )
        for base in bases(node)
        if base not in ("Protocol", "Generic", "ABC")
    )


def test_every_public_method_has_a_docstring_here_or_in_a_base_class() -> None:
    missing = [
        f"{place}: {node.name}.{method.name}"
        for node, place in PLACES.items()
        for method in methods(node)
        if not method.name.startswith("_") and not node.name.startswith("_") and not ast.get_docstring(method)
        if not inherits_docstring(node, method.name)
    ]
    assert not missing


def test_no_docstring_only_says_where_to_read_another_one() -> None:
    empty = re.compile(r"See `[^`]*`\.?")
    assert not [
        f"{place}: {node.name}.{method.name}"
        for node, place in PLACES.items()
        for method in methods(node)
        if empty.fullmatch(ast.get_docstring(method) or "")
    ]
