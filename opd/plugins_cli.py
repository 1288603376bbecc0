"""`opd plugins list` and `opd plugins show NAME`: what can be chosen by name, and its settings."""

from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from opd.errors import ConfigError, OpdError
from opd.registry import Entry, Registry, hint

app = typer.Typer(
    no_args_is_help=True, help="List and describe objectives, rewards, methods, tasks, verifiers and engines."
)


def registries() -> list[Registry]:
    """All registries of the installed packages, found by entry point; imports no torch."""
    return [point.load() for point in sorted(entry_points(group="opd.registries"), key=lambda p: p.name)]


@app.command("list")
def list_plugins(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="Kind of plug-in to list, for example objective, reward, method or verifier. Default: all kinds."
        ),
    ] = None,
) -> None:
    """List everything that a recipe or server can name, and where it comes from."""
    from opd.console import Console, Table

    known = registries()
    if kind is not None and kind not in {registry.kind for registry in known}:
        raise ConfigError(f"kind {kind!r} is unknown; kinds are {', '.join(r.kind for r in known)}.")
    table = Table(box=None, pad_edge=False)
    for column in ("kind", "name", "what it is", "evidence", "from"):
        table.add_column(column)
    for registry in known:
        if kind in (None, registry.kind):
            for entry in registry:
                table.add_row(registry.kind, entry.name, entry.summary, entry.evidence, entry.origin)
    Console().print(table)


@app.command()
def show(name: Annotated[str, typer.Argument(help="A registered name or a dotted path module:Class.")]) -> None:
    """Show a plug-in: its documentation and every setting with default and meaning."""
    from rich.text import Text

    from opd.console import Console

    found = [(r, e) for r in registries() for e in r if e.name == name]
    if ":" in name:
        found = [(Registry("plug-in", "opd.plugins"), Entry(name, name, ""))]
    if not found:
        raise ConfigError(f"plug-in {name!r} is unknown; {hint(name, {e.name for r in registries() for e in r})}")
    console = Console(highlight=False)
    for registry, entry in found:
        plugin = registry.load(entry.name)
        console.print(Text.assemble((f"{registry.kind} {entry.name}", "bold"), f"  ({entry.path})\n"), soft_wrap=True)
        # Without wrapping, so that formulas and lists keep their lines.
        console.print(_documentation(plugin), markup=False, soft_wrap=True)
        for line in (*_facts(plugin, entry.name), *_settings(plugin)):
            console.print(line, markup=False, soft_wrap=True)


def _documentation(plugin: Any) -> str:
    import inspect
    import sys

    module = sys.modules.get(getattr(plugin, "__module__", ""), None)
    return (inspect.getdoc(module) if module is not None else None) or inspect.getdoc(plugin) or ""


def _facts(plugin: Any, name: str) -> list[str]:
    """What a plug-in needs with its default settings, and what evidence there is for its formula."""
    facts = []
    if hasattr(plugin, "needs") and hasattr(plugin, "settings_type"):
        try:
            facts.append(f"needs: {plugin(plugin.settings_type(name=name)).needs().describe()}")
        except (ValidationError, OpdError):
            facts.append("needs: depends on its settings")
    if getattr(plugin, "evidence", ""):
        facts.append(f"evidence: {plugin.evidence}")
    return ["", *facts] if facts else []


def _settings(plugin: Any) -> list[str]:
    from opd.config.reference import describe_keys

    model = getattr(plugin, "settings_type", None) or getattr(plugin, "Options", None)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    lines = ["", "settings:"]
    for key, default, text in describe_keys(model):
        lines.append(f"  {key}: {default if default == 'required' else f'default {default}'}. {text}")
    return lines
