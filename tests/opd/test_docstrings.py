"""Every public method has a docstring, here or in a base class; no docstring only says where to read another one."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("opd", "teacher_server", "student", "opd_zoo", "opd_lab", "benchmarks", "scripts", "examples")
Method = ast.FunctionDef | ast.AsyncFunctionDef
Classes = dict[str, list[tuple[str, ast.ClassDef]]]


@pytest.fixture(scope="module")
def classes() -> Classes:
    """All classes by name, each with its file."""
    found: Classes = defaultdict(list)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "wire/v1" not in path.as_posix():
                found[node.name].append((path.relative_to(ROOT).as_posix(), node))
    return found


def methods(node: ast.ClassDef) -> Iterator[Method]:
    return (part for part in node.body if isinstance(part, Method))


def bases(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        yield named.attr if isinstance(named, ast.Attribute) else ast.unparse(named)


def inherits_docstring(classes: Classes, node: ast.ClassDef, method: str) -> bool:
    """Whether a base class documents a method; one of another project is trusted to."""
    return any(
        base not in classes
        or any(
            any(own.name == method and ast.get_docstring(own) for own in methods(found))
            or inherits_docstring(classes, found, method)
            for _, found in classes[base]
        )
        for base in bases(node)
        if base not in ("Protocol", "Generic", "ABC")
    )


def test_every_public_method_has_a_docstring_here_or_in_a_base_class(classes: Classes) -> None:
    missing = [
        f"{place}: {node.name}.{method.name}"
        for place, node in chain(*classes.values())
        for method in methods(node)
        if not method.name.startswith("_") and not node.name.startswith("_") and not ast.get_docstring(method)
        if not inherits_docstring(classes, node, method.name)
    ]
    assert not missing


def test_no_docstring_only_says_where_to_read_another_one(classes: Classes) -> None:
    empty = re.compile(r"See (`[^`]*`|the module)\.?")
    assert not [
        f"{place}: {node.name}.{method.name}"
        for place, node in chain(*classes.values())
        for method in methods(node)
        if empty.fullmatch(ast.get_docstring(method) or "")
    ]
