"""An OpenAI-compatible chat endpoint on this machine, which a test starts and scripts."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from selfplay.config import Config
from selfplay.config.player_spec import Spec
from selfplay.learner.method import Ask, Parts
from selfplay.methods.judge import Judge


@dataclass
class Answer:
    """What the server does with one request: a status and text, after a while if asked."""

    text: str = "[accept]"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    wait_s: float = 0.0
    drip_s: float = 0.0  # between two bytes of the body
    finish: str = "stop"
    reason: str | None = None  # the words after the status


def judge_of(config: Config, reader: Callable[[Spec], Ask]) -> Judge:
    """The judge of these settings, whose chats `reader` answers."""
    nothing: Any = None  # it trains no model
    return Judge(config.methods["judge"], Parts(config, nothing, nothing, reader=reader))


Script = Callable[[dict[str, Any], int], Answer]


@dataclass
class ChatServer:
    """Its address, and what it was asked: bodies and headers, in the order of arrival."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    busiest: int = 0


@contextmanager
def chat_server(script: Script) -> Iterator[ChatServer]:
    """Serve `script(body, number of the request)` until the end of the block."""
    lock, released, under_way = threading.Lock(), threading.Event(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.headers.append({k.lower(): v for k, v in self.headers.items()})
                under_way[0] += 1
                server.busiest = max(server.busiest, under_way[0])
            answer = (
                script(body, number) if self.path == "/v1/chat/completions" else Answer("", 404)
            )
            released.wait(answer.wait_s)
            with lock:
                under_way[0] -= 1
            content = answer.body if answer.body is not None else _completion(answer)
            try:
                self.send_response(answer.status, answer.reason)
                for name, value in {**answer.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if answer.drip_s:
                    for byte in content:
                        self.wfile.write(bytes([byte]))
                        released.wait(answer.drip_s)
                else:
                    self.wfile.write(content)
            except OSError:
                self.close_connection = True  # who asked has given up

        def log_message(self, format: str, *args: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.socket.listen(128)  # games that ask at once: of more than its 5 some wait a second
    http.daemon_threads = True
    server = ChatServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        released.set()
        http.shutdown()
        http.server_close()
        thread.join()


def _completion(answer: Answer) -> bytes:
    choice = {
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": answer.finish,
    }
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    return json.dumps({"choices": [choice], "usage": usage}).encode()
