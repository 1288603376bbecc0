"""A server as a process: flags, ports, signals, exit codes, and nothing left behind."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import listens
from waiting import PATIENCE, wait_until

from opd.errors import PortInUseError
from opd.wire.channel import open_channel
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec
from opd.wire.v1 import admin_pb2, admin_pb2_grpc, teacher_pb2_grpc
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.server import TeacherServer
from teacher_server.settings import ServerSettings

SAMPLED = PayloadSpec.sampled()


async def running(stub: Any) -> None:
    """Wait until the engine has work in hand."""
    while not (await stub.GetLoad(pb.GetLoadRequest())).teachers[0].running_tokens:
        pass


async def refused(stub: Any, message: Any) -> None:
    """Wait until the server takes no new calls."""
    while True:
        late = asyncio.create_task(_last(stub.Score(message, timeout=120)))
        # One that came before that waits in the queue; a request that is sent after it is answered later.
        await stub.Describe(pb.DescribeRequest())
        if not late.done():
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            continue
        with pytest.raises(grpc.RpcError, match="takes no new calls"):
            await late
        return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_finishes_the_call_in_flight_and_exits_with_0(
    launch: Callable[..., Any], items: Any, tmp_path: Path, number: signal.Signals
) -> None:
    hold = tmp_path / "hold"
    process = launch("--engine-option", f"hold={hold}", "--grace", "120")
    hold.touch()

    async def run() -> pb.ScoreResponse:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            message = build_score_request(items(1), SAMPLED, teacher="t", request_id="r")
            call = stub.Score(message, timeout=120)
            reading = asyncio.create_task(_last(call))
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="t"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await running(stub)
            os.kill(process.popen.pid, number)
            # At once, while the call is still in the engine.
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            # Clients that ping hear of it while their calls are in flight; one that gets no answer gives them up.
            (load,) = (await stub.GetLoad(pb.GetLoadRequest())).teachers
            (info,) = (await stub.Describe(pb.DescribeRequest())).teachers
            assert load.state == info.state == pb.TEACHER_STATE_DRAINING
            await refused(stub, build_score_request(items(1), SAMPLED, teacher="t", request_id="late"))
            assert (await stub.GetLoad(pb.GetLoadRequest())).teachers[0].running_tokens
            assert not reading.done()
            hold.unlink()
            return await reading

    assert asyncio.run(run()).WhichOneof("message") == "trailer"
    assert process.popen.wait(120) == 0
    assert '"message": "stopped"' in process.lines()


def test_a_supervisor_hears_when_the_server_is_ready_and_how_long_it_may_take_to_end(
    launch: Callable[..., Any],
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(f"\0opd-{os.getpid()}")
        supervisor.settimeout(PATIENCE)
        process = launch("--grace", "600", env={"NOTIFY_SOCKET": f"@opd-{os.getpid()}"})
        ready = supervisor.recv(4096).decode()
        assert ready == f"READY=1\nSTATUS=serves t on {process.address}"
        process.popen.send_signal(signal.SIGTERM)
        ends = dict(line.split("=") for line in supervisor.recv(4096).decode().splitlines())
        assert ends["STOPPING"] == "1" and int(ends["EXTEND_TIMEOUT_USEC"]) > 600_000_000
    assert process.popen.wait(120) == 0


def test_a_server_whose_supervisor_no_longer_listens_runs_on(launch: Callable[..., Any], tmp_path: Path) -> None:
    process = launch(env={"NOTIFY_SOCKET": str(tmp_path / "none")})
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(120) == 0


async def _last(call: Any) -> Any:
    last = None
    async for message in call:
        last = message
    return last


def test_a_server_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    places = tmp_path / "ports"
    command = ["nohup", sys.executable, "-m", "teacher_server", "--engine", "numpy_teacher:NumpyEngine"]
    command += ["--model", "t=numpy", "--port-file", str(places)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as run:
        try:
            wait_until(lambda: places.exists() or run.poll() is not None)
            (ignored,) = re.findall(r"SigIgn:\t(\w+)", Path(f"/proc/{run.pid}/status").read_text())
            assert int(ignored, 16) & 1 << signal.SIGHUP - 1
        finally:
            run.kill()


def test_a_second_signal_ends_the_grace(launch: Callable[..., Any], items: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    process = launch("--engine-option", f"hold={hold}", "--grace", "600")
    hold.touch()

    async def run() -> None:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            asked = items(12, rows=4000)
            message = build_score_request(asked, SAMPLED, teacher="t", request_id="r")
            reading = asyncio.create_task(_last(stub.Score(message)))
            await running(stub)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="t"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            process.popen.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            process.popen.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                await reading

    asyncio.run(run())
    hold.unlink()
    assert process.popen.wait(120) == 0


def held(folder: Path) -> Path:
    """A file that holds up every load for as long as it is there, which is for the whole test."""
    file = folder / "hold"
    file.touch()
    return file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_while_loading_gives_up_at_once(
    launch: Callable[..., Any], tmp_path: Path, number: signal.Signals
) -> None:
    process = launch("--engine-option", f"hold_load={held(tmp_path)}", wait=False)
    wait_until(lambda: "listening" in process.lines(), why=process.lines)
    process.popen.send_signal(number)
    assert process.popen.wait(120) == 0


def test_a_model_that_takes_too_long_ends_the_start_with_a_sentence_while_it_is_still_read(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("engine: {load_seconds: 0.1}\n")
    process = launch("--config", str(config), "--engine-option", f"hold_load={held(tmp_path)}", wait=False)
    assert process.popen.wait(120) == 8
    assert process.lines().splitlines()[-1].startswith("error: model numpy did not load within 0.1 s")


def test_sigterm_does_not_wait_for_a_model_that_an_operator_loads(launch: Callable[..., Any], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("- {name: op, token: operator-secret-1, scopes: [admin]}\n")
    hold = tmp_path / "hold"
    process = launch("--tokens", str(tokens), "--grace", "0.1", "--engine-option", f"hold_load={hold}")
    hold.touch()  # only now, so that the first model is loaded
    with grpc.insecure_channel(process.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        meta = (("authorization", "Bearer operator-secret-1"),)
        loading = stub.LoadTeacher.future(admin_pb2.LoadTeacherRequest(teacher="u", model="other"), metadata=meta)
        wait_until(lambda: '"action": "load"' in process.lines(), why=process.lines)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(120) == 0
        with pytest.raises(grpc.RpcError):
            loading.result(120)
    assert "Traceback" not in process.lines()


def test_a_taken_port_is_one_sentence_and_its_own_exit_code(launch: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--metrics-port"):
            process = launch(flag, port, wait=False)
            assert process.popen.wait(120) == 14
            last = process.lines().strip().splitlines()[-1]
            assert last.startswith("error: cannot") and port in last


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--host", "0.0.0.0"], 2, "allow-insecure"),
        (["--max-batch-tokens", "0"], 2, "max_batch_tokens"),
        (["--threads", "100000"], 2, "--threads is 100000, but it must be from 0 to 1024"),
        (["--tls-cert", "x"], 2, "tls_cert and tls_key"),
        (["--engine-option", "wrong=1"], 2, "no option 'wrong'"),
        (["--engine-option", "x=[1"], 2, "'x=[1' is not valid YAML"),
        (["--engine", "json:dumps"], 2, "'json:dumps' is not an engine class"),
        (["--port-file", "no/such/folder/port"], 2, "make no/such/folder first"),
        (["--host", "no.such.host.invalid", "--allow-insecure"], 14, "cannot listen on no.such.host.invalid"),
    ],
)
def test_a_wrong_flag_is_one_sentence(launch: Callable[..., Any], flags: list[str], code: int, text: str) -> None:
    process = launch(*flags, wait=False)
    assert process.popen.wait(120) == code
    assert text in process.lines()
    assert "Traceback" not in process.lines()


def test_settings_come_from_a_file_and_flags_win(launch: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("limits: {max_k: 3, max_sequences: 9}\nmetrics_port: -1\n")
    process = launch("--config", str(config), "--max-k", "5")

    async def run() -> pb.Limits:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            return (await stub.Describe(pb.DescribeRequest(teacher="t"))).teachers[0].limits

    limits = asyncio.run(run())
    assert (limits.max_k, limits.max_sequences) == (5, 9)
    assert process.metrics_port == 0


def test_metrics_are_served_and_count(launch: Callable[..., Any], items: Any) -> None:
    process = launch()

    async def run() -> None:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            for n in range(3):
                await _last(stub.Score(build_score_request(items(2), SAMPLED, teacher="t", request_id=f"r{n}")))

    asyncio.run(run())
    text = urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=120).read().decode()
    assert 'opd_teacher_requests_total{code="OK",payload="sampled",teacher="t"} 3.0' in text
    assert 'opd_teacher_scored_tokens_total{payload="sampled",teacher="t"} 36.0' in text
    assert 'opd_teacher_state{state="ready",teacher="t"} 1.0' in text


def test_metrics_stay_on_loopback_until_an_address_is_given(launch: Callable[..., Any]) -> None:
    process = launch("--host", "0.0.0.0", "--allow-insecure")
    assert listens("127.0.0.1", process.metrics_port)
    assert not listens("127.0.0.2", process.metrics_port)  # a listener on all addresses would answer here
    assert listens("127.0.0.2", int(process.address.rpartition(":")[2]))
    process = launch("--metrics-host", "0.0.0.0")
    assert listens("127.0.0.2", process.metrics_port)


def test_a_kill_fault_dies_like_sigkill(launch: Callable[..., Any], items: Any) -> None:
    process = launch("--fault", "kill=1")

    async def run() -> None:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            with pytest.raises(grpc.RpcError):
                await _last(
                    stub.Score(build_score_request(items(1), SAMPLED, teacher="t", request_id="r"), timeout=120)
                )

    asyncio.run(run())
    assert process.popen.wait(120) == 137


def test_an_ipv6_address_is_listened_on_and_written_with_brackets(launch: Callable[..., Any], items: Any) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    process = launch("--host", "::1", "--metrics-host", "127.0.0.1")
    assert process.address.startswith("[::1]:")

    async def run() -> int:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            return len((await stub.Describe(pb.DescribeRequest())).teachers)

    assert asyncio.run(run()) == 1
    assert urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=120).status == 200
    assert urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/healthz", timeout=120).status == 200


@pytest.mark.parametrize("port", ["service", "metrics"])
def test_noise_and_half_open_connections_neither_end_nor_hold_up_the_server(
    launch: Callable[..., Any], port: str
) -> None:
    process = launch()
    host, _, service = process.address.rpartition(":")
    place = (host, int(service) if port == "service" else process.metrics_port)
    before = len(os.listdir(f"/proc/{process.popen.pid}/fd"))
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    open_ = []
    for noise in (
        b"",
        hello,
        hello + os.urandom(999),
        os.urandom(999),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01",
    ):
        for _ in range(25 if port == "service" else 4):
            connection = socket.create_connection(place, 120)
            connection.sendall(noise)
            open_.append(connection)

    async def run() -> int:
        async with open_channel(process.address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            return len((await stub.Describe(pb.DescribeRequest(), timeout=120)).teachers)

    assert asyncio.run(run()) == 1
    page = urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=120)
    assert page.status == 200
    page.close()
    for connection in open_:
        connection.close()
    wait_until(lambda: len(os.listdir(f"/proc/{process.popen.pid}/fd")) <= before)
    assert process.popen.poll() is None


def test_a_second_server_of_one_configuration_is_turned_away(launch: Callable[..., Any]) -> None:
    first = launch("--metrics-port", "-1")
    port = first.address.rpartition(":")[2]
    second = launch("--metrics-port", "-1", "--port", port, wait=False)
    assert second.popen.wait(120) == 14
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.lines()
    assert first.popen.poll() is None


async def test_a_name_with_one_address_whose_port_is_taken_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        # As localhost is ::1 and 127.0.0.1 elsewhere; gRPC goes on with the first of these.
        places = [(*kind, ("127.0.0.1", port)), (*kind, ("127.0.0.2", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
        server = TeacherServer(ServerSettings(host="127.0.0.2", port=port, metrics_port=-1), lambda model: None)
        with pytest.raises(PortInUseError, match="Address already in use"):
            await server.start({})


@pytest.mark.parametrize("turns", range(4))
async def test_a_start_that_is_cut_at_any_point_ends_without_another_error(turns: int) -> None:
    server = TeacherServer(ServerSettings(metrics_port=-1), lambda model: pytest.fail("no teacher was asked for"))
    starting = asyncio.create_task(server.start({}))
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    (outcome,) = await asyncio.wait_for(asyncio.gather(starting, return_exceptions=True), 120)
    assert outcome is None or isinstance(outcome, asyncio.CancelledError)  # it may have been quicker
    await server.close()


@pytest.mark.parametrize("turns", range(1, 30))
async def test_a_start_that_is_cut_at_any_point_waits_for_no_model(turns: int) -> None:
    gate = threading.Event()
    server = TeacherServer(ServerSettings(metrics_port=-1), lambda model: gate.wait(PATIENCE))
    starting = asyncio.create_task(server.start({"t": "held"}))
    for _ in range(turns):
        await asyncio.sleep(0)
    server.stop()
    try:
        await asyncio.wait({starting}, timeout=PATIENCE / 2)
        assert starting.done()
    finally:
        gate.set()
        await asyncio.gather(starting, return_exceptions=True)
