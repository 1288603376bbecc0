"""The channel preset against servers that are slow to answer."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio

from opd.wire.channel import open_channel


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
