"""`opd serve`: a teacher server from the command line.

    opd serve --model Qwen/Qwen3-8B --port 9000
    opd serve --model math=models/math --model code=models/code --tls-cert cert.pem --tls-key key.pem --host 0.0.0.0

Every flag is one of the settings in `teacher_server.settings`. `--config FILE` reads any of them from YAML; flags take
precedence.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.allocator import grow_segments
from opd.config.load import parse_settings, read_mapping
from opd.config.text import read_options
from opd.errors import ConfigError, DeadlineError
from opd.files import write_whole
from opd.keys_option import keys_option
from opd.printable import echo
from opd.signals import NOTICES, stop_signals

_GROUPS = {
    "": ("host", "port", "metrics_port"),
    "engine": ("engine", "device", "dtype", "deterministic", "memory_budget_bytes"),
    "limits": ("max_batch_tokens", "max_tokens_in_flight", "max_sequence_tokens", "max_k", "allow_full"),
    "security": ("tls_cert", "tls_key", "client_ca", "tokens", "allow_insecure"),
}
_FLAGS = {name: f"{group}.{name}" if group else name for group, names in _GROUPS.items() for name in names}
_FLAGS |= {"grace": "grace_seconds", "log_level": "log.level", "log_requests": "log.requests"}
_FLAGS |= {"log_format": "log.format"}
_FLAGS |= {"tracing": "log.tracing", "metrics_host": "metrics_host", "http_port": "http.port"}
"""The setting that each flag stands for."""
_MOST_THREADS = 1024
"""With more than the system can start, torch's library of threads ends the process without a message."""


def serve(
    model: Annotated[
        list[str],
        typer.Option(help="Model to serve: a folder, a hub id, or BASE+ADAPTER, as MODEL or NAME=MODEL; repeatable."),
    ],
    name: Annotated[
        str,
        typer.Option(help="Name of the teacher, with a single --model. Default: the last part of its path or hub id."),
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of the server's settings (see --keys); flags override it.")
    ] = None,
    keys: Annotated[
        bool,
        keys_option(
            "teacher_server.settings:ServerSettings",
            "Print every setting that --config takes, with its default, then exit.",
        ),
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gRPC service [0: a free one].")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Port of /metrics [0: a free one]; -1 turns it off.")] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address on which /metrics listens [127.0.0.1].")] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the HTTP door for trainers that speak to vLLM or SGLang; 0: a free one [-1: closed]."
        ),
    ] = None,
    port_file: Annotated[
        Path | None,
        typer.Option(
            help="File to write 'host:port metrics_port pid' to, and the HTTP door's port if it is open, when all "
            "teachers are ready."
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine that runs the models [transformers]; `opd plugins list` names them.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of the models, for example cpu or cuda:0 [auto].")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype in which the models compute: f32, bf16 or f16 [auto].")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(help="Give a sequence the same scores bit for bit, whatever it is batched with; slower on a GPU."),
    ] = None,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="Option of the engine as KEY=VALUE; repeatable.")
    ] = None,
    threads: Annotated[
        int, typer.Option(help="CPU threads for torch; 0 means OMP_NUM_THREADS, or all cores if that is not set.")
    ] = 0,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per engine batch [16384].")] = None,
    max_tokens_in_flight: Annotated[
        int | None, typer.Option(help="Maximum tokens queued or running; further calls are refused [262144].")
    ] = None,
    max_sequence_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens of a sequence [the engine's limit].")
    ] = None,
    max_k: Annotated[int | None, typer.Option(help="Maximum k of payloads topk and gather [1024].")] = None,
    allow_full: Annotated[bool | None, typer.Option(help="Allow payload full, the whole logits; for tests.")] = None,
    memory_budget_bytes: Annotated[
        int | None,
        typer.Option(help="Maximum bytes of weights on the device; idle teachers sleep beyond it [0: no limit]."),
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that calls in flight have to finish after SIGTERM [120].")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the server's certificate chain; reloaded when it changes.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the private key of --tls-cert.")] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file with the authorities that sign client certificates; turns on mutual TLS."),
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="YAML file with bearer tokens and their scopes.")] = None,
    allow_insecure: Annotated[bool | None, typer.Option(help="Allow a --host other than loopback without TLS.")] = None,
    trust_remote_code: Annotated[
        list[str] | None, typer.Option(help="Model whose own code may run, as MODEL@COMMIT; repeatable.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Least severe level that is logged: debug, info, warning or error [info].")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="Form of the log: json or text [json].")] = None,
    log_requests: Annotated[bool | None, typer.Option(help="Log every Score call that ends.")] = None,
    tracing: Annotated[
        bool | None,
        typer.Option(help="Export OpenTelemetry spans, configured by OTEL_* variables; needs the extra otel."),
    ] = None,
) -> None:
    """Serve one or more teacher models over gRPC until SIGTERM."""
    from teacher_server.observe.logs import configure

    values = {_FLAGS[flag]: value for flag, value in locals().items() if flag in _FLAGS}
    values["engine.options"] = read_options("--engine-option", engine_option) or None
    values["security.trust_remote_code"] = trust_remote_code or None
    settings, teachers = _settings(config, values), _teachers(model, name)
    grow_segments(pools=settings.engine.engine == "vllm")
    configure(settings.log.level, form=settings.log.format, asked=log_format is not None)
    code = asyncio.run(_serve(settings, teachers, port_file, threads))
    if code:
        raise typer.Exit(code)


