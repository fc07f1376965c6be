"""A connection reads a request alike however its bytes come, and refuses framing that is ambiguous.

It waits only so long for a client and holds only so much memory for it. Both are tested without a
socket and with a clock that the tests move; the real process is in test_hostile.py.
"""

from pathlib import Path
from types import SimpleNamespace

import h11
import pytest

from server import connection
from server.connection import Connection, environ_of
from server.http import REFUSAL, WHEN_LEFT


class Transport:
    """Takes what is written, as if it went to a client that reads nothing."""

    def __init__(self):
        self.data, self.num_unread = bytearray(), 0
        self.is_aborted = self.is_paused = False

    def write(self, data):
        self.data += data
        self.num_unread += len(data)

    def get_write_buffer_size(self):
        return self.num_unread

    def abort(self):
        self.is_aborted = True

    def is_closing(self):
        return self.is_aborted

    def get_extra_info(self, name):
        return None

    def write_eof(self):
        raise OSError("the client has left")

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False


class Server:
    """In the place of the server: notes what is to be answered, and by which application."""

    environ, limit = {}, 1 << 30

    def __init__(self):
        self.asked, self.num_held, self.num_asked = [], 0, 0
        self.threads = [SimpleNamespace(submit=lambda _, environ: self.asked.append(environ))] * 2

    check = admit = forget = note = lambda *_, **__: None

    def hold(self, num_bytes):
        self.num_held += num_bytes
        if self.num_held > self.limit:
            self.victim.abort()

    def call(self, function, *arguments):
        function(*arguments)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(connection, "time", clock)
    return clock


@pytest.fixture
def client(clock):
    made = Connection(Server())
    made.connection_made(Transport())
    return made


def receive(client, data, size=1 << 16):
    for i in range(0, len(data), size):
        client.data_received(data[i : i + size])


def waits(client, clock, seconds, each_second=b""):
    """What has become of the client after so many seconds: closed, refused (a status), or None."""
    for _ in range(seconds):
        if each_second:
            client.data_received(each_second)
        clock.now += 1
        client.watch(clock.now)
    if client.transport.is_aborted:
        return "closed"
    refusals = [environ[REFUSAL].status for environ in client.server.asked if REFUSAL in environ]
    return refusals[0] if refusals else None


def answer(client, data, app):
    """Let an application answer what a client sends."""
    client.server.app = app
    client.data_received(data)
    client.respond(client.server.asked[0])


REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n"
ANSWER = ["200 OK", [("Content-Length", "0")]]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_request_is_read_alike_however_it_is_cut(client, size):
    head = HEAD.replace(b"Content-Length: 900000", b"Transfer-Encoding: chunked")
    data = b"\r\n\r\n" + head + b"\r\n5\r\nabcde\r\n3;x=y\r\nfgh\r\n0\r\nX: y\r\n\r\n"
    receive(client, data, size)
    (environ,) = client.server.asked
    assert environ["wsgi.input"].read() == b"abcdefgh" and REFUSAL not in environ
    assert environ["CONTENT_LENGTH"] == "8" and "HTTP_TRANSFER_ENCODING" not in environ
    assert client.is_last and client.server.num_held == 0  # no second one behind chunks


SLOW = [  # what a client sends, then each second; for how many seconds; what becomes of it
    ([], b"", 10, "closed"),
    ([], b"\r\n", 10, "closed"),
    ([b"GET"], b"", 10, 408),
    ([b"GET / HTTP/1.1\r\nX: "], b"x", 10, 408),
    ([b"\r\n", b"\r", b"\n"], b"", 10, "closed"),
    ([HEAD, b"\r\n"], b"", 10, 408),
    ([HEAD, b"\r\n"], b"x", 10, 408),
    ([HEAD, b"\r\n", b"x" * 163_840], b"", 20, 408),  # 16 KiB a second
    ([REQUEST], b"", 3600, None),  # it is not the client who is slow
]


@pytest.mark.parametrize(("sent", "each_second", "num_s", "outcome"), SLOW)
def test_a_client_has_so_much_time(client, clock, sent, each_second, num_s, outcome):
    """Also if it sends a byte now and then."""
    for data in sent:
        client.data_received(data)
    assert waits(client, clock, num_s, each_second) is None
    assert waits(client, clock, 1, each_second) == outcome


@pytest.mark.parametrize("both", [[REQUEST * 2], [REQUEST] * 2], ids=["at once", "in turn"])
def test_an_idle_connection_and_one_that_lingers_are_closed(client, clock, both):
    """Requests behind one that is being answered are dropped, and do not hide who has left."""
    for number, parts, patience in ((1, [REQUEST], 30), (2, both, 5)):
        for data in parts:
            client.data_received(data)
        assert not client.transport.is_paused
        assert len(client.server.asked) == number and client.is_last == (number == 2)
        client.end(ANSWER)
        client.transport.num_unread = 0
        assert waits(client, clock, patience) is None
    assert waits(client, clock, 1) == "closed"


@pytest.mark.parametrize(("a_second", "patience"), [(0, 30), (1000, 31), (20_000, 3140)])
def test_a_client_has_to_take_its_answer(client, clock, a_second, patience):
    """While it takes 16 KiB a second it is left in peace."""
    client.data_received(REQUEST)
    size = 60 << 20
    client.end(["200 OK", [("Content-Length", str(size))]], b"x" * size)
    for second in range(patience):
        clock.now += 1
        client.watch(clock.now)
        client.transport.num_unread = max(0, client.transport.num_unread - a_second)
        assert not client.transport.is_aborted, second
    client.watch(clock.now + 1)
    assert client.transport.is_aborted == (a_second < 16_384)


