"""Many mixed requests at once, some of them broken, some given up, more than the queue takes.

Every answer is the one that the request gets alone, and nothing is left behind.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.decoding import DrafterChoice, EagleModel, SamplingParams, TreeConfig
from stages.serve.choice import Choice
from stages.serve.completion import Completion
from stages.serve.engine_thread import Job
from stages.targets import Target, load_target
from tests.serve.running_server import RunningServer, running_server, soon
from tests.tiny import make_tiny_target

CLIENTS = 24
SLOTS, QUEUE = 4, 8
PATIENCE = 3000  # seconds that anything may take on a busy machine
LEAVING, BROKEN = 0.20, 0.05
WORDS = [
    "hello",
    "où est 日本?",
    "one two three",
    "a longer question, with a comma, and then some more of it",
    "x",
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Asked:
    """A request and what it must get: the text and the finish reason of each answer."""

    path: str
    body: dict[str, Any]
    expected: list[tuple[str, str]]


def made_up(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A right request with some of the parameters there are."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "n": 2},
        {"temperature": 1.2, "min_p": 0.02, "n": 3},
        {"temperature": 1.0, "stop": ["a", "e\n", "ing"]},
        {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "ignore_eos": True, "logit_bias": {"65": 4}},
        {"temperature": 1.0, "response_format": FORMAT},
        {"temperature": 1.0, "speculative": False},
    ]
    fields = {**rng.choice(options), "seed": rng.randrange(2**32), "max_tokens": rng.randint(1, 24)}
    words = rng.choice(WORDS)
    if rng.random() < 0.4:
        return TEXT, {"prompt": words, **fields}
    turns = [{"role": "user", "content": words}]
    if rng.random() < 0.5:
        turns += [{"role": "assistant", "content": "so"}, {"role": "user", "content": rng.choice(WORDS)}]
    return CHAT, {"messages": turns, **fields}


def answers(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (c["text"] if "text" in c else c["message"]["content"], c["finish_reason"]) for c in body["choices"]
    ]


def streamed(lines: Iterator[str], n: int) -> list[tuple[str, str]]:
    """The answers of a stream, put together."""
    texts, reasons = [""] * n, [""] * n
    last = ""
    for line in filter(None, lines):
        last = line.removeprefix("data: ")
        for choice in json.loads(last)["choices"] if last != "[DONE]" else []:
            texts[choice["index"]] += (
                choice["text"] if "text" in choice else choice["delta"].get("content", "")
            )
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert last == "[DONE]"
    return list(zip(texts, reasons, strict=True))


@dataclass
class Crowd:
    """Clients of one server; each has its own way to ask, by the number of the request."""

    url: str
    asked: list[Asked]
    sent: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, requests: range) -> None:
        """Sends the requests, many at once. Raises what any of them has found wrong."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            for _ in clients.map(self._ask, requests, timeout=2 * PATIENCE):
                pass

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        asked, dice = rng.choice(self.asked), rng.random()
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as client:
            if dice < BROKEN:
                self._send_broken(rng, client, asked)
            elif dice < BROKEN + LEAVING:
                self._leave(rng, client, asked)
            else:
                self._answered(rng, client, asked)

    def _count(self, what: str) -> None:
        with self.lock:
            self.sent += 1
            self.seen[what] += 1

    def _answered(self, rng: random.Random, client: httpx.Client, asked: Asked) -> None:
        stream = rng.random() < 0.5
        while True:
            response = client.post(asked.path, json={**asked.body, "stream": stream})
            self._count(str(response.status_code))
            if response.status_code != 429:
                break
            assert int(response.headers["retry-after"]) >= 1
            time.sleep(rng.uniform(0.05, 0.3))  # sooner than it says, to keep the queue full
        assert response.status_code == 200, response.text
        n = len(asked.expected)
        found = streamed(iter(response.text.splitlines()), n) if stream else answers(response.json())
        assert found == asked.expected, asked.body

    def _leave(self, rng: random.Random, client: httpx.Client, asked: Asked) -> None:
        """Go away: in the middle of a stream, or before the answer."""
        self._count("left")
        body = {**asked.body, "max_tokens": 200, "ignore_eos": True, "stream": True}
        body.pop("response_format", None)
        if rng.random() < 0.5:
            with client.stream("POST", asked.path, json=body) as response:
                lines = response.iter_lines()
                for _ in range(rng.randint(0, 6)):
                    next(lines, None)
            return
        content = json.dumps({**body, "stream": False}).encode()
        with self._connected(asked.path, len(content)) as connection:
            connection.sendall(content)
            time.sleep(rng.uniform(0, 0.1))

    def _send_broken(self, rng: random.Random, client: httpx.Client, asked: Asked) -> None:
        kind = rng.randrange(5)
        content = json.dumps(asked.body).encode()
        if kind == 0:  # half a request, and then no more of it
            self._count("half")
            with self._connected(asked.path, len(content)) as connection:
                connection.sendall(content[: rng.randrange(len(content))])
                time.sleep(rng.uniform(0, 0.05))
            return
        broken = [
            content[:-1],
            content.replace(b'"seed"', b'"s\xff\xfeed"'),
            json.dumps({**asked.body, "max_tokens": 10_000}).encode(),
            json.dumps({**asked.body, "nonsense": 1}).encode(),
        ][kind - 1]
        headers = {"Content-Type": "application/json"}
        response = client.post(asked.path, content=broken, headers=headers)
        self._count(str(response.status_code))
        assert response.status_code == 400
        assert response.json()["error"]["message"]

    def _connected(self, path: str, size: int) -> socket.socket:
        address = httpx.URL(self.url)
        connection = socket.create_connection((address.host, address.port or 80), timeout=30)
        lines = ["Host: x", "Content-Type: application/json", f"Content-Length: {size}", "", ""]
        connection.sendall("\r\n".join([f"POST {path} HTTP/1.1", *lines]).encode())
        return connection


