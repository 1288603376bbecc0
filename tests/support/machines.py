"""A machine of its own for systemd: a container that boots this machine's /usr with nothing else, and loopback only."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
_GROUPS = [Path("/sys/fs/cgroup", name) for name in ("", "systemd", "unified")]
_START = """#!/opt/opd/bin/python
import sys
from {module} import main
sys.exit(main())
"""


def why_not() -> str | None:
    """Why no machine can be started here, as a sentence; None if one can."""
    if shutil.which("systemd-nspawn") is None or os.getuid():
        return "systemd-nspawn is not installed, or this is not root; `make systemd` gets Debian's"
    if not any((group / "cgroup.procs").exists() for group in _GROUPS):
        return "no cgroups are mounted in /sys/fs/cgroup"
    return None


@dataclass
class Machine:
    """A machine that runs.

    Attributes:
        init: the container's systemd, as this machine sees it.
        settings: /etc/opd there.
    """

    init: int
    settings: Path

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command there as root."""
        enter = ["nsenter", "--target", str(self.init), "--all", "--wd=/", *command]
        return subprocess.run(enter, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)

    def sh(self, script: str) -> str:
        """What a script prints; it must end with 0."""
        done = self.ask("bash", "-euc", script)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.sh(f"systemctl show {unit} --property {name} --value")

    def journal(self, unit: str) -> str:
        """What a unit has logged, and systemd about it."""
        return self.sh(f"journalctl --no-pager --output cat --unit {unit}")

    def until(self, unit: str, name: str, value: str) -> None:
        """Wait until a property of a unit has a value."""
        wait_until(lambda: self.show(unit, name) == value, why=lambda: self.journal(unit))


@contextmanager
def machine(folder: Path, models: Path) -> Iterator[Machine]:
    """Boot a machine, and turn it off at the end.

    Args:
        folder: an empty folder for its files.
        models: folder that it has as /srv/models.
    """
    for name in ("opd/bin", "etc"):
        (folder / name).mkdir(parents=True)
    _install(folder / "opd")
    (folder / "preset").write_text("disable *\n")  # what else this machine has installed does not start
    (folder / "hosts").write_text(f"127.0.0.1 localhost opd-{os.getpid()}\n")
    # pyenv's interpreters find their library by a path in a home, which the units do not see.
    (folder / "manager").write_text("[Manager]\nDefaultEnvironment=LD_LIBRARY_PATH=/opt/python/lib OMP_NUM_THREADS=1\n")
    binds = {
        sys.base_prefix: "/opt/python",
        sysconfig.get_path("purelib"): "/opt/site",
        str(ROOT): "/opt/source",
        str(folder / "opd"): "/opt/opd",
        str(folder / "hosts"): "/etc/hosts",
        str(folder / "preset"): "/etc/systemd/system-preset/00-nothing.preset",
        str(folder / "manager"): "/etc/systemd/system.conf.d/python.conf",
        str(models): "/srv/models",
    }
    command = ["systemd-nspawn", "--directory=/", "--volatile=yes", "--boot", "--private-network", "--console=pipe"]
    command += ["--register=no", "--keep-unit", f"--machine=opd-{os.getpid()}", f"--bind={folder / 'etc'}:/etc/opd"]
    command += [f"--bind-ro={here}:{there}" for here, there in binds.items()]
    command += ["systemd.mask=systemd-firstboot.service", "systemd.mask=console-getty.service"]
    groups = [group / f"opd-{os.getpid()}" for group in _GROUPS if (group / "cgroup.procs").exists()]
    with (folder / "console").open("wb") as console, _removed(groups):
        # nspawn keeps its state in /run, and a /run of its own leaves none.
        script = 'mount -t tmpfs tmpfs /run\nfor group in $GROUPS_; do echo $$ >$group/cgroup.procs; done\nexec "$@"'
        process: subprocess.Popen[Any] = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "bash", "-euc", script, "bash", *command],
            env={**os.environ, "GROUPS_": " ".join(map(str, groups)), "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
        try:
            why = (folder / "console").read_text
            wait_until(lambda: process.poll() is not None or _init(process.pid), why=why)
            assert process.poll() is None, why()
            made = Machine(_init(process.pid), folder / "etc")
            wait_until(lambda: made.ask("systemctl", "is-system-running").stdout.strip() == "running", why=why)
            yield made
            made.ask("systemctl", "poweroff")
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()


def _install(place: Path) -> None:
    """What `python -m venv /opt/opd` and pip would make, with this environment's packages and these sources."""
    (place / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    (place / "bin" / "python").symlink_to("/opt/python/bin/python3")
    packages = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "opd.pth").write_text("/opt/source\n/opt/site\n")
    for name, module in (("opd", "opd.cli"), ("torchrun", "torch.distributed.run")):
        (place / "bin" / name).write_text(_START.format(module=module))
        (place / "bin" / name).chmod(0o755)


def _init(nspawn: int) -> int:
    """The systemd that nspawn has started; 0 while there is none."""
    for child in psutil.Process(nspawn).children(recursive=True):
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
        except OSError:
            continue
        (numbers,) = re.findall(r"^NSpid:(.+)$", status, re.M)
        if numbers.split()[-1] == "1" and child.name() == "systemd":
            return int(child.pid)
    return 0


@contextmanager
def _removed(groups: list[Path]) -> Iterator[None]:
    """Make control groups, and remove them with those that the container has made in them."""
    for group in groups:
        group.mkdir()
    yield
    for group in groups:
        for below in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            below.rmdir()
        group.rmdir()
