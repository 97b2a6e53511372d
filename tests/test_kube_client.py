"""The real client against a real socket: every failure of an API is an ApiError, and nothing is lost or repeated.

Field cases 70-74, 77, 78 and 80. Everything is on loopback; the waits are real and short. Where the fake API is too
well behaved, a few bytes written by hand stand in for it.
"""

import json

import gevent
import gevent.queue
import pytest
import yaml
from gevent.event import Event
from gevent.server import StreamServer
from kube_rig import path_of, pod

from simulator.fake_kube import FakeKube
from vkcocoon_kube import ApiError, HttpKubeApi, KubeconfigError, Reflector
from vkcocoon_probes import SystemClock

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def kube():
    return FakeKube(SystemClock())


@pytest.fixture
def door(kube):
    door = kube.serve(("127.0.0.1", 0))
    yield door
    door.close()


@pytest.fixture
def api(door, tmp_path):
    (tmp_path / "config").write_text(door.kubeconfig())
    api = HttpKubeApi(str(tmp_path / "config"), read_s=0.5, call_s=1.0)
    yield api
    api.close()


class Line:
    """A server that answers each request with the next of the given byte strings, or by a function of the socket."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.connections = 0
        self._server = StreamServer(("127.0.0.1", 0), self._serve)
        self._server.start()

    def kubeconfig(self, directory, **user):
        url = f"http://127.0.0.1:{self._server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{"name": "x", "cluster": {"server": url}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "users": [{"name": "x", "user": user}],
        }
        (directory / "config").write_text(yaml.safe_dump(config))
        return str(directory / "config")

    def _serve(self, connection, _address):
        self.connections += 1
        while True:
            request = b""
            while b"\r\n\r\n" not in request:
                more = connection.recv(65536)
                if not more or more.startswith(b"\x16\x03"):  # the first bytes of a TLS handshake
                    connection.sendall(b"what?")
                    return
                request += more
            self.requests.append(request.decode())
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if callable(answer):
                answer(connection)
                return
            connection.sendall(answer)

    def close(self):
        self._server.stop(timeout=0)


def http(body, status="200 OK", **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@pytest.fixture
def line(tmp_path):
    """Make a hand-written server and a client of it."""
    made = []

    def make(*answers, **user):
        server = Line(*answers)
        client = HttpKubeApi(server.kubeconfig(tmp_path, **user), read_s=0.3, call_s=0.6)
        made.extend((server, client))
        return server, client

    yield make
    for thing in made:
        thing.close()


def failure(call, *args, **kwargs):
    with pytest.raises(ApiError) as caught:
        call(*args, **kwargs)
    return caught.value


# --- the ordinary course ------------------------------------------------------------------------------------------


def test_objects_come_and_go_as_they_are(api):
    made = api.create(PODS, pod())
    assert api.get(path_of())["metadata"]["uid"] == made["metadata"]["uid"]
    listed = api.list("/api/v1/pods", field_selector="spec.nodeName=n1", limit=5)
    assert [item["metadata"]["name"] for item in listed["items"]] == ["web-0"] and listed["metadata"]["resourceVersion"]
    left = api.delete(path_of(), uid=made["metadata"]["uid"], grace_seconds=30)
    assert left["metadata"]["deletionTimestamp"]
    api.delete(path_of(), uid=made["metadata"]["uid"], grace_seconds=0)
    assert failure(api.get, path_of()).status == 404


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("strategic", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
        ("merge", {"metadata": {"annotations": {"a": "b", "vm.cocoonstack.io/name": None}}}),
        ("json", [{"op": "add", "path": "/metadata/labels", "value": {"a": "b"}}]),
    ],
)
def test_each_kind_of_patch_arrives_as_what_it_is(api, kube, kind, body):
    api.create(PODS, pod())
    path = path_of() + ("/status" if kind == "strategic" else "")
    api.patch(path, body, kind=kind)
    sent = kube.requests[-1]
    assert sent.options["kind"] == kind and sent.body == body


def test_null_in_a_patch_removes_a_key(api):
    api.create(PODS, pod())
    api.patch(path_of(), {"metadata": {"annotations": {"vm.cocoonstack.io/name": None, "x": "y"}}}, kind="merge")
    assert api.get(path_of())["metadata"]["annotations"] == {"x": "y"}


def test_a_replacement_with_an_old_version_is_a_conflict(api):
    first = api.create(PODS, pod())
    api.patch(path_of(), {"metadata": {"labels": {"a": "b"}}}, kind="merge")
    assert failure(api.replace, path_of(), first).status == 409


def test_a_deletion_of_another_uid_is_a_conflict(api):
    api.create(PODS, pod())
    assert failure(api.delete, path_of(), uid="somebody-else", grace_seconds=0).status == 409


def test_fields_that_no_library_knows_survive(line):
    odd = {"kind": "Pod", "status": {"fromTheFuture": {"x": [1, None, "é"]}}}
    _, api = line(http(odd))
    assert api.get(path_of()) == odd


def test_forty_requests_at_once_use_a_pool_that_keeps_its_connections(api, kube):
    api.create(PODS, pod())
    kube.latency = 0.05
    jobs = [gevent.Greenlet(api.get, path_of()) for _ in range(32)]
    for job in jobs:
        job.start()
    gevent.joinall(jobs, raise_error=True)
    assert all(job.value["kind"] == "Pod" for job in jobs)


def test_a_separate_client_has_connections_of_its_own(line):
    server, api = line(http({}))
    api.get(path_of())
    api.get(path_of())
    other = api.separate()
    other.get(path_of())
    other.close()
    assert server.connections == 2 and len(server.requests) == 3


def test_connections_are_kept_in_a_queue_without_a_lock(api):
    """A lock could be waited for by the greenlet that holds it (urllib3#3289)."""
    pools = api._client.rest_client.pool_manager
    for url in ("http://127.0.0.1:1", "https://127.0.0.1:1"):
        assert isinstance(pools.connection_from_url(url).pool, gevent.queue.LifoQueue)


def test_every_request_says_who_asks(line):
    server, api = line(http({}))
    api.get(path_of())
    assert "user-agent: vk-cocoon" in server.requests[0].lower()


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 422, 429, 500, 503, 504])
def test_a_refusal_keeps_its_status_reason_and_message(api, kube, status):
    kube.fail(f"GET {path_of()}", ApiError(status, "SomeReason", "some message"))
    error = failure(api.get, path_of())
    assert (error.status, error.reason, error.message) == (status, "SomeReason", "some message")


