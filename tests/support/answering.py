"""A completion and chat server for the lock: it goes on where ids end, and judges by what it reads."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from simulated_world import simulate

from opd_lab.tiny.tokenizer import make_tokenizer


class _Handler(BaseHTTPRequestHandler):
    tokenizer = make_tokenizer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choice = self.turn(body) if self.path == "/completions" else self.judge(body)
        answer = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def turn(self, body: dict[str, Any]) -> dict[str, Any]:
        """The digit that opens the first place from the register shown, or "b" out of a letter."""
        text = self.tokenizer.decode(body["prompt"], skip_special_tokens=True)
        shown = text[-1]
        return {"text": str((int(shown) + int(text[0])) % 10) if shown in "0123456789" else "b"}

    def judge(self, body: dict[str, Any]) -> dict[str, Any]:
        """By the length of what it reads; a simulated world's parts are asked with a system message."""
        if body["messages"][0]["role"] == "system":
            return {"message": {"content": simulate(body["messages"])}}
        word = ("Skip.", "**Weak**", "strong", "I cannot say")[len(body["messages"][0]["content"]) % 4]
        return {"message": {"content": word}}

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def answering() -> Iterator[str]:
    """The address of a running server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
