"""A judge of flesh: a language model behind an OpenAI-style endpoint, which dies when it has answered often enough.

python judge_model.py MODEL PORT ANSWERS     ANSWERS 0: it lives until it is killed
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Handler(BaseHTTPRequestHandler):
    """Greedy completions of the last message, one at a time."""

    server: "Server"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            if self.server.answers and self.server.given == self.server.answers:
                os.kill(os.getpid(), signal.SIGKILL)  # in the middle of a call, as a crash is
            self.server.given += 1
            said = self.server.complete(body["messages"][-1]["content"], body["max_tokens"])
        text = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Holds the model."""

    daemon_threads = True

    def __init__(self, path: str, port: int, answers: int) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.answers, self.given, self.lock = answers, 0, threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    @torch.no_grad()
    def complete(self, text: str, most: int) -> str:
        """What the model likes best after `text`."""
        ids = self.tokenizer(text, return_tensors="pt")
        found = self.model.generate(**ids, max_new_tokens=most, do_sample=False)
        said: str = self.tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        return said


if __name__ == "__main__":
    Server(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).serve_forever()