@pytest.mark.parametrize(
    ("given", "understood"), [("7", 7.0), ("0", 0.0), ("", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None)]
)
def test_retry_after_is_understood_in_seconds(line, given, understood):
    _, api = line(http({"kind": "Status"}, "429 Too Many Requests", Retry_After=given))
    assert failure(api.get, path_of()).retry_after == understood


def test_the_words_of_a_proxy_are_passed_on(line):
    _, api = line(http(b"<html>upstream is away</html>", "502 Bad Gateway"))
    error = failure(api.get, path_of())
    assert error.status == 502 and "upstream is away" in error.message


def test_a_redirect_is_not_followed(line):
    server, api = line(http({}, "302 Found", Location="http://127.0.0.1:9/elsewhere"))
    assert failure(api.get, path_of()).status == 302 and len(server.requests) == 1


# --- no answer ----------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_no_answer(line):
    server, api = line(http({}))
    server.close()
    assert failure(api.get, path_of()).status == 0


def test_a_server_that_never_answers_costs_the_bound_and_no_more(line):
    _, api = line(lambda connection: Event().wait(5))
    with gevent.Timeout(2):  # noqa: TID251  the time is real here
        assert failure(api.get, path_of()).status == 0


def test_an_answer_that_drips_is_bounded_as_a_whole(line):
    def drip(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            connection.sendall(b" ")
            gevent.sleep(0.05)  # noqa: TID251  the time is real here

    _, api = line(drip)
    with gevent.Timeout(2):  # noqa: TID251  the time is real here
        error = failure(api.get, path_of())
    assert (error.status, error.reason) == (0, "Timeout")


@pytest.mark.parametrize(
    "answer",
    [
        http(b"this is no JSON"),
        http(b'["a", "list"]'),
        http(b'{"a":' * 100_000),
        http(b'{"a": "\xff"}'),
        http(b"{}" + b" " * 50)[:-40],
        b"nonsense\r\n\r\n",
        b"",
    ],
    ids=["no JSON", "no object", "deep", "no UTF-8", "cut in the body", "no HTTP", "nothing"],
)
def test_an_answer_that_cannot_be_read_is_no_answer(line, answer):
    def send_and_hang_up(connection):
        connection.sendall(answer)

    _, api = line(send_and_hang_up)
    assert failure(api.get, path_of()).status == 0


@pytest.mark.parametrize("body", [b'{"a":' * 100_000, {"details": [7]}, {"details": "later"}, [], b"\xff"])
def test_a_refusal_that_says_nothing_one_can_read_is_still_that_refusal(line, body):
    _, api = line(http(body, "429 Too Many Requests"))
    error = failure(api.get, path_of())
    assert (error.status, error.retry_after) == (429, None)


def test_a_watch_that_brings_a_line_nobody_can_read_ends(line):
    _, api = line(http(b'{"a":' * 100_000 + b"\n"))
    assert failure(next, api.watch("/api/v1/pods", resource_version="1")).status == 0


def test_a_write_whose_answer_is_lost_is_not_repeated_by_itself(line):
    server, api = line(lambda connection: None)
    assert failure(api.create, PODS, pod()).status == 0
    assert len(server.requests) == 1


def test_an_answer_that_was_given_up_does_not_become_the_answer_of_the_next_request(line):
    def late(connection):
        gevent.sleep(0.45)  # noqa: TID251  the time is real here
        connection.sendall(http({"late": True}))

    _, api = line(late, http({"late": False}))
    assert failure(api.get, path_of()).status == 0
    assert api.get(path_of()) == {"late": False}


# --- credentials --------------------------------------------------------------------------------------------------

UNAUTHORIZED = http({"kind": "Status", "reason": "Unauthorized", "message": "no"}, "401 Unauthorized")


def authorization(request):
    return next((line for line in request.splitlines() if line.lower().startswith("authorization")), "")


def test_a_token_that_was_replaced_is_read_again_when_the_api_refuses_the_old_one(line, tmp_path):
    token = tmp_path / "token"
    token.write_text("one")
    server, api = line(UNAUTHORIZED, http({}), tokenFile=str(token))
    token.write_text("two")
    assert api.get(path_of()) == {}
    assert [authorization(request).split()[-1] for request in server.requests] == ["one", "two"]


def test_credentials_that_are_refused_again_are_refused(line):
    server, api = line(UNAUTHORIZED, token="one")
    error = failure(api.get, path_of())
    assert (error.status, error.reason) == (401, "Unauthorized") and len(server.requests) == 2


def test_a_kubeconfig_that_is_gone_when_it_is_needed_again_is_a_refusal(line, tmp_path):
    _, api = line(UNAUTHORIZED, token="one")
    (tmp_path / "config").unlink()
    assert failure(api.get, path_of()).status == 401


@pytest.mark.parametrize("content", [None, "", "{", "a: [", "kind: Config\ncurrent-context: x\n"])
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path, content):
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    with pytest.raises(KubeconfigError, match=str(path)):
        HttpKubeApi(str(path))