def _settings(config: Path | None, values: dict[str, Any]) -> Any:
    from teacher_server.settings import ServerSettings

    data = read_mapping(config) if config is not None else {}
    for key, value in values.items():
        if value is None:
            continue
        group, _, field = key.rpartition(".")
        target = data.setdefault(group, {}) if group else data
        if not isinstance(target, dict):
            raise ConfigError(f"config {config}: {group!r} must be a group of settings.")
        target[field] = value
    return parse_settings(ServerSettings, data, source=str(config) if config else "flags")


def _teachers(models: list[str], name: str) -> dict[str, str]:
    """The names and models in --model flags."""
    if name and len(models) > 1:
        raise ConfigError("--name goes with a single --model; use --model NAME=MODEL for several.")
    teachers: dict[str, str] = {}
    for entry in models:
        given, separator, path = entry.partition("=")
        if not separator or Path(entry).exists():
            given, path = name or Path(entry).name or entry, entry
        elif name and name != given:
            raise ConfigError(f"--model {entry!r} names the teacher already; leave out --name {name} or the {given!r}.")
        if not given or not path:
            raise ConfigError(f"--model {entry!r} must be MODEL or NAME=MODEL.")
        if given in teachers:
            raise ConfigError(f"two teachers are called {given!r}; name them with --model NAME=MODEL.")
        teachers[given] = path
    return teachers


async def _serve(settings: Any, teachers: dict[str, str], port_file: Path | None, threads: int) -> int:
    from teacher_server.build import engine_factory
    from teacher_server.observe.host import keep_compact, notify
    from teacher_server.server import TeacherServer

    keep_compact()
    _set_threads(threads)
    if port_file is not None and not port_file.absolute().parent.is_dir():
        raise ConfigError(f"the folder of --port-file {port_file} does not exist; make {port_file.parent} first.")
    server = TeacherServer(settings, engine_factory(settings))
    loop = asyncio.get_running_loop()
    asked: list[int] = []

    def stop(number: int) -> None:
        # A second signal ends the grace period, but a scheduler repeats its notices.
        if number not in NOTICES or not asked:
            server.stop()
        asked.append(number)

    for number in stop_signals():
        loop.add_signal_handler(number, stop, number)
    try:
        await server.start(teachers)
    except (asyncio.CancelledError, DeadlineError) as error:
        # A model that is being read on a thread cannot be interrupted, and the interpreter would wait for it.
        # Everything that matters is closed already.
        if isinstance(error, DeadlineError):
            echo(f"error: {error}", err=True)
        os._exit(getattr(error, "exit_code", server.exit_code))
    if port_file is not None:
        door = f" {server.http_port}" if server.http_port else ""
        _write_ports(port_file, f"{server.address} {server.metrics_port} {os.getpid()}{door}\n")
    notify(READY=1, STATUS=f"serves {', '.join(teachers)} on {server.address}")
    code = await server.wait()
    if server.shared.teachers.loading:
        # Everything is closed, but the process would wait for a model that is no longer wanted.
        os._exit(code)
    return code


def _set_threads(threads: int) -> None:
    if not 0 <= threads <= _MOST_THREADS:
        raise ConfigError(f"--threads is {threads}, but it must be from 0 to {_MOST_THREADS}.")
    if threads or not os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(threads or os.cpu_count() or 1)


def _write_ports(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"--port-file {path} cannot be written: {error.strerror}; choose another.") from error
