"""`opd env list` and `opd env serve NAME`: list the environments, or serve one to other trainers."""

import signal
import threading
from typing import Annotated, Any

import typer

from opd.config.text import read_options
from opd.errors import ConfigError
from opd.printable import echo
from opd.signals import stop_signals

app = typer.Typer(no_args_is_help=True, help="List the environments that students act in, or serve one.")


@app.command("list")
def list_environments() -> None:
    """List the environments by name."""
    from opd.tasks.environments import ENVIRONMENTS

    for entry in ENVIRONMENTS:
        echo(f"{entry.name:12} {entry.summary}")


@app.command()
def serve(
    name: Annotated[
        str, typer.Argument(help="Name of the environment (`opd env list`), or a dotted path package.module:Class.")
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help="Settings of the environment; `opd plugins show NAME` lists them."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; there is no authentication.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one and prints it.")
    ] = 8000,
    sessions: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent episodes.")] = 64,
    idle_seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a session that sends nothing ends and frees its place.")
    ] = 600.0,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web origin whose pages may play, for example https://play.example; repeatable. Default: no origin."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which clients may call the server, besides localhost and --host; repeatable. Default: any "
            "name, but none if --host is a loopback address."
        ),
    ] = None,
) -> None:
    """Serve an environment as an OpenEnv server (WebSocket /ws) until Ctrl-C or another signal to stop."""
    try:
        import websockets  # noqa: F401
    except ImportError as error:
        raise ConfigError("`opd env serve` needs websockets; install it with pip install 'opd[envs]'.") from error
    from opd.tasks.environments.openenv_server import serve_environment

    chosen = read_options("option", options)

    def ready(server: Any, port: int) -> None:
        for number in stop_signals():
            # From a thread, because shutdown waits for the loop that the signal has interrupted.
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        echo(f"serving environment {name} at ws://{host}:{port}/ws")

    serve_environment(
        {"name": name, "options": chosen},
        host,
        port,
        sessions,
        ready,
        idle_seconds=idle_seconds,
        origins=allow_origin or (),
        hosts=allow_host or (),
    )
