"""Python, devices, disk, shared memory and ports of this machine."""

import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from opd.doctor.finding import Finding

USUAL_PORTS = (7070, 9400, 9401)
"""The ports in the documentation: a teacher's service, its metrics, a student's metrics."""


def examine_machine(ports: Sequence[int] = ()) -> Iterator[Finding]:
    """Findings about the machine.

    Args:
        ports: ports that something here should listen on, so that it is a failure if they are taken. Without any, the
            usual ones are looked at, and a taken one is only noted.
    """
    good = sys.version_info >= (3, 11)
    text = platform.python_version() + ("" if good else "; opd needs 3.11 or newer")
    yield Finding("ok" if good else "fail", "python", text)
    yield from _devices()
    free = shutil.disk_usage(".").free / 2**30
    yield Finding("ok" if free > 10 else "note", "disk", f"{free:.0f} GiB free in this folder; checkpoints need room")
    try:
        shared = shutil.disk_usage("/dev/shm").free / 2**20
        text = f"{shared:.0f} MiB free in /dev/shm, which NCCL and vLLM use between processes"
        yield Finding("ok" if shared > 256 else "note", "shared memory", text)
    except OSError:
        yield Finding("note", "shared memory", "/dev/shm is missing, which NCCL and vLLM use between processes")
    yield from examine_ports(ports)


def examine_ports(ports: Sequence[int]) -> Iterator[Finding]:
    """Whether ports can be listened on, at all addresses; see `examine_machine`."""
    taken = {port: why for port in ports or USUAL_PORTS if (why := _obstacle(port))}
    free = [str(port) for port in ports or USUAL_PORTS if port not in taken]
    if free:
        yield Finding("ok", "ports", f"{', '.join(free)} can be listened on")
    for port, why in taken.items():
        yield Finding(
            "fail" if ports else "note",
            f"port {port}",
            f"cannot be listened on: {why}; use another port, or 0 for a free one",
        )


def _obstacle(port: int) -> str:
    """Why a port cannot be listened on; "" if it can."""
    try:
        with socket.create_server(("", port)):
            return ""
    except OSError as error:
        owner = _owner(port)
        return f"{error.strerror or error}{f' (by {owner})' if owner else ''}"


def _owner(port: int) -> str:
    """The process that listens on a port; "" if there is none or this user may not know."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()}, process {connection.pid}"
    except (psutil.Error, OSError):
        pass
    return ""


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("fail", "torch", f"cannot be imported: {error}; reinstall it")
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            text = f"{device.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
            yield Finding("ok" if free > total / 2 else "note", f"cuda:{index}", text)
    elif Path("/dev/nvidiactl").exists():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield Finding(
            "fail",
            "device",
            f"there is an NVIDIA driver, but torch {torch.__version__} ({built}) sees no GPU; install torch for this "
            "driver",
        )
    else:
        yield Finding("note", "device", f"no GPU; torch {torch.__version__} with {torch.get_num_threads()} CPU threads")
