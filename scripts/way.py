"""Count what a training step and a call of Score run through: python scripts/way.py [WORLD].

The job has four rows of the tiny world `test` (gather, k = 8), and one server in another process. Prints, for the third
step and for its last call of Score: files of the project, functions, calls, calls between files, and pairs of
files. WORLD is the folder of the world; without it, the world is built first.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("opd", "student", "teacher_server", "opd_zoo", "opd_lab"))
STEP = 2
"""The counted step, from 0: the first ones also import libraries and fetch the head."""


class Way:
    """Records the calls of all threads while `on`; made before the threads start."""

    def __init__(self) -> None:
        self.on = False
        self.calls: list[tuple[str, str, str]] = []  # file of the caller, file and name of the function
        sys.setprofile(self._seen)
        threading.setprofile(self._seen)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and (file := frame.f_code.co_filename).startswith(PACKAGES):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(PACKAGES):
                caller = caller.f_back
            self.calls.append((caller.f_code.co_filename if caller else file, file, frame.f_code.co_qualname))

    def figures(self) -> dict[str, int]:
        """The counts, by name."""
        pairs = {(a, b) for a, b, _ in self.calls if a != b}
        return {
            "files": len({file for _, file, _ in self.calls}),
            "functions": len({(file, name) for _, file, name in self.calls}),
            "calls": len(self.calls),
            "calls between files": sum(a != b for a, b, _ in self.calls),
            "pairs of files": len(pairs),
            "pairs both ways": sum((b, a) in pairs for a, b in pairs) // 2,
        }


def serve(out: Path, flags: list[str]) -> None:
    """Serve as opd serve does; the counts of the last call of Score go to `out`."""
    way = Way()
    from teacher_server.__main__ import main
    from teacher_server.rpc.service import TeacherService

    score = TeacherService.Score

    async def counted(self: TeacherService, request: Any, context: Any) -> None:
        way.calls, way.on = [], True
        try:
            await score(self, request, context)
        finally:
            way.on = False
            out.write_text(json.dumps(way.figures()))

    TeacherService.Score = counted  # type: ignore[method-assign]
    sys.argv = ["opd serve", *flags]
    main()


def train(world: Path, address: str, run: Path) -> dict[str, int]:
    """The counts of a step."""
    way = Way()
    from opd.config import parse_settings
    from student.job.loop import Loop
    from student.job.session import train as run_job
    from student.settings.recipe import Recipe

    recipe = {
        "run": run,
        "model": {"path": str(world / "student")},
        "teachers": {"endpoints": [address], "default": "teacher"},
        "prompts": {"task": "addition", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 12, "max_prompt_tokens": 32},
        "objective": [{"name": "opd", "payload": "gather", "k": 8}],
        "train": {"steps": STEP + 2, "threads": 1},
        "eval": {"prompts": 0},
    }
    step = Loop._step

    def counted(self: Any, number: int) -> None:
        way.on = number == STEP
        try:
            step(self, number)
        finally:
            way.on = False

    Loop._step = counted  # type: ignore[method-assign]
    run_job(parse_settings(Recipe, recipe, source="scripts/way.py"))
    return way.figures()


def main(world: Path | None, scratch: Path) -> None:
    """Run the job and print the counts."""
    if world is None:
        from opd_lab.tiny.build import build_world

        world = scratch / "world"
        build_world(world, "test", seed=0)
    ports, counts = scratch / "ports", scratch / "score.json"
    flags = [f"--model=teacher={world / 'teacher'}", "--port=0", "--metrics-port=-1", f"--port-file={ports}"]
    flags += ["--threads=1", "--device=cpu", "--deterministic"]
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(counts), *flags])
    try:
        while not ports.exists() and server.poll() is None:
            time.sleep(0.1)
        found = {"a training step": train(world, ports.read_text().split()[0], scratch / "run")}
    finally:
        server.terminate()
        server.wait()
    found["a call of Score"] = json.loads(counts.read_text())
    for name, figures in found.items():
        print(f"{name}: {', '.join(f'{count:,} {what}' for what, count in figures.items())}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(sys.argv[1]).resolve() if sys.argv[1:] else None, Path(folder))
