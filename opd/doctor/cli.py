"""The command `opd doctor`."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from opd.doctor.finding import Finding, examination
from opd.errors import ConfigError
from opd.fleet.cli import Override, SettingsFile, fleet_settings

_COLOURS = {"ok": "green", "note": "yellow", "fail": "red"}


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[dotted.key=value ...]", help="With --teacher: keys of the recipe to replace."),
    ] = None,
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            "--fleet", help="Teacher server host:port to check for identity, TLS, agreement and speed. Repeatable."
        ),
    ] = None,
    student: Annotated[
        str,
        typer.Option(
            help="With --fleet: folder or hub id of a student, to check whether it ends its answers as the teachers do."
        ),
    ] = "",
    question: Annotated[
        list[str] | None,
        typer.Option(help="With --student: question to ask instead of the four built-in ones. Repeatable."),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="RECIPE.yaml",
            help="Check whether this recipe's teachers are worth distilling, on its prompts. Nothing is trained.",
        ),
    ] = None,
    teacher_model: Annotated[
        str,
        typer.Option(
            help="With --teacher: folder or hub id of the teacher's weights, which must answer the prompts on this "
            "machine, because servers only score. Default: the model that the server reports."
        ),
    ] = "",
    prompts: Annotated[int, typer.Option(min=8, help="With --teacher: number of training prompts to use.")] = 64,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Serve two tiny models here, and check that their scores equal those computed in process and that the "
            "gradient is 0 if the teacher is the student itself.",
        ),
    ] = False,
    port: Annotated[
        list[int] | None, typer.Option(min=1, max=65535, help="Check that this port is free to listen on. Repeatable.")
    ] = None,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Check the installation and the machine, and optionally a fleet, a teacher and the whole chain.

    Exits with 1 if something is broken or a teacher is not worth distilling. Notes are not failures.
    """
    for word in overrides or ():
        if "=" not in word:
            raise ConfigError(f"{word!r} is not understood: {_meant(word)}.")
    for given, other, name, missing in (
        (overrides, teacher, "keys of a recipe do", "--teacher RECIPE.yaml"),
        (teacher_model, teacher, "--teacher-model does", "--teacher RECIPE.yaml"),
        (student, fleet, "--student does", "--fleet"),
        (question, student, "--question does", "--student"),
        (settings or override, fleet, "--settings and --set do", "--fleet"),
    ):
        if given and not other:
            raise ConfigError(f"{name} nothing without {missing}; give both.")
    parts: list[Iterable[Finding]] = [_here(port or [])]
    if fleet:
        from opd.doctor.fleet import examine_fleet

        parts.append(examine_fleet(fleet, fleet_settings(settings, override), student, question or ()))
    if self_test:
        parts.append(examination("self-test")())
    if teacher is not None:
        parts.append(examination("teacher")(teacher, overrides or (), model=teacher_model, prompts=prompts))
    findings = [finding for part in parts for finding in part]
    _show(findings)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _meant(word: str) -> str:
    """How to write what was probably meant by a word that is not a key of a recipe."""
    if word.rpartition(":")[2].isdigit():
        return f"to check a teacher server, write opd doctor --fleet {word}"
    if word.endswith((".yaml", ".yml")):
        return f"to check the teachers of a recipe, write opd doctor --teacher {word}"
    return (
        "the doctor needs no argument to check this machine; name a server with --fleet HOST:PORT, or a recipe with "
        "--teacher RECIPE.yaml"
    )


def _here(ports: list[int]) -> Iterator[Finding]:
    from opd.doctor.installation import examine_installation
    from opd.doctor.machine import examine_machine

    yield from examine_machine(ports)
    yield from examine_installation()


def _show(findings: Iterable[Finding]) -> None:
    from opd.console import Console, Table, line

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(line(finding.level, _COLOURS[finding.level]), finding.subject, finding.text)
    Console().print(table)
