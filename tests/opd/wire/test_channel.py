"""The channel preset against servers that are slow to answer."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest

from opd.wire.channel import open_channel, proxy_for


async def test_a_server_that_is_slow_to_shake_hands_is_waited_for() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return b"here"

    server = grpc.aio.server()
    methods = {"M": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connections: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()

    async def slow_proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await asyncio.sleep(0.6)
        onward = await asyncio.open_connection("127.0.0.1", port)
        connections.append(onward[1])
        await asyncio.gather(copy(reader, onward[1]), copy(onward[0], writer))

    proxy = await asyncio.start_server(slow_proxy, "127.0.0.1", 0)
    try:
        async with open_channel(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}") as channel:
            assert await channel.unary_unary("/s/M")(b"", timeout=30) == b"here"
    finally:
        proxy.close()
        for writer in connections:
            writer.close()
        await server.stop(0)
        await proxy.wait_closed()


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
async def test_a_server_on_this_host_is_reached_past_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return b"here"

    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.aio.server()
    methods = {"M": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"localhost:{port}") as channel:
            assert await channel.unary_unary("/s/M")(b"", timeout=30) == b"here"
    finally:
        await server.stop(0)


def test_the_proxy_to_another_host_is_named_unless_the_host_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert proxy_for("teacher.example:50051") == "http_proxy" and proxy_for("127.0.0.1:50051") == ""
    monkeypatch.setenv("no_proxy", "other.org, .example")
    assert proxy_for("teacher.example:50051") == "" and proxy_for("10.0.0.1:50051") == "http_proxy"
