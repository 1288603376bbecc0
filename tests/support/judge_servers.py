"""Judges that tests ask for real: over HTTP and over gRPC, which also fail on purpose."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc

from opd.wire.v1 import judge_pb2 as pb
from opd.wire.v1 import judge_pb2_grpc


class Server(ThreadingHTTPServer):
    """Answers by what a test put into `say`; remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any, str | None]] = []
        self.say: Any = lambda path, body: {"choices": [{"message": {"content": "7"}}]}
        self.says_raw = b""  # in place of an answer
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        if self.server.says_raw:
            self.wfile.write(self.server.says_raw)
            return
        found = self.server.say(self.path, body)
        if found is None:  # hangs until the test is over
            self.server.release.wait(120)
            return
        status, text = (
            (found, "") if isinstance(found, int) else (200, found if isinstance(found, str) else json.dumps(found))
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    """A server that answers until the end of the block."""
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.release.set()
        made.shutdown()
        made.server_close()
        thread.join()


class Judge(judge_pb2_grpc.JudgeServiceServicer):
    """Answers by what a test put into `say`: a score, None, or a status."""

    def __init__(self) -> None:
        self.asked: list[tuple[pb.JudgeRequest, dict[str, Any]]] = []
        self.say: Any = lambda request: 0.5

    def Judge(self, request: pb.JudgeRequest, context: grpc.ServicerContext) -> pb.JudgeResponse:
        self.asked.append((request, dict(context.invocation_metadata())))
        found = self.say(request)
        if isinstance(found, grpc.StatusCode):
            context.abort(found, "on purpose")
        return pb.JudgeResponse(score=found)
