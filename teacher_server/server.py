"""A teacher server as an object: start, serve, drain. `teacher_server.cli` has the command line.

server = TeacherServer(settings, factory)
await server.start({"math": "models/math"})     # binds, loads and tests; serving when it returns
await server.wait()                             # until a signal or a fatal error; drains, returns the exit code
"""

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import Gauge

from opd import __version__
from opd.errors import ConfigError, PortInUseError
from opd.telemetry.metrics_http import serve_metrics
from opd.telemetry.tracing import Spans
from opd.wire.v1 import admin_pb2_grpc, teacher_pb2_grpc
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.batching.admission import Budget
from teacher_server.calls.gate import Gate
from teacher_server.calls.score_call import Shared
from teacher_server.calls.tokens import Tokens, check_listen
from teacher_server.observe.host import Allocator, notify
from teacher_server.observe.metrics import ServerMetrics
from teacher_server.residency.loader import run_to_completion
from teacher_server.residency.starting import EngineFactory
from teacher_server.residency.teacher import SERVING_STATES, Teacher
from teacher_server.residency.teachers import Teachers
from teacher_server.rpc.admin import AdminService
from teacher_server.rpc.certificates import Certificates
from teacher_server.rpc.health import Health
from teacher_server.rpc.interceptor import RequestInterceptor
from teacher_server.rpc.receive import OVERSIZE_BYTES, RequestReceiver
from teacher_server.rpc.service import TeacherService
from teacher_server.rpc.stream_call import StreamCall
from teacher_server.settings import ServerSettings

_log = logging.getLogger(__name__)

EXIT_FATAL = 20
"""Exit code of a server that ended because an engine died or got stuck."""

_WATCH_SECONDS = 1.0
_DRAIN_SECONDS = 0.05
"""Seconds between two checks of whether the calls in flight have ended."""
_EXIT_SECONDS = 30.0
"""Seconds that the process may take to end after its calls, as a supervisor is told."""


