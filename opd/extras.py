"""Packages that only some features need: asked for at the start, although they are imported hours later."""

from importlib.util import find_spec

from opd.errors import ConfigError


def has(package: str) -> bool:
    """Whether a package, or a dotted module of one, can be imported; nothing of it is, but the packages above it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def require(what: str, package: str, extra: str, otherwise: str = "") -> None:
    """Refuse what needs a package that is not installed.

    Args:
        what: what needs it, such as a key of a recipe.
        package: its import name.
        extra: the extra of opd that brings it.
        otherwise: what to do instead, as the end of the sentence.

    Raises:
        ConfigError: with the command that installs it.
    """
    if not has(package):
        end = f", or {otherwise}" if otherwise else ""
        name = package.partition(".")[0]
        raise ConfigError(
            f"{what} needs {name}, which is not installed; install it with pip install 'opd[{extra}]'{end}."
        )