@pytest.fixture(scope="module")
def model(target: Target, head_folder: str) -> EagleModel:
    return EagleModel.from_pretrained(
        target, head_folder, tree="chain:depth=2", max_batch=SLOTS, prefix_reuse=True
    )


@pytest.fixture
def crowded(model: EagleModel) -> Iterator[RunningServer]:
    with running_server(model, max_queue=QUEUE, log_format="json") as running:
        yield running


def alone(plain: EagleModel, count: int) -> list[Asked]:
    """Requests with the answers that each gets from a plain engine that does nothing else."""
    rng = random.Random(0)
    found = []
    with running_server(plain) as quiet:
        for path, body in [made_up(rng) for _ in range(count)]:
            response = quiet.client.post(quiet.url + path, json=body)
            assert response.status_code == 200, response.text
            found.append(Asked(path, body, answers(response.json())))
    return found


def check_nothing_is_left(server: RunningServer, crowd: Crowd) -> None:
    """Slots, queue, connections and objects are free; log and metrics have every request once."""
    engine = server.engine

    def counted() -> float:
        return sum(v for k, v in server.metrics().items() if k.startswith("eagle_requests_total"))

    assert soon(lambda: counted() == crowd.sent), (counted(), crowd.sent, crowd.seen)
    assert soon(lambda: engine.running == engine.waiting == 0)
    assert soon(lambda: not engine._engine.busy)
    assert engine._engine.room == SLOTS
    server.client.close()
    server.client = httpx.Client(timeout=60)
    assert soon(lambda: not server.server.server_state.connections)
    assert soon(lambda: not server.server.server_state.tasks)

    def left() -> list[Any]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) in (Completion, Choice, Job)]

    assert soon(lambda: not left()), left()

    metrics, records = server.metrics(), [json.loads(line) for line in server.log]
    ended = [record for record in records if "answers" in record]
    complete = [record for record in ended if set(record["outcome"].split("+")) <= {"stop", "length"}]
    assert {record["outcome"] for record in ended if record not in complete} <= {"cancelled"}
    for outcome, those in (
        ("complete", complete),
        ("cancelled", [record for record in ended if record["outcome"] == "cancelled"]),
        ("refused", [record for record in records if record["outcome"] == "refused"]),
    ):
        assert metrics.get(f'eagle_requests_total{{outcome="{outcome}"}}', 0) == len(those)
    assert len(records) == crowd.sent
    names = {"generated_tokens": "completion_tokens", "decode_steps": "steps"}
    names |= {"drafted_tokens": "drafted", "accepted_tokens": "accepted", "prompt_tokens": "prompt_tokens"}
    for metric, name in names.items():
        assert metrics[f"eagle_{metric}_total"] == sum(record[name] for record in ended), metric
    given = sum(v for k, v in metrics.items() if k.startswith("eagle_answers_total"))
    assert given == sum(record["answers"] for record in complete)


