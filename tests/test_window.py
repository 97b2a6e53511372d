"""Where root and browsers look in: the status socket, the page's doors, and what a client is told (D4)."""

import json
import os
import socket
import stat

import gevent
import gevent.pool
import pytest

from vkcocoon_probes import SystemClock, spawn
from vkcocoon_server import CannotListen
from vkcocoon_window import NoAnswer, StatusPage, StatusSocket, ask

DOCUMENT = {
    "node": "n1",
    "version": "0",
    "now": "2026-01-01T00:00:00Z",
    "uptime_seconds": 1.0,
    "healthy": True,
    "ready": True,
    "pinger_degraded": False,
    "checks": [],
    "pods": [],
}
POD = {
    **dict.fromkeys(("namespace", "name", "uid", "os", "vm", "ip", "probe", "lifecycle", "reason", "message"), "x"),
    **dict.fromkeys(("ready", "published"), True),
    **{"restarts": 0, "since": None, "last_probe": None},
}


@pytest.fixture
def opened():
    """Starts windows and closes them again."""
    windows = []

    def start(window):
        window.start()
        windows.append(window)
        return window

    yield start
    for window in windows:
        window.close()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run" / "status.sock")


def sock(path, document=lambda: DOCUMENT):
    return StatusSocket(path, document, clock=SystemClock())


def page(document=lambda: DOCUMENT, addr=("127.0.0.1", 0)):
    return StatusPage(addr, document, clock=SystemClock())


