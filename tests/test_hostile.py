"""What strangers can do to the socket of the real process: slow, endless and leaving clients.

Each attack goes on while everybody else is served, and afterwards nothing is left of it.
"""

import json
import os
import resource
import signal
from contextlib import ExitStack, contextmanager, suppress

import pytest
from started import ENDLESS, GOOD, is_error, module_server, request, serving, until

JSON = "Content-Type: application/json"
MANY_FILES = 4096
server = module_server(
    *("--max-running", "4", "--max-queued", "80", "--drafter", "none"),
    *("--allowed-host", "Mine.example", "--allow-origin", "*"),
    ignored=(signal.SIGHUP,),  # as nohup starts one
)


@pytest.fixture(scope="module", autouse=True)
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MANY_FILES)), hard))


@contextmanager
def crowd(server, number, data):
    """So many clients that have sent this, and are still there."""
    with ExitStack() as stack:
        clients = [stack.enter_context(server.open_socket()) for _ in range(number)]
        for client in clients:
            with suppress(OSError):  # the server may have closed it by now
                client.sendall(data)
        yield clients


def is_served(server):
    return server.is_ready() and server.generate(**GOOD)[0] == 200


def test_who_comes_gets_in_when_1100_connections_idle(server):
    with crowd(server, 1100, b"GET /health HTTP/1.1\r\nHo"):
        assert is_served(server) and is_served(server)
    assert is_served(server)


def test_a_burst_waits_for_places_and_the_next_is_told_which_option_says_so(server):
    """All of them may have long bodies, but not 64 MiB together."""
    # With a comparison none ends meanwhile: it has six texts, in turn.
    body = json.dumps(ENDLESS | {"stream": True, "compare": True}).encode()
    fill = [request("/generate", body + b" " * n, f"Content-Length: {len(body) + n}")
            for n in (0, 1_000_000)]  # fmt: skip
    with crowd(server, 84, fill[0]):
        server.wait_until_taken(84)
        status, headers, said = server.raw(fill[0])
        assert (status, said["error"]["code"]) == (429, "queue_full")
        assert headers["Retry-After"] == "1" and server.health()["status"] == "ok"
        assert "80 requests wait already" in said["error"]["message"]
        assert "--max-queued" in said["error"]["message"]
    server.wait_until_idle()
    with ExitStack() as stack:
        for number in range(1, 68):  # few bodies of this size are read at once
            stack.enter_context(crowd(server, 1, fill[1]))
            server.wait_until_taken(number)
        status, _, said = server.raw(fill[1])
        assert status == 429 and "bytes wait already" in said["error"]["message"]
    server.wait_until_idle()
    assert is_served(server)


def memory_mib(server):
    with open(f"/proc/{server.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_bodies_that_stop_half_way_take_neither_the_place_nor_the_memory_of_others(server):
    """200 times 600 kB: beyond 64 MiB the oldest of them are closed."""
    before = memory_mib(server)
    half = request("/generate", b"x" * 600_000, "Content-Length: 900000")
    with crowd(server, 200, half) as clients:
        assert is_served(server)
        assert memory_mib(server) < before + 150
        until(lambda: sum(map(is_closed, clients)) > 80)
    assert is_served(server)


def is_closed(client):
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


UNWANTED = [  # status, path, header
    (413, "/generate", JSON), (413, "/nowhere", JSON), (403, "/generate", "Host: evil.example"),
    (413, "/v1/messages", JSON), (415, "/generate", "Content-Type: text/plain"),
    (415, "/v1/chat/completions", "X: a"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "path", "header"), UNWANTED)
def test_a_body_that_is_not_wanted_is_refused_before_it_is_sent(server, status, path, header):
    host = "Host: localhost" if status != 403 else JSON
    lines = [f"POST {path} HTTP/1.1", host, header, "Content-Length: 10000000000", "", ""]
    answer = server.raw("\r\n".join(lines).encode() + b"x" * 100)
    assert answer[0] == status
    if path == "/v1/messages":  # Anthropic's errors have another form
        assert answer[2]["error"]["type"] == "request_too_large"
    else:
        assert is_error(answer[2])


def test_at_the_file_limit_nothing_is_flooded_and_all_recovers():
    def complaints():
        """The times in seconds of the log's lines about files."""
        *lines, _ = server.log().split("\n")  # of which the last one may be half there
        told = [json.loads(line) for line in lines if line.startswith("{")]
        return [line["time"][:19] for line in told if "open files" in line.get("message", "")]

    with serving("--drafter", "none") as server:
        open_files = len(os.listdir(f"/proc/{server.pid}/fd"))
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_files + 5, hard))
        with crowd(server, 50, b""):
            until(complaints)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
            assert is_served(server)
        times = complaints()
        assert 1 <= len(times) <= len(set(times)) + 1 and "Traceback" not in server.log()
        server.end_well()


def test_a_server_that_nohup_started_outlives_the_terminal(server):
    server.send(signal.SIGHUP)
    assert is_served(server)


HOSTS = [  # status, path, then names that a client may give the server in `Host`
    (200, "/health", "localhost", "LocalHost:80", "127.0.0.1:5000", "10.1.2.3", "[::1]:5000",
     "mine.example"),
    (403, "/health", "::1", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
     "a b", "[evil]"),
    (403, "/", "evil.example"),
    (200, "http://localhost:80/health", "localhost"),
    (403, "http://evil.example:80/health", "localhost"),  # the name in the path counts
]  # fmt: skip


@pytest.mark.parametrize("row", HOSTS, ids=str)
def test_without_a_key_only_known_names_of_the_server_are_answered(server, row):
    """A page elsewhere may make its own name point here (DNS rebinding)."""
    wanted, path, *hosts = row
    for host in hosts:
        status, headers, body = server.call("GET", path, None, {"Host": host})
        assert status == wanted and headers["Access-Control-Allow-Origin"] == "*", host
        assert wanted == 200 or "--allowed-host" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/nope", "/generate", "/page/", "/page/page.js", "/metrics"])
def test_every_answer_has_the_headers_that_protect_a_browser(server, path):
    for method, host in (("GET", "evil.example"), ("GET", "[::1]"), ("POST", "[::1]")):
        _, headers, _ = server.call(method, path, None, {"Host": host})
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_a_line_of_the_log_is_short_whatever_was_asked(server):
    for method, path in (("M" * 5000, "/"), ("GET", "/" + "p" * 5000)):
        server.call(method, path, None, {"X-Request-Id": "r" * 5000})
    assert max(map(len, server.log().splitlines())) < 1000
