"""Plain functions `(prompt, answer) -> float | bool | None` as verifiers, run in processes of their own."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from opd.errors import ConfigError
from opd.procs.children import ChildFailed
from opd.procs.host import Service
from opd.procs.workers import Workers
from opd.registry import function_at, imported
from opd.tasks.prompt import Prompt
from opd.tasks.registry import VERIFIERS
from opd.tasks.verdict import Verdict, Verifier

Judge = Callable[[Prompt, str], float | bool | None]


class FunctionCheck:
    """Calls a function in worker processes.

    Args:
        path: dotted path "package.module:function".
        timeout: seconds per call.
        workers: most processes at the same time; None for one per core.
    """

    def __init__(self, path: str, timeout: float, workers: int | None = None) -> None:
        self.path = path
        self._workers = Workers("opd.tasks.function:Function", timeout, path, most=workers)

    def load(self) -> Judge:
        """Import the function in this process, to check that it can be imported.

        Raises:
            ConfigError: if it cannot, or does not take a prompt and an answer.
        """
        return load_function(self.path)

    def __call__(self, prompt: Prompt, answer: str) -> float | None:
        """The function's result: True and False as 1 and 0, None if it cannot tell.

        Raises:
            ChildFailed: if it raises, hangs, crashes, or returns anything else.
        """
        return self._workers.ask({"prompt": asdict(prompt), "answer": answer})["value"]

    def close(self) -> None:
        """Stop the processes."""
        self._workers.close()


class FunctionVerifier(Verifier):
    """A function as a verifier: True, or at least 1, is correct; less is wrong with partial credit; None is unknown."""

    def __init__(self, path: str, timeout: float = 10.0) -> None:
        self._check = FunctionCheck(path, timeout)
        self._check.load()

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        try:
            value = self._check(prompt, completion)
        except ChildFailed as error:
            return Verdict.unknown(str(error))
        return (
            Verdict.unknown("the function returned None, which means that it cannot tell")
            if value is None
            else Verdict.score(value)
        )

    def close(self) -> None:
        """Stop the worker processes."""
        self._check.close()


def load_function(path: str) -> Judge:
    """The function at a dotted path.

    Raises:
        ConfigError: if it cannot be imported, or cannot be called with a prompt and an answer.
    """
    judge: Judge = function_at(path, "a prompt", "an answer")
    return judge


def load_verifier(name: str, timeout: float, options: Mapping[str, Any] | None = None) -> Verifier:
    """The verifier with a name or at a dotted path, which may also be that of a plain function.

    Args:
        name: the name or path.
        timeout: seconds per check.
        options: options for a verifier that declares `Options`.

    Raises:
        ConfigError: if there is no such verifier, its options are not valid, or it takes none.
    """
    function = ":" in name and name not in VERIFIERS and inspect.isfunction(_at(name))
    cls = None if function else VERIFIERS.load(name)
    if options and not hasattr(cls, "Options"):
        names = ", ".join(sorted(options))
        raise ConfigError(f"verifier {name!r} has no options; leave out prompts.verifier_options ({names}).")
    if cls is None:
        return FunctionVerifier(name, timeout)
    arguments = {"timeout": timeout} | ({"options": options or {}} if hasattr(cls, "Options") else {})
    try:
        inspect.signature(cls).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"verifier {name!r} cannot be created with {' and '.join(arguments)}: {error}; give its class an __init__ "
            "that takes them."
        ) from error
    if not hasattr(cls, "close"):
        raise ConfigError(f"verifier {name!r} has no method close; add one, which may do nothing.")
    verifier: Verifier = cls(**arguments)
    return verifier


def _at(path: str) -> Any:
    try:
        return imported(path)
    except (ImportError, AttributeError):
        return None


class Function(Service):
    """The service: calls the function at a path. It is imported in each child, as it may hold threads or a GPU."""

    def open(self) -> None:
        """Import the function."""
        self._function = load_function(self.argument)

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call the function."""
        value = self._function(Prompt.restored(request["prompt"]), request["answer"])
        if value is not None and not isinstance(value, bool | int | float):
            raise TypeError(f"{self.argument} returned {type(value).__name__}; return a number, True, False or None")
        number = None if value is None else float(value)
        if number is not None and number - number != 0:
            raise ValueError(f"{self.argument} returned {number}; return a finite number")
        return {"value": number}