def test_100_mixed_requests(crowded: RunningServer, plain: EagleModel) -> None:
    crowd = Crowd(crowded.url, alone(plain, 16))
    threads = set(threading.enumerate())
    crowd.run(range(100))
    check_nothing_is_left(crowded, crowd)
    assert {thread.name for thread in set(threading.enumerate()) - threads} <= {"tokenize_0", "compile_0"}
    assert min(crowd.seen[kind] for kind in ("200", "400", "429", "left", "half")) > 0


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE)
def test_2000_mixed_requests(crowded: RunningServer, plain: EagleModel) -> None:
    crowd = Crowd(crowded.url, alone(plain, 64))
    crowd.run(range(2000))
    check_nothing_is_left(crowded, crowd)


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE)
def test_a_server_does_not_grow_with_the_requests_it_has_answered(
    tiny_folder: Path, head_folder: str, plain: EagleModel
) -> None:
    """A process of its own: in the test's, the clients take memory too."""
    flags = ["--target", str(tiny_folder), "--head", head_folder, "--tree", "chain:depth=2", "--port", "0"]
    flags += ["--dtype", "float32", "--max-batch", str(SLOTS), "--max-queue", str(QUEUE)]
    environment = {name: value for name, value in os.environ.items() if name != "EAGLE_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle_cli", "serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"at (http://\S+)/v1", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        crowd = Crowd(url, alone(plain, 24))
        crowd.run(range(400))
        before = resident(process.pid)
        crowd.run(range(400, 1200))
        assert resident(process.pid) - before < 8 * 2**20
    finally:
        process.terminate()
        assert process.wait(30) == 0


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def test_clients_that_send_half_a_request_and_wait_do_not_hold_up_the_others(crowded: RunningServer) -> None:
    crowd = Crowd(crowded.url, [])
    waiting = [crowd._connected(CHAT, 1000) for _ in range(40)]
    try:
        for connection in waiting:
            connection.sendall(b'{"messages"')
        assert crowded.chat(max_tokens=3).status_code == 200
    finally:
        for connection in waiting:
            connection.close()
    assert soon(lambda: len(crowded.server.server_state.connections) <= 1)


def read_slowly(server: RunningServer, body: dict[str, Any], pause: threading.Event) -> list[str]:
    """The lines of a long streamed answer, none of which is read before `pause` is set."""
    transport = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with (
        httpx.Client(transport=transport, timeout=PATIENCE) as client,
        client.stream("POST", server.url + TEXT, json=body) as response,
    ):
        assert pause.wait(PATIENCE)
        response.read()
    return response.text.splitlines()


def check_slow_reader(server: RunningServer, model: EagleModel, tokens: int) -> None:
    """Stream and whole are the target's own text, with the same usage."""
    pause = threading.Event()
    body = {"prompt": "hello", "max_tokens": tokens, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    with ThreadPoolExecutor(1) as clients:
        slow = clients.submit(read_slowly, server, body, pause)
        assert soon(lambda: server.engine.running == 1)
        assert server.complete("x", max_tokens=3).status_code == 200  # beside it
        assert soon(lambda: server.engine.running == 0, PATIENCE)  # though none of it has been read
        pause.set()
        lines = slow.result()
    server.client.timeout = httpx.Timeout(PATIENCE)
    whole = server.client.post(server.url + TEXT, json=body).json()
    prompt_ids = model.target.tokenizer("hello")["input_ids"]
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True)
    own = EagleModel(model.target).generate(prompt_ids, params)
    assert streamed(iter(lines), 1) == answers(whole) == [(own.text, "length")]
    usage = json.loads(lines[-4].removeprefix("data: "))["usage"]
    for each in (usage, whole["usage"]):
        assert (each["prompt_tokens"], each["completion_tokens"]) == (len(prompt_ids), tokens)


def test_a_slow_reader_gets_all_of_its_answer_and_holds_up_nobody(target: Target) -> None:
    model = EagleModel(target, max_batch=2)
    with running_server(model) as server:
        check_slow_reader(server, model, 400)


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE)
def test_an_answer_of_10_000_tokens(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "long", max_length=10_100, layers=7)
    drafter = DrafterChoice.parse("ngram:min=1,max=4")
    tree = TreeConfig.parse("chain:depth=3")
    target = load_target(str(folder), device="cpu", dtype="float32")
    model = EagleModel(target, tree=tree, drafter=drafter, max_batch=2)
    with running_server(model) as server:
        check_slow_reader(server, model, 10_000)
        before = resident(os.getpid())
        for stream in (False, True):
            body = {"prompt": "hello", "max_tokens": 10_000, "ignore_eos": True, "stream": stream}
            assert server.client.post(server.url + TEXT, json=body).status_code == 200
        # The slots have their size by now, and a whole answer was seen to add nothing. The bound leaves room
        # for what a client in this process holds of a stream, some 2 MB of text, and for the allocator.
        assert resident(os.getpid()) - before < 16 * 2**20
