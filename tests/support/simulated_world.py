"""A simulated world by rules: what a chat model would say as task writer, user, tool and judge, as a server too.

python simulated_world.py PORT      # serves until it is ended
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = {
    "weather": [{"name": "forecast", "description": "Says the weather.", "parameters": {"city": "string"}}],
    "sums": [
        {"name": "add", "parameters": {"a": "number", "b": "number"}},
        {"name": "double", "parameters": {"a": "number"}},
    ],
}


def simulate(messages: Sequence[Mapping[str, str]]) -> str:
    """The JSON that a part is asked for; a function of the conversation alone."""
    system, told = messages[0]["content"], messages[-1]["content"]
    if system.startswith("You write tasks"):
        case = re.search(r"Case (\d+)", told)
        task = {"instructions": "Help.", "persona": "a beginner", "intent": "a sum", "calls": []}
        return json.dumps({**task, "query": f"{case[1][-1] if case else 0}+1="})
    if system.startswith("You play a user"):
        return f"Of course.\n```json\n{json.dumps({'message': 'And 2+2=', 'done': False})}\n```"
    if system.startswith("You play a tool"):
        call = json.loads(told.rpartition("Call: ")[2])
        return json.dumps({"result": {"called": call["name"], "sum": sum(call["arguments"].values())}})
    said = told.rpartition("Assistant: ")[2]
    return json.dumps({"reward": len(said.encode()) % 3 - 1})


def say(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request, for `judge_servers.Server`."""
    return {"choices": [{"message": {"content": simulate(body["messages"])}}]}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps(say(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