def test_what_nobody_reads_does_not_fill_the_memory(client):
    client.data_received(REQUEST)
    head = ["200 OK", [("Content-Length", str(1 << 30))]]
    for _ in range(63):
        client.send(head, b"x" * (1 << 20))
    assert not client.transport.is_aborted
    client.send(head, b"x" * (1 << 20))  # and there is the head
    assert client.transport.is_aborted


def test_one_answer_at_a_time_may_pile_up(client):
    """The next request is read when most of it is taken; until then a client that leaves is not."""
    client.data_received(REQUEST)
    client.pause_writing()
    assert not client.transport.is_paused
    client.end(ANSWER)
    assert client.transport.is_paused
    client.resume_writing()
    assert not client.transport.is_paused


def test_a_client_that_has_its_answer_may_ask_at_once(client):
    """Even before the thread that answers has come back."""
    write, later = client.transport.write, []

    def write_and_ask(data):
        write(data)
        if data.endswith(b"whole"):
            later.append(REQUEST)

    def call(function, *arguments):
        function(*arguments)
        while later:
            client.data_received(later.pop())

    client.server.call, client.transport.write = call, write_and_ask
    head = [("Content-Length", "5")]
    answer(client, REQUEST, lambda _, start: start("200 OK", head) or iter([b"who", b"le"]))
    assert len(client.server.asked) == 2 and not client.is_last


GET, POST, HOST = "GET /health HTTP/1.1", "POST /generate HTTP/1.1", "Host: localhost"
IN_CHUNKS, CHUNK, END = [POST, HOST, "Transfer-Encoding: chunked"], b"5\r\nabcde\r\n", b"0\r\n\r\n"
MANY = 200_000
FRAMES = Path(__file__).with_name("bad_framing.txt").read_text("utf-8").splitlines()[1:]


@pytest.mark.parametrize("row", FRAMES)
def test_framing_that_is_ambiguous_or_endless_is_refused_with_the_rest(client, row):
    """RFC 9112. What has no end is refused while it comes."""
    status, lines, body = map(eval, row.split(" | "))
    receive(client, "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or REQUEST))
    (environ,) = client.server.asked
    assert environ[REFUSAL].status == status and client.is_last and client.server.num_held == 0


def test_another_protocol_that_is_offered_is_not_taken(client):
    """Flask would look for a route of web sockets, and refuse the request."""
    lines = GET, HOST, "Connection: Upgrade", "Upgrade: websocket", "", ""
    receive(client, "\r\n".join(lines).encode())
    (environ,) = client.server.asked
    assert REFUSAL not in environ and "HTTP_UPGRADE" not in environ


@pytest.mark.parametrize("line", ["HEAD health HTTP/1.1", "HEAD / HTTP/9.9", "post / HTTP/1.1"])
def test_a_refusal_knows_the_method(client, line, caplog):
    """An answer to HEAD has no body; and Flask would take post for POST."""

    def app(environ, start):
        start("400 BAD REQUEST", [("Content-Length", "4")])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else b"body"]

    answer(client, line.encode() + b"\r\nHost: a\r\n\r\n", app)
    assert REFUSAL in client.server.asked[0]
    assert client.transport.data.startswith(b"HTTP/1.1 400") and not caplog.records
    assert b"\r\nConnection: close\r\n" in client.transport.data


def test_an_answer_that_contradicts_its_head_ends_the_connection(client, caplog):
    answer(client, REQUEST, lambda _, start: start("200 OK", [("Content-Length", "9")]) or [b"x"])
    assert client.transport.is_aborted and "an answer failed" in caplog.text


def test_whoever_answers_is_told_that_the_client_leaves(client):
    """Also where it had left before; and not of the next client's, once the answer is out."""
    left = []
    client.data_received(REQUEST)
    client.server.asked[0][WHEN_LEFT](lambda: left.append("answered"))
    client.end(ANSWER)
    client.data_received(REQUEST)
    when_left = client.server.asked[1][WHEN_LEFT]
    when_left(lambda: left.append("while"))
    client.connection_lost(None)
    when_left(lambda: left.append("before"))
    assert left == ["while", "before"]


def test_a_connection_that_is_closed_for_room_reads_no_further(client):
    client.server.limit, client.server.victim = 20_000, client
    client.data_received(HEAD + b"\r\n" + b"x" * 200_000)
    assert len(client.body) < 50_000 and client.server.asked == []


def test_an_environ_is_what_pep_3333_has():
    def parsed(*lines):
        parser = h11.Connection(h11.SERVER)
        parser.receive_data("\r\n".join([*lines, "", ""]).encode())
        return environ_of(parser.next_event())

    environ = parsed("GET /a%20b/%C3%A9?q=%20 HTTP/1.1", "Host: h:5", "X-A: 1", "X-A: 2", "X_A: 3")
    assert environ["PATH_INFO"].encode("latin-1").decode() == "/a b/é"
    assert environ["QUERY_STRING"] == "q=%20" and environ["HTTP_HOST"] == "h:5"
    assert environ["HTTP_X_A"] == "1,2"  # one with "_" would be taken for it
    assert environ["SERVER_PROTOCOL"] == "HTTP/1.1"
    assert parsed("GET http://o?x HTTP/1.1", "Host: h")["PATH_INFO"] == "/"
    assert parsed("OPTIONS * HTTP/1.1", "Host: h")["PATH_INFO"] == "*"