def test_without_kubeconfig_and_service_account_there_is_a_clear_word(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubeconfigError, match="no kubeconfig"):
        HttpKubeApi()


def test_a_handshake_that_fails_is_no_answer_and_reads_the_certificates_again(line, tmp_path):
    server, api = line(http({}))
    config = (tmp_path / "config").read_text().replace("http://", "https://")
    (tmp_path / "config").write_text(config)
    secure = api.separate()
    before = secure._client
    error = failure(secure.get, path_of())
    secure.close()
    assert error.status == 0 and server.connections == 2 and secure._client is not before


# --- watching -----------------------------------------------------------------------------------------------------


def test_a_watch_brings_what_happens_and_ends_when_the_server_ends_it(api, kube):
    version = api.list("/api/v1/pods")["metadata"]["resourceVersion"]
    stream = api.watch("/api/v1/pods", resource_version=version, field_selector="spec.nodeName=n1", timeout=1.0)
    kube.admin.create(PODS, pod())
    kube.admin.delete(path_of(), grace_seconds=0)
    assert [event["type"] for event in stream] == ["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@pytest.mark.parametrize("how", ["event", "http"])
def test_a_version_that_is_too_old_is_told_in_either_way(api, kube, how):
    kube.gone = how
    kube.admin.create(PODS, pod())
    kube.admin.patch(path_of(), {"metadata": {"labels": {"a": "b"}}}, kind="merge")
    kube.expire_history()
    stream = api.watch("/api/v1/pods", resource_version="1")
    if how == "http":
        assert failure(next, stream).status == 410
    else:
        (event,) = stream
        assert event["type"] == "ERROR" and event["object"]["code"] == 410


def test_a_watch_that_is_cut_in_the_middle_of_a_line_raises(api, kube):
    kube.admin.create(PODS, pod())
    stream = api.watch("/api/v1/pods", resource_version="")
    assert next(stream)["type"] == "ADDED"
    kube.cut_watches(mid_line=True)
    assert failure(next, stream).status == 0


def chunked(*pieces, end=True):
    """A chunked answer; without its end the connection is closed in the middle."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return lambda connection: connection.sendall(head + body + (b"0\r\n\r\n" if end else b""))


def test_half_a_line_is_not_taken_for_an_event_even_if_the_server_ends_cleanly_after_it(line):
    _, api = line(chunked(b'{"type": "ADDED", "object": {}}\n{"type": "ADD'))
    stream = api.watch("/api/v1/pods", resource_version="1")
    assert next(stream) == {"type": "ADDED", "object": {}}
    assert failure(next, stream).reason == "Truncated"


def test_a_line_that_is_no_json_is_an_error_and_not_an_event(line):
    _, api = line(chunked(b"hello\n"))
    assert failure(next, api.watch("/api/v1/pods", resource_version="1")).status == 0


def test_a_refused_watch_raises_its_refusal(api, kube):
    kube.fail("WATCH *", ApiError(403, "Forbidden", "no"))
    assert failure(next, api.watch("/api/v1/pods", resource_version="1")).status == 403


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_characters_and_lines_split_across_chunks_are_put_together(api, kube, door, size):
    door.chunk_bytes = size
    text = "名前🦋" * (20 if size == 1 else 3000)
    kube.admin.create(PODS, pod(annotations={"name": text}))
    for event in api.watch("/api/v1/pods", resource_version="", timeout=1.0):
        assert event["object"]["metadata"]["annotations"]["name"] == text
        break


def test_a_watch_that_is_given_up_is_closed_at_the_server_too(api, kube):
    kube.admin.create(PODS, pod())
    stream = api.watch("/api/v1/pods", resource_version="")
    next(stream)
    stream.close()
    for _ in range(100):
        if not kube._streams:
            break
        gevent.sleep(0.01)  # noqa: TID251  the time is real here
    assert kube._streams == []


def test_a_reader_that_is_bounded_from_outside_can_be_interrupted_in_a_silent_watch(api, kube):
    clock = SystemClock()
    stream = api.watch("/api/v1/pods", resource_version="")
    with pytest.raises(Exception, match="took longer"), clock.timeout(0.1):
        next(stream)


def test_a_reflector_over_http_sees_everything(api, kube):
    seen = []
    arrived = Event()

    class Handler:
        def changed(self, obj):
            seen.append(obj["metadata"]["name"])
            arrived.set()

        def gone(self, obj):
            pass

        def listed(self):
            pass

    reflector = Reflector(api, SystemClock(), "/api/v1/pods", Handler(), field_selector="spec.nodeName=n1")
    reflector.start()
    assert reflector.synced.wait(5)
    kube.admin.create(PODS, pod())
    assert arrived.wait(5) and seen == ["web-0"]
    reflector.close()