def get(window, target, *, method="GET", host="127.0.0.1"):
    """Status, headers and body of one answer."""
    with socket.create_connection(window.address, timeout=10) as connection:
        connection.sendall(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


class TestSocket:
    def test_whoever_may_open_it_gets_the_document(self, opened, path):
        opened(sock(path))
        assert ask(path) == DOCUMENT

    def test_only_its_owner_may_open_it(self, opened, path):
        opened(sock(path))
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700

    @pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")
    def test_somebody_else_is_told_whom_it_is_for(self, opened, tmp_path, path):
        opened(sock(path))
        os.chmod(os.path.dirname(path), 0o755)
        for folder in tmp_path, *tmp_path.parents[:2]:
            os.chmod(folder, 0o755)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            try:
                ask(path)
            except NoAnswer as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        assert os.read(reader, 1000).decode() == f"{path} is for root only; run this as root"
        os.close(reader)

    def test_what_a_dead_daemon_left_behind_is_replaced(self, opened, path):
        os.makedirs(os.path.dirname(path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(path)
        opened(sock(path))
        assert ask(path) == DOCUMENT

    def test_a_living_daemon_keeps_its_socket(self, opened, path):
        opened(sock(path))
        with pytest.raises(CannotListen, match="another vk-cocoon answers there"):
            sock(path, lambda: {}).start()
        assert ask(path) == DOCUMENT

    def test_a_file_that_is_no_socket_is_left_alone(self, path):
        os.makedirs(os.path.dirname(path))
        with open(path, "w") as file:
            file.write("precious")
        with pytest.raises(CannotListen, match="there is a file that is no socket"):
            sock(path).start()
        with open(path) as file:
            assert file.read() == "precious"

    def test_a_directory_that_cannot_be_made_is_one_clear_line(self, tmp_path):
        (tmp_path / "file").write_text("")
        path = str(tmp_path / "file" / "run" / "status.sock")
        with pytest.raises(CannotListen) as caught:
            sock(path).start()
        assert str(caught.value) == f"VK_STATUS_SOCKET: cannot listen on {path}: Not a directory"

    def test_only_the_last_directory_is_made_so_that_a_mistyped_path_leaves_nothing(self, tmp_path):
        with pytest.raises(CannotListen, match=r"VK_STATUS_SOCKET: .*: No such file or directory"):
            sock(str(tmp_path / "rnu" / "vk-cocoon" / "status.sock")).start()
        assert not (tmp_path / "rnu").exists()

    def test_closing_takes_its_file_away_but_not_its_successors(self, opened, path):
        first = opened(sock(path))
        os.unlink(path)
        opened(sock(path, lambda: DOCUMENT | {"node": "second"}))
        first.close()
        assert ask(path)["node"] == "second"

    def test_after_closing_nothing_is_left(self, opened, path):
        opened(sock(path)).close()
        assert not os.path.exists(path)

    def test_a_document_that_cannot_be_made_costs_one_answer(self, opened, path):
        documents = iter([ValueError("broken"), DOCUMENT])

        def document():
            found = next(documents)
            if isinstance(found, Exception):
                raise found
            return found

        opened(sock(path, document))
        with pytest.raises(NoAnswer, match="answers 500"):
            ask(path)
        assert ask(path) == DOCUMENT


def ok(body):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def changed(**parts):
    return json.dumps(DOCUMENT | parts).encode()


class TestAsk:
    def test_nobody_there_is_one_line_that_says_where_to_look(self, path):
        with pytest.raises(NoAnswer, match=r"vk-cocoon does not run here: nobody answers at .*; see systemctl status"):
            ask(path)

    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            (b"", "does not answer"),
            (ok(b"odd"), "answers something else: Expecting value"),
            (ok(b"[" * 100_000), "answers something else: maximum recursion depth exceeded"),
            (ok(b"\xff\xfe"), "answers something else"),
            (ok(b"[]"), "answers something else: the document is list and no dict; it is another version"),
            (ok(b"{}"), "node is missing; it is another version; if it is vk-cocoon, systemctl restart vk-cocoon"),
            (ok(changed(pods=None)), "pods is NoneType and no list; it is version"),
            (ok(changed(pods=[{"namespace": "default"}])), r"pods\[0\].name is missing"),
            (ok(changed(pods=[POD | {"last_probe": {}}])), r"pods\[0\].last_probe.took_seconds is missing"),
            (ok(changed(pods=[POD | {"ip": None}])), r"pods\[0\].ip is NoneType"),
            (ok(changed(checks=[{"name": "hub"}])), r"checks\[0\].trouble is missing"),
            (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answers 404 Not Found"),
            (None, "does not answer: timed out"),
        ],
    )
    def test_a_daemon_that_answers_oddly_or_not_at_all_is_told(self, tmp_path, answer, why):
        path = str(tmp_path / "s")
        group = gevent.pool.Group()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)

        def serve():
            connection, _ = listener.accept()
            connection.recv(1000)
            if answer is None:
                connection.recv(1000)  # until the client gives up
            else:
                connection.sendall(answer)
            connection.close()

        spawn(group, "odd daemon", serve)
        with pytest.raises(NoAnswer, match=why):
            ask(path, limit=0.3)
        group.join()
        listener.close()


class TestPage:
    def test_it_is_html_that_loads_nothing_and_lets_nobody_frame_it(self, opened):
        status, headers, body = get(opened(page()), "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert headers["Cache-Control"] == "no-store"
        assert body.startswith("<!doctype html>")

    def test_the_same_as_data(self, opened):
        status, headers, body = get(opened(page()), "/status.json")
        assert (status, headers["Content-Type"], json.loads(body)) == (200, "application/json", DOCUMENT)

    def test_head_has_no_body_and_writing_is_refused(self, opened):
        window = opened(page())
        status, headers, body = get(window, "/", method="HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 0
        assert get(window, "/", method="POST")[0] == 405

    def test_another_path_is_told_what_there_is(self, opened):
        assert get(opened(page()), "/metrics")[::2] == (404, "try / or /status.json\n")

    @pytest.mark.parametrize("host", ["127.0.0.1:9092", "localhost:9092", "localhost", "127.3.2.1", "[::1]:9092"])
    def test_a_page_on_loopback_is_reached_by_loopback_names(self, opened, host):
        assert get(opened(page()), "/", host=host)[0] == 200

    @pytest.mark.parametrize("host", ["attacker.example:9092", "10.0.0.1", "127.evil.example"])
    def test_a_page_on_loopback_is_not_reached_by_a_name_that_somebody_pointed_here(self, opened, host):
        assert get(opened(page()), "/status.json", host=host)[0] == 403

    def test_one_that_is_served_to_others_on_purpose_has_any_name(self, opened):
        window = opened(page(addr=("", 0)))
        window.address = ("127.0.0.1", window.address[1])
        assert get(window, "/", host="host7.example")[0] == 200

    def test_a_port_that_is_taken_is_one_clear_line(self, opened):
        window = opened(page())
        taken = (
            f"VK_STATUS_ADDR: cannot listen on 127.0.0.1:{window.address[1]}: Address already in use; who has it: ss "
        )
        with pytest.raises(CannotListen, match=taken):
            page(addr=window.address).start()