class TeacherServer:
    """The service of a server process.

    Args:
        settings: all settings of the server.
        factory: builds the engine for a model.

    Attributes:
        port: port of the service, once started.
        metrics_port: port of /metrics; 0 if it is off.
        http_port: port of the HTTP door; 0 if it is closed.
        exit_code: `EXIT_FATAL` once `fail` was called, else 0.
        shared: what all calls share: budget, teachers, metrics and more.
        score_call: handles a Score call over gRPC; tests put a class in its place that fails.
    """

    score_call: Callable[..., StreamCall] = StreamCall

    def __init__(self, settings: ServerSettings, factory: EngineFactory) -> None:
        check_listen(settings.host, settings.security)
        self.settings = settings
        self.port = 0
        self.metrics_port = 0
        self.http_port = 0
        self.health = Health(settings.calls.watch_seconds)
        # Here instead of in `start`, so that a wrong file is found before a model has been read for minutes.
        self._tokens = Tokens(settings.security.tokens)
        self._stop = asyncio.Event()
        self._starting: asyncio.Task[Any] | None = None
        self.exit_code = 0
        self._server: Any = None
        self._metrics_server: Any = None
        self._door: Any = None
        self._watcher: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        limits, metrics = settings.limits, ServerMetrics()
        teachers = Teachers(
            factory,
            limits=limits,
            engine=settings.engine,
            on_state=self._on_state,
            on_fatal=self.fail,
            on_batch=metrics.observe_batch,
            on_restart=lambda name: metrics.restarts.labels(name).inc(),
        )
        self.shared = Shared(
            settings=settings,
            teachers=teachers,
            budget=Budget(limits.max_tokens_in_flight, limits.max_reply_bytes_in_flight, limits.max_client_share),
            metrics=metrics,
            threads=ThreadPoolExecutor(2, thread_name_prefix="codec"),
            instance_id=secrets.token_hex(8),
            spans=Spans.from_environment("opd-teacher", settings.log.tracing),
        )
        self._receiver = RequestReceiver(settings, metrics)
        self._gate = Gate(self._tokens, metrics, settings.calls)
        self._allocator = Allocator()
        metrics.budget_tokens.set(limits.max_tokens_in_flight)
        metrics.budget_reply_bytes.set(limits.max_reply_bytes_in_flight)

    @property
    def address(self) -> str:
        """Host and port of the service, once started."""
        return _join(self.settings.host, self.port)

    async def start(self, teachers: Mapping[str, str]) -> None:
        """Bind, then load the teachers one after the other; health says SERVING as each passes its self-test.

        Raises:
            PortInUseError: if an address is in use.
            ConfigError, UnavailableError: if a teacher cannot be loaded or fails its self-test.
            DeadlineError: if a teacher takes longer than `load_seconds`.
            asyncio.CancelledError: after `stop` or `fail`; a model may still be being read on a thread.
        """
        self._starting = asyncio.current_task()
        try:
            await self._bind()
            self._watcher = asyncio.create_task(self._watch())
            for name, model in teachers.items():
                await self.shared.teachers.load(name, model)
        except BaseException:
            await self.close()
            raise
        finally:
            self._starting = None

    def fail(self, reason: str) -> None:
        """End the process with a non-zero exit code because of a fatal error."""
        _log.error("fatal", extra={"reason": reason})
        self.exit_code = EXIT_FATAL
        self._stop.set()
        self._give_up_start()

    def stop(self) -> None:
        """Begin to drain, as on SIGTERM; a second call ends the grace period. During `start`, give up starting."""
        if self._starting is not None:  # nothing to drain yet
            self._give_up_start()
        elif self._stop.is_set():
            # A signal handler cannot await; without the reference, the task could be collected before it has run.
            self._cutting = asyncio.get_running_loop().create_task(self._cut())
        self._stop.set()

    async def _cut(self) -> None:
        """Cut off the calls in flight."""
        if self._door is not None:
            await self._door.cut()
        await self._server.stop(0)

    def _give_up_start(self) -> None:
        if self._starting is not None:
            self.shared.teachers.closing = True  # the model that is being read is not waited for
            self._starting.cancel()

    async def wait(self) -> int:
        """Serve until `stop` or `fail`, then drain and free everything; returns the exit code."""
        await self._stop.wait()
        started = time.monotonic()
        self.shared.draining = True
        self.shared.metrics.draining.set(1)
        await self.health.drain()
        for teacher in self.shared.teachers:
            if teacher.state in SERVING_STATES:
                self._show_state(teacher, pb.TEACHER_STATE_DRAINING)
        _log.info(
            "draining",
            extra={"settle_seconds": self.settings.settle_seconds, "grace_seconds": self.settings.grace_seconds},
        )
        longest = self.settings.settle_seconds + self.settings.grace_seconds + _EXIT_SECONDS
        notify(STOPPING=1, STATUS="drains", EXTEND_TIMEOUT_USEC=int(longest * 1e6))
        if self.exit_code == 0:  # after a fatal error, calls in flight are not waited for
            # Clients learn of NOT_SERVING by polling, so calls that they still send are served for a while.
            await asyncio.sleep(self.settings.settle_seconds)
            await self._finish_calls(time.monotonic() + self.settings.grace_seconds)
        await self.close()
        _log.info("stopped", extra={"exit_code": self.exit_code, "seconds": round(time.monotonic() - started, 3)})
        return self.exit_code

    async def _finish_calls(self, end: float) -> None:
        """Refuse new calls and let those in flight end.

        The port stays open for them: gRPC's own grace period closes it first, and clients whose pings then fail would
        give up the server and the calls that it is still working on.
        """
        self.shared.refusing = True
        while self.shared.scoring and time.monotonic() < end:
            await asyncio.sleep(_DRAIN_SECONDS)
        await self._server.stop(max(0.0, end - time.monotonic()))

    async def close(self) -> None:
        """Cut off what is in flight and free everything."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._door is not None:
            await self._door.close()
        if self._server is not None:
            await self._server.stop(0)
        await self.shared.teachers.close()
        self.shared.threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.shared.spans.close)
        # Last, so that metrics show the shutdown to its end.
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.shutdown)
            self._metrics_server.server_close()
            self._metrics_server = None

    def add_services(self, server: Any) -> None:
        """Register the services with a gRPC server."""
        teacher_pb2_grpc.add_TeacherServiceServicer_to_server(TeacherService(self.shared, self.score_call), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self.shared), server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)

    async def _bind(self) -> None:
        settings = self.settings
        self._server = grpc.aio.server(
            interceptors=[RequestInterceptor(self._gate, self._receiver)], options=_options(settings)
        )
        self.add_services(self._server)
        address = _join(settings.host, settings.port)
        problems = _bind_problems(settings.host, settings.port)
        # If a host name has several addresses, as localhost has, gRPC is content with those that are free.
        if not any(problem.errno == errno.EADDRINUSE for problem in problems):
            with contextlib.suppress(RuntimeError):  # depending on its version, gRPC raises or returns 0
                if settings.security.tls_cert is not None:
                    credentials = Certificates(settings.security).credentials()
                    self.port = self._server.add_secure_port(address, credentials)
                else:
                    self.port = self._server.add_insecure_port(address)
        if self.port == 0:
            reason = f": {problems[-1].strerror}" if problems else ""
            raise PortInUseError(f"cannot listen on {address}{reason}; choose another --host or --port, or port 0.")
        if settings.metrics_port >= 0:
            self._start_metrics()
        if settings.http.port >= 0:
            self._open_door()
        await run_to_completion(self._server.start())  # a server whose start was interrupted cannot be stopped
        ports = {"port": self.port, "metrics_port": self.metrics_port, "http_port": self.http_port}
        _log.info("listening", extra={"host": settings.host, **ports, "version": __version__})

    def _open_door(self) -> None:
        """Open the HTTP door."""
        try:
            from teacher_server.http.listen import Listener
        except ImportError as error:
            raise ConfigError(
                f"the HTTP door needs the extra http ({error}); install it with pip install 'opd[http]'."
            ) from error
        self._door = Listener(self.shared, self._gate, self._receiver, lambda: self.health.serving)
        self.http_port = self._door.start()

    def _start_metrics(self) -> None:
        host, port = self.settings.metrics_host.strip("[]"), self.settings.metrics_port
        try:
            self._metrics_server, _ = serve_metrics(
                self.shared.metrics.registry, port, host, healthy=lambda: self.health.serving
            )
        except OSError as error:
            raise PortInUseError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another --metrics-port, or -1 for "
                "none."
            ) from error
        self.metrics_port = self._metrics_server.server_port

    async def _on_state(self, teacher: Teacher) -> None:
        """Update health and metrics after a teacher's change of state."""
        if teacher.state == pb.TEACHER_STATE_UNSPECIFIED:
            await self.health.forget(teacher.name)
            self._forget(teacher, self.shared.metrics.weights_info)
        else:
            await self.health.set(teacher.name, serving=teacher.serving)
        if teacher.worker is None:
            self._forget(teacher, *self.shared.metrics.load)
        self._show_state(teacher, teacher.state)
        if teacher.state == pb.TEACHER_STATE_READY:
            self.show_weights(teacher)
        await self.health.set("", serving=any(t.serving for t in self.shared.teachers))

    def show_weights(self, teacher: Teacher) -> None:
        """Set the metric with a teacher's weights hash, in place of an earlier one."""
        self._forget(teacher, self.shared.metrics.weights_info)
        info = teacher.info
        self.shared.metrics.weights_info.labels(teacher.name, info.weights_hash, info.engine).set(1)

    def _forget(self, teacher: Teacher, *gauges: Gauge) -> None:
        """Remove a teacher's series from gauges, whose last values would otherwise remain."""
        for gauge in gauges:
            for labels in [key for key in gauge._metrics if key[0] == teacher.name]:
                gauge.remove(*labels)

    def _show_state(self, teacher: Teacher, state: int) -> None:
        for name, value in pb.TeacherState.items():
            if value:
                label = name.removeprefix("TEACHER_STATE_").lower()
                self.shared.metrics.state.labels(teacher.name, label).set(int(value == state))

    async def _watch(self) -> None:
        """Each second, refresh gauges, look for stuck engines and new tokens, and measure the event loop's lag."""
        metrics, shared = self.shared.metrics, self.shared
        while True:
            before = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            metrics.tasks.set(len(asyncio.all_tasks()))
            metrics.loop_lag.set(max(0.0, time.monotonic() - before - _WATCH_SECONDS))
            metrics.used_tokens.set(shared.budget.used.tokens)
            metrics.used_reply_bytes.set(shared.budget.used.reply_bytes)
            metrics.receiving.set(self._receiver.receiving)
            for kind in ("authorised", "unauthenticated", "watches"):
                metrics.open_calls.labels(kind).set(getattr(self._gate, kind).used)
            for teacher in shared.teachers:
                if teacher.worker is not None:
                    sequences, tokens, running = teacher.worker.load()
                    metrics.queued_sequences.labels(teacher.name).set(sequences)
                    metrics.queued_tokens.labels(teacher.name).set(tokens)
                    metrics.running_tokens.labels(teacher.name).set(running)
                    metrics.token_rate.labels(teacher.name).set(teacher.worker.rate.recent)
            shared.teachers.watch()
            await asyncio.to_thread(self._tokens.reload)
            if self._door is not None:
                await asyncio.to_thread(self._door.reload)
            freed = shared.budget.freed_bytes + self._receiver.received_bytes
            await asyncio.to_thread(self._allocator.give_back, freed)


def _join(host: str, port: int) -> str:
    """Host and port; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _bind_problems(host: str, port: int) -> list[OSError]:
    """The system's errors for the addresses of a host, with a port in use last; gRPC would only report a failure."""
    problems: list[OSError] = []
    try:
        for family, kind, _, _, place in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: connections that end
                    probe.bind(place)
            except OSError as error:
                problems.append(error)
    except OSError as error:  # the host does not exist
        problems.append(error)
    return sorted(problems, key=lambda problem: problem.errno == errno.EADDRINUSE)


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    return [
        # With it, two servers could listen on one port, and each would silently get some of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.limits.max_request_bytes + OVERSIZE_BYTES),
        ("grpc.max_concurrent_streams", settings.calls.max_streams_per_connection),
        # None: a few bytes of gzip could become gigabytes before any of our limits applies. Tensors have zstd.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # What an unread stream may hold. Windows grow to a message's size once it is read, so a larger one gains
        # nothing, and a window that follows the bandwidth would be under the sender's control.
        ("grpc.http2.lookahead_bytes", 64 * 1024),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_send_message_length", 8 * 1024 * 1024),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients ping every 10 s, for which gRPC would hang up by default.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_metadata_size", 16 * 1024),
    ]
