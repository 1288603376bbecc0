"""The command line `opd`. Verbs of the upper packages are found by entry point, so this module imports none of them.

Every error that a user can cause is a single sentence on stderr, with an exit code of its own (see opd/errors.py).
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from types import FrameType
from typing import Annotated

import typer

from opd import __version__
from opd.errors import CancelledError, ConfigError, OpdError
from opd.printable import LogFormatter, echo
from opd.signals import end_as_init

app = typer.Typer(
    name="opd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # mode "rich" would swallow the defaults that stand in [brackets]
    help="On-policy distillation as a service: serve teachers over gRPC and train students on their own answers.",
    epilog="Start with `opd tiny build world`, then `opd serve`, then `opd train`. Docs: README.md.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"opd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        # A callback of the option itself, because this function runs only when a verb follows.
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log at level DEBUG.")] = False,
) -> None:
    level = "DEBUG" if verbose else os.environ.get("OPD_LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"OPD_LOG_LEVEL is {level!r}; use DEBUG, INFO, WARNING or ERROR.")
    if level != "DEBUG":
        # What gRPC's core writes past Python's logs, such as goodbyes of servers, is in the errors of calls as well.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def _add_verbs(arguments: Sequence[str] = ()) -> None:
    """Add the verb that `arguments` name; if they name none, add all, for help, completion and suggestions.

    Verbs that were added before are kept. Loading all of them takes three times as long as loading one, which scripts
    that call `opd` would have to wait for.
    """
    points = sorted(entry_points(group="opd.commands"), key=lambda p: p.name)
    # No flag before the verb takes a value, so the first word that is not a flag is the verb.
    named = next((word for word in arguments if not word.startswith("-")), None)
    known = {verb.name for verb in app.registered_commands} | {group.name for group in app.registered_groups}
    for point in [p for p in points if p.name == named] or points:
        if point.name in known:
            continue
        try:
            verb = point.load()
        except ImportError as error:
            logging.getLogger(__name__).warning("command %r cannot be loaded: %s", point.name, error)
            continue
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=point.name)
        else:
            app.command(name=point.name)(verb)


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C as well as raise it.

    If it comes while torch is imported, torch swallows the exception and then fails with another error. A signal that
    is ignored, as under nohup, stays so.
    """
    noted: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not plain or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Entry point of the `opd` command."""
    end_as_init()
    with _noting_interrupts() as interrupts:
        _run(interrupts)


def _run(interrupts: Sequence[int]) -> None:
    try:
        _add_verbs(sys.argv[1:])
        code = app(standalone_mode=False)
        if code == CancelledError.exit_code:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()  # here, where a failure still gets a message
        sys.exit(code if isinstance(code, int) else 0)
    except OpdError as error:
        # A cancellation that the user asked for is not an error.
        said = str(error).replace("\n", "\n  ")  # so that what a message quotes cannot look like a message
        from opd.telemetry.logs import is_json

        if is_json():
            level = logging.WARNING if isinstance(error, CancelledError) else logging.ERROR
            logging.getLogger("opd").log(level, str(error), extra={"exit_code": error.exit_code})
        else:
            echo(said if isinstance(error, CancelledError) else f"error: {said}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        echo("interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        # Full disks, read-only folders, unreadable files: the system's message names the file.
        logging.getLogger(__name__).debug("traceback of the error", exc_info=True)
        place = f": {error.filename}" if error.filename else ""
        echo(f"error: {error.strerror or error}{place}.", err=True)
        with contextlib.suppress(OSError, ValueError):  # output that cannot be written must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OpdError.exit_code)
    except ModuleNotFoundError as error:
        # Of a checkout that is used where its dependencies are not all installed.
        package = str(error.name).partition(".")[0]
        if package in ("opd", "student", "teacher_server", "opd_zoo", "opd_lab"):
            raise
        logging.getLogger(__name__).debug("traceback of the error", exc_info=True)
        echo(
            f"error: this needs the package {package!r}, which is not installed; install it (pip install opd).",
            err=True,
        )
        sys.exit(ConfigError.exit_code)
    except Exception as error:
        # Errors of the command line itself know how to print their usage message.
        show = getattr(error, "show", None)
        if show is None and interrupts:
            logging.getLogger(__name__).debug("traceback of the error", exc_info=True)
            echo("interrupted", err=True)
            sys.exit(130)
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
