"""Nothing behind the wire runs code of others: no pickle, no eval, remote code only for a pinned commit."""

import ast
from pathlib import Path

import pytest

from opd.errors import ConfigError

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "compile"}


def offences(source: str) -> list[str]:
    """Uses of anything that would turn bytes into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name in ("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                found.append(name)
            if any(k.arg == "allow_pickle" and getattr(k.value, "value", True) for k in node.keywords):
                found.append("allow_pickle")
            if any(k.arg == "shell" and getattr(k.value, "value", True) for k in node.keywords):
                found.append("shell")
    return found


def test_nothing_behind_the_wire_unpickles_evaluates_or_loads_code() -> None:
    root = Path(__file__).resolve().parents[3]
    files = [*root.glob("teacher_server/**/*.py"), *root.glob("opd/**/*.py")]
    assert root / "teacher_server/server.py" in files and len(files) > 30
    # The one place that is made for running programs: a process of its own that has given up its rights.
    files.remove(root / "opd/procs/sandbox_child.py")
    assert {str(f.relative_to(root)): offences(f.read_text()) for f in files if offences(f.read_text())} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval(x)",
        "torch.load(p, weights_only=True)",
        "np.load(p, allow_pickle=True)",
        "yaml.load(x, Loader=L)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_for_offences_finds_them(source: str) -> None:
    assert offences(source)


@pytest.mark.parametrize("entry", ["m", "m@main", "m@" + "g" * 40, "@" + "a" * 40])
def test_remote_code_needs_a_pinned_commit(entry: str) -> None:
    from teacher_server.build import engine_factory
    from teacher_server.settings import ServerSettings

    with pytest.raises(ConfigError, match="MODEL@REVISION"):
        engine_factory(ServerSettings(security={"trust_remote_code": [entry]}))


def test_remote_code_is_on_for_the_listed_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from teacher_server import build
    from teacher_server.settings import ServerSettings

    class Recorder:
        def __init__(self, model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
            self.seen = (model, revision, trust_remote_code)

    monkeypatch.setattr(build.ENGINES, "load", lambda name: Recorder)
    factory = build.engine_factory(ServerSettings(security={"trust_remote_code": ["org/m@" + "a" * 40]}))
    assert factory("org/m").seen == ("org/m", "a" * 40, True)
    assert factory("org/other").seen == ("org/other", None, False)
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        build.engine_factory(ServerSettings(engine={"options": {"trust_remote_code": True}}))
    with pytest.raises(ConfigError, match="deterministic"):
        build.engine_factory(ServerSettings(engine={"deterministic": True}))
    with pytest.raises(ConfigError, match="no option 'typo'"):
        build.engine_factory(ServerSettings(engine={"options": {"typo": 1}}))


def test_an_option_that_an_engine_cannot_do_without_is_named() -> None:
    from teacher_server.build import engine_factory
    from teacher_server.settings import ServerSettings

    with pytest.raises(ConfigError, match="needs option 'url'"):
        engine_factory(ServerSettings(engine={"engine": "sglang"}))
