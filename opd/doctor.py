"""`opd doctor`: is this machine, this installation and, when given, this fleet fit for work?"""

import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opd.errors import ConfigError, OpdError
from opd.fleet.cli import Override, SettingsFile, fleet_settings

if TYPE_CHECKING:
    from opd.fleet.settings import FleetSettings

Level = Literal["ok", "note", "fail"]
_COLOURS = {"ok": "green", "note": "yellow", "fail": "red"}
_PROBE_ROWS, _PROBE_TOKENS = 16, 64


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, how it is, and what to do about it when it is not well."""

    level: Level
    subject: str
    text: str


def doctor(
    fleet: Annotated[
        list[str] | None,
        typer.Option("--fleet", help="Teacher servers host:port to examine: identity, agreement, speed. Repeatable."),
    ] = None,
    student: Annotated[
        str,
        typer.Option(
            help="With --fleet: folder or hub id of a student, to see whether it ends its answers as the teachers do."
        ),
    ] = "",
    question: Annotated[
        list[str] | None,
        typer.Option(help="With --student: what to ask it instead of four simple questions. Repeatable."),
    ] = None,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Examine the installation, the machine and optionally a fleet of teachers.

    Exits with 1 when something is broken; notes are not failures.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    failed = False
    if student and not fleet:
        raise ConfigError("--student is compared with teachers; name their servers with --fleet.")
    examined = examine_fleet(fleet, fleet_settings(settings, override), student, question or ()) if fleet else ()
    for finding in [*examine_machine(), *examine_installation(), *examined]:
        # Text is shown as it is; plain strings would be read as markup, and names of packages have [brackets].
        table.add_row(Text(finding.level, _COLOURS[finding.level]), Text(finding.subject), Text(finding.text))
        failed |= finding.level == "fail"
    Console().print(table)
    if failed:
        raise typer.Exit(1)


def examine_machine() -> Iterator[Finding]:
    """Python, processor, device, disk and shared memory."""
    good = sys.version_info >= (3, 11)
    text = platform.python_version() + ("" if good else "; opd needs 3.11 or newer")
    yield Finding("ok" if good else "fail", "python", text)
    yield from _devices()
    free = shutil.disk_usage(".").free / 2**30
    yield Finding("ok" if free > 10 else "note", "disk", f"{free:.0f} GiB free here; checkpoints need room")
    try:
        shared = shutil.disk_usage("/dev/shm").free / 2**20
        text = f"{shared:.0f} MiB free in /dev/shm, which NCCL and vLLM use between processes"
        yield Finding("ok" if shared > 256 else "note", "shared memory", text)
    except OSError:
        yield Finding("note", "shared memory", "no /dev/shm, which NCCL and vLLM use between processes")


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("fail", "torch", f"cannot be imported: {error}; reinstall it")
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Finding("ok", f"cuda:{index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB")
    else:
        yield Finding("note", "device", f"no GPU; torch {torch.__version__} with {torch.get_num_threads()} CPU threads")


def examine_installation() -> Iterator[Finding]:
    """Required packages and their ranges; optional engines."""
    from packaging.requirements import Requirement

    try:
        requires = distribution("opd").requires or []
    except PackageNotFoundError:
        yield Finding("fail", "opd", "is not installed; run `pip install -e .` in the checkout")
        return
    complete = True
    for requirement in map(Requirement, requires):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            have = version(requirement.name)
        except PackageNotFoundError:
            complete = False
            yield Finding("fail", requirement.name, f"is missing; install '{requirement}'")
            continue
        if not requirement.specifier.contains(have, prereleases=True):
            complete = False
            yield Finding("fail", requirement.name, f"{have} does not fit; install '{requirement}'")
    if complete:
        yield Finding("ok", "opd", f"{version('opd')} with its required packages")
    for engine in ("vllm", "sglang", "triton"):
        try:
            yield Finding("ok", engine, version(engine))
        except PackageNotFoundError:
            yield Finding("note", engine, "is not installed (optional)")


def examine_fleet(
    endpoints: list[str], settings: "FleetSettings | None" = None, student: str = "", questions: Sequence[str] = ()
) -> Iterator[Finding]:
    """Reachability, identity, agreement of replicas, speed of every teacher, and how a student's answers end there."""
    import numpy as np

    from opd.fleet.client import TeacherFleet
    from opd.wire.types import PayloadSpec, ScoreItem

    examiner = None
    if student:
        from opd.doctor_stops import StopExaminer

        examiner = StopExaminer(student, questions)
        yield Finding("ok" if examiner.stops.ids else "note", "student", examiner.stops.describe())
    try:
        fleet = TeacherFleet.connect(endpoints, settings=settings, client="doctor")
    except OpdError as error:
        yield Finding("fail", "fleet", str(error))
        return
    with fleet:
        for name, info in fleet.teachers().items():
            yield Finding("ok", name, f"{info.engine}, {info.model}, weights {info.weights_hash[:12]}")
            if not info.tokenizer.fingerprint:
                yield Finding("note", name, "has no tokenizer: students cannot check that theirs is the same")
            try:
                report = fleet.verify(name)
                length = min(_PROBE_TOKENS, info.limits.max_sequence_tokens)
                ids = np.arange(length, dtype=np.uint32) % max(1, info.tokenizer.size or info.vocab_size)
                begin = time.monotonic()
                fleet.score(name, [ScoreItem(ids, 1)] * _PROBE_ROWS, PayloadSpec.sampled())
                speed = _PROBE_ROWS * length / (time.monotonic() - begin)
            except OpdError as error:
                yield Finding("fail", name, str(error))
                continue
            level: Level = "ok" if report.agrees else "fail"
            yield Finding(level, name, f"{report.sentence()} Probe of {_PROBE_ROWS} rows: {speed:,.0f} tokens/s")
            for well, text in examiner.examine(fleet, info) if examiner is not None else ():
                yield Finding("ok" if well else "note", name, text)
