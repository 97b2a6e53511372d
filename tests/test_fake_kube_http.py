"""The HTTP door of the fake API server: bytes on a socket, and what the official client makes of them.

Real sockets on loopback and real time. What kubectl shows is in test_fake_kube_kubectl.py.
"""

import contextlib
import http.client
import json
import select
import socket
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from tests import door_rig
from tests.door_rig import PODS, WEB, pod, reached, running
from vkcocoon_kube import ApiError
from vkcocoon_probes import Deadline, SystemClock

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"

pytestmark = pytest.mark.process
kube, door = door_rig.kube, door_rig.door  # fixtures


def eventually(predicate):
    """For what no request tells of: ask until it is so."""
    clock = SystemClock()
    deadline = Deadline(clock, 10)
    while not predicate() and not deadline.expired:
        clock.sleep(0.01)
    return predicate()


class Wire:
    """Raw HTTP over one kept connection."""

    def __init__(self, door):
        self.connection = http.client.HTTPConnection(*door.address, timeout=10)

    def __call__(self, method, path, body=None, **headers):
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        answer = self.connection.getresponse()
        raw = answer.read()
        return answer.status, json.loads(raw) if answer.headers["Content-Type"] == "application/json" else raw


@pytest.fixture
def wire(door):
    wire = Wire(door)
    yield wire
    wire.connection.close()


@contextlib.contextmanager
def watching(door, query, accept="application/json"):
    """A file over the bytes of a watch, headers read."""
    with socket.create_connection(door.address, timeout=10) as raw:
        raw.sendall(f"GET {query} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n".encode())
        with raw.makefile("rb") as lines:
            head = b"".join(iter(lines.readline, b"\r\n"))
            yield head, lines


def chunk(lines):
    size = int(lines.readline(), 16)
    data = lines.read(size)
    assert lines.readline() == b"\r\n"
    return data


def event(lines):
    return json.loads(chunk(lines))


# Raw HTTP: bodies, codes, media types --------------------------------------------------------------------------------


def test_an_object_makes_its_way_through_all_verbs(wire):
    status, made = wire("POST", PODS, pod())
    assert (status, made["status"]["phase"]) == (201, "Pending")
    assert wire("GET", WEB) == (200, made)
    status, page = wire("GET", PODS)
    assert (status, page["kind"], page["items"]) == (200, "PodList", [made])
    status, patched = wire(
        "PATCH", WEB, {"metadata": {"labels": {"a": "b"}}}, Content_Type="application/merge-patch+json"
    )
    assert (status, patched["metadata"]["labels"]) == (200, {"a": "b"})
    assert wire("PUT", WEB, patched) == (200, patched)
    status, marked = wire("DELETE", WEB, {"gracePeriodSeconds": 5})
    assert (status, marked["metadata"]["deletionGracePeriodSeconds"]) == (200, 5)
    assert wire("DELETE", f"{WEB}?gracePeriodSeconds=0")[0] == 200
    status, gone = wire("GET", WEB)
    assert (status, gone) == (
        404,
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": 'pods "web-0" not found',
            "reason": "NotFound",
            "details": {"name": "web-0", "kind": "pods"},
            "code": 404,
        },
    )


@pytest.mark.parametrize(
    ("content_type", "body", "label"),
    [
        ("application/strategic-merge-patch+json", {"metadata": {"labels": {"x": "1"}}}, "1"),
        ("application/merge-patch+json; charset=utf-8", {"metadata": {"labels": {"x": "2"}}}, "2"),
        ("application/json-patch+json", [{"op": "add", "path": "/metadata/labels", "value": {"x": "3"}}], "3"),
        ("application/apply-patch+yaml", b"metadata: {name: web-0, labels: {x: '4'}}", "4"),
    ],
)
def test_every_patch_type_is_known_by_its_media_type(wire, content_type, body, label):
    wire("POST", PODS, pod())
    status, patched = wire("PATCH", WEB, body, Content_Type=content_type)
    assert (status, patched["metadata"]["labels"]) == (200, {"x": label})


def test_an_apply_creates_what_is_not_there(wire):
    body = yaml.safe_dump(pod()).encode()
    status, made = wire("PATCH", f"{WEB}?fieldManager=me", body, Content_Type="application/apply-patch+yaml")
    assert (status, made["metadata"]["name"]) == (201, "web-0")


@pytest.mark.parametrize(
    ("method", "path", "body", "content_type", "expected"),
    [
        ("PATCH", WEB, {}, "application/json", (415, "UnsupportedMediaType")),
        ("PATCH", WEB, b"{", "application/merge-patch+json", (400, "BadRequest")),
        ("PATCH", WEB, [], "application/merge-patch+json", (400, "BadRequest")),
        ("POST", PODS, b"\xff", "application/json", (400, "BadRequest")),
        ("POST", PODS, [], "application/json", (400, "BadRequest")),
        ("POST", PODS, b"k8s\0", "application/vnd.kubernetes.protobuf", (415, "UnsupportedMediaType")),
        ("POST", WEB, {}, "application/json", (405, "MethodNotAllowed")),
        ("BREW", PODS, None, "", (405, "MethodNotAllowed")),
        ("GET", f"{PODS}?limit=many", None, "", (400, "BadRequest")),
        ("GET", f"{PODS}?resourceVersion=999999", None, "", (504, "Timeout")),
        ("GET", f"{PODS}?watch=1&sendInitialEvents=true", None, "", (422, "Invalid")),
        ("GET", f"{WEB}/exec", None, "", (501, "NotImplemented")),
        ("GET", f"{WEB}/log?container=other", None, "", (400, "BadRequest")),
        ("GET", f"{PODS}/nobody/log", None, "", (404, "NotFound")),
        ("GET", "/nope", None, "", (404, "NotFound")),
        ("POST", PODS, b"x" * (3 * 1024 * 1024 + 1), "application/json", (413, "RequestEntityTooLarge")),
    ],
)
def test_what_cannot_be_is_refused_with_a_status_object(wire, method, path, body, content_type, expected):
    wire("POST", PODS, pod())
    status, answer = wire(method, path, body, Content_Type=content_type)
    assert (status, answer["reason"]) == expected
    assert (answer["kind"], answer["status"], answer["code"]) == ("Status", "Failure", status)


def test_unknown_fields_are_named_in_a_warning_or_refused(door, kube):
    body = {**pod(), "spec": {**pod()["spec"], "nodename": "n1"}}
    connection = http.client.HTTPConnection(*door.address, timeout=10)
    connection.request("POST", PODS, json.dumps(body))
    answer = connection.getresponse()
    answer.read()
    assert (answer.status, answer.headers["Warning"]) == (201, '299 - "unknown field \\"spec.nodename\\""')
    connection.request("POST", f"{PODS}?fieldValidation=Strict", json.dumps(body))
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["message"].endswith('strict decoding error: unknown field "spec.nodename"')
    connection.close()


def test_a_dry_run_changes_nothing(wire, kube):
    assert wire("POST", f"{PODS}?dryRun=All", pod())[0] == 201
    assert wire("GET", WEB)[0] == 404
    wire("POST", PODS, pod())
    before = kube.store.revision
    merge = {"Content_Type": "application/merge-patch+json"}
    status, patched = wire("PATCH", f"{WEB}?dryRun=All", {"metadata": {"labels": {"a": "b"}}}, **merge)
    assert (status, patched["metadata"]["labels"]) == (200, {"a": "b"})
    assert wire("DELETE", f"{WEB}?dryRun=All")[0] == 200
    assert kube.store.revision == before


def test_a_deletion_can_depend_on_the_version(wire):
    made = wire("POST", PODS, pod())[1]["metadata"]["resourceVersion"]
    status, answer = wire("DELETE", WEB, {"preconditions": {"resourceVersion": "1"}, "gracePeriodSeconds": 0})
    assert (status, answer["reason"]) == (409, "Conflict")
    assert wire("DELETE", WEB, {"preconditions": {"resourceVersion": made}, "gracePeriodSeconds": 0})[0] == 200


def test_a_collection_can_be_deleted_by_selector(wire):
    for name in "abc":
        wire("POST", PODS, pod(name, labels={"app": "x" if name < "c" else "y"}))
    assert wire("DELETE", f"{PODS}?labelSelector=app%3Dx&gracePeriodSeconds=0")[0] == 200
    assert [item["metadata"]["name"] for item in wire("GET", PODS)[1]["items"]] == ["c"]


def test_a_put_that_creates_says_so(wire):
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1"
    status, made = wire("PUT", path, {"metadata": {"name": "n1"}, "spec": {"holderIdentity": "n1"}})
    assert status == 201
    assert wire("PUT", path, made)[0] == 200


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz"])
def test_health_is_plain_text(wire, path):
    assert wire("GET", path) == (200, b"ok")


def test_discovery_names_every_resource_and_its_parts(wire):
    assert wire("GET", "/version")[1]["gitVersion"].startswith("v1.")
    assert wire("GET", "/api")[1]["versions"] == ["v1"]
    groups = [group["name"] for group in wire("GET", "/apis")[1]["groups"]]
    assert groups == ["authentication.k8s.io", "authorization.k8s.io", "coordination.k8s.io"]
    entries = {entry["name"]: entry for entry in wire("GET", "/api/v1")[1]["resources"]}
    assert entries["pods"]["shortNames"] == ["po"]
    assert entries["pods"]["singularName"] == "pod"
    eviction = entries["pods/eviction"]
    assert (eviction["kind"], eviction["group"], eviction["version"]) == ("Eviction", "policy", "v1")
    for group in groups:
        assert wire("GET", f"/apis/{group}")[1]["kind"] == "APIGroup"
        assert wire("GET", f"/apis/{group}/v1")[1]["resources"]


def test_the_openapi_document_refers_only_to_what_it_defines(wire):
    for entry in wire("GET", "/openapi/v3")[1]["paths"].values():
        status, document = wire("GET", entry["serverRelativeURL"])
        text = json.dumps(document)
        defined = document["components"]["schemas"]
        references = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert (status, document["openapi"]) == (200, "3.0.0")
        assert references <= defined.keys()


# Raw HTTP: watches ---------------------------------------------------------------------------------------------------


def test_a_watch_answers_at_once_and_sends_one_line_per_event(door, kube):
    with watching(door, f"{PODS}?watch=true") as (head, lines):
        # The headers are here though nothing has happened yet.
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"Content-Type: application/json" in head
        kube.create(PODS, pod("a"))
        first = chunk(lines)
        kube.create(PODS, pod("b"))
        second = chunk(lines)
    assert first.endswith(b"}\n")
    assert first.count(b"\n") == second.count(b"\n") == 1
    assert [json.loads(line)["object"]["metadata"]["name"] for line in (first, second)] == ["a", "b"]


def test_a_watch_ends_cleanly_at_its_time_with_a_bookmark_for_those_who_asked(door):
    with watching(door, f"{PODS}?watch=1&timeoutSeconds=1&allowWatchBookmarks=true") as (_, lines):
        assert event(lines)["type"] == "BOOKMARK"
        assert lines.readline() == b"0\r\n"
    with watching(door, f"{PODS}?watch=1&timeoutSeconds=1") as (_, lines):
        assert lines.readline() == b"0\r\n"


def test_a_watch_too_late_is_told_in_a_line_or_by_code(door, kube, wire):
    kube.create(PODS, pod())
    kube.expire_history()
    with watching(door, f"{PODS}?watch=true&resourceVersion=5") as (head, lines):
        assert head.startswith(b"HTTP/1.1 200")
        told = event(lines)
        assert (told["type"], told["object"]["code"], lines.readline()) == ("ERROR", 410, b"0\r\n")
    kube.gone = "http"
    status, answer = wire("GET", f"{PODS}?watch=true&resourceVersion=5")
    assert (status, answer["reason"]) == (410, "Expired")


def test_a_cut_in_the_middle_of_a_line_is_one(door, kube):
    with watching(door, f"{PODS}?watch=true") as (_, lines):
        kube.create(PODS, pod())
        event(lines)
        kube.cut_watches(mid_line=True)
        torn = chunk(lines)
        with pytest.raises(ValueError, match="Expecting value"):
            json.loads(torn)
        assert lines.read() == b""  # No last chunk: whoever counts knows that something is missing.


def test_lines_can_arrive_in_pieces_that_split_characters(door, kube):
    door.chunk_bytes = 999  # The text is ten bytes long, again and again.
    text = "名前🦋" * 3000
    with watching(door, f"{PODS}?watch=true") as (_, lines):
        kube.create(PODS, pod(annotations={"name": text}))
        pieces = [chunk(lines)]
        while not pieces[-1].endswith(b"\n"):
            pieces.append(chunk(lines))
    assert {len(piece) for piece in pieces[:-1]} == {999}
    split = 0
    for piece in pieces:
        try:
            piece.decode()
        except UnicodeDecodeError:
            split += 1
    assert split > 1
    assert json.loads(b"".join(pieces))["object"]["metadata"]["annotations"]["name"] == text


def test_nobody_reads_on_for_a_client_that_hung_up(door, kube):
    with watching(door, f"{PODS}?watch=true"):
        assert kube.open_watches == 1
    assert eventually(lambda: not kube.open_watches)


def test_nor_for_a_client_that_hung_up_on_silence(door, kube):
    with watching(door, f"{PODS}?watch=true"):
        kube.hang("WATCH *")
    assert eventually(lambda: not kube.open_watches)


def test_a_closed_door_breaks_watches_and_refuses(door, kube):
    with watching(door, f"{PODS}?watch=true") as (_, lines):
        door.close()
        assert lines.read() == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(door.address, timeout=5)


# Raw HTTP: faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 409, 410, 422, 429, 500, 503])
def test_faults_reach_the_wire_with_their_words(wire, kube, status):
    kube.fail("LIST */pods", ApiError(status, "SomeReason", "some message", retry_after=7.0))
    code, answer = wire("GET", PODS)
    assert (code, answer["reason"], answer["message"]) == (status, "SomeReason", "some message")
    assert answer["details"] == {"retryAfterSeconds": 7}
    assert wire("GET", PODS)[0] == 200


def test_no_answer_is_no_answer(door, kube):
    kube.down = True
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        Wire(door)("GET", PODS)
    kube.down = False
    kube.fail("POST *", ApiError(0, "ConnectionReset"), stored=True)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        Wire(door)("POST", PODS, pod())
    assert Wire(door)("POST", PODS, pod())[0] == 409


def test_a_held_request_stays_open_and_silent(door, kube):
    hold = kube.hang("LIST */pods")
    with socket.create_connection(door.address, timeout=10) as raw, raw.makefile("rb") as lines:
        raw.sendall(f"GET {PODS} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert reached(hold)
        assert select.select([raw], [], [], 0.1)[0] == []
        hold.release()
        assert lines.readline() == b"HTTP/1.1 200 OK\r\n"


# Tables over the wire ----------------------------------------------------------------------------------------------


def test_a_table_has_rows_for_people_and_metadata_for_kubectl(wire, kube):
    kube.create(PODS, pod())
    kube.patch(f"{WEB}/status", {"status": running()}, kind="strategic")
    status, page = wire("GET", PODS, Accept=TABLE)
    (row,) = page["rows"]
    assert (status, page["kind"], page["metadata"]["resourceVersion"]) == (200, "Table", "6")
    assert [column["name"] for column in page["columnDefinitions"] if not column["priority"]] == [
        "Name",
        "Ready",
        "Status",
        "Restarts",
        "Age",
    ]
    assert row["cells"][:4] == ["web-0", "1/1", "Running", "0"]
    assert row["cells"][5:] == ["10.88.0.5", "n1", "<none>", "<none>"]
    assert (row["object"]["kind"], row["object"]["metadata"]["name"]) == ("PartialObjectMetadata", "web-0")
    assert wire("GET", f"{WEB}?includeObject=Object", Accept=TABLE)[1]["rows"][0]["object"]["kind"] == "Pod"
    assert wire("GET", f"{WEB}?includeObject=None", Accept=TABLE)[1]["rows"][0]["object"] is None


def test_a_watch_of_a_table_has_one_row_per_event(door, kube):
    with watching(door, f"{PODS}?watch=true&timeoutSeconds=1&allowWatchBookmarks=true", TABLE) as (_, lines):
        kube.create(PODS, pod())
        first, bookmark = event(lines), event(lines)
    assert (first["type"], first["object"]["kind"], len(first["object"]["rows"])) == ("ADDED", "Table", 1)
    assert (bookmark["type"], bookmark["object"]["rows"]) == ("BOOKMARK", [])
    assert bookmark["object"]["metadata"]["resourceVersion"] == "5"


# The official client -------------------------------------------------------------------------------------------------


@pytest.fixture
def core(door, tmp_path):
    from kubernetes import client, config

    path = tmp_path / "config"
    path.write_text(door.kubeconfig())
    return client.CoreV1Api(config.new_client_from_config(str(path)))


def test_the_client_reads_what_it_wrote(core):
    from kubernetes import client

    container = client.V1Container(name="agent", image="acme/vm")
    spec = client.V1PodSpec(containers=[container], node_name="n1")
    core.create_namespaced_pod("default", client.V1Pod(metadata=client.V1ObjectMeta(name="web-0"), spec=spec))
    core.patch_namespaced_pod_status("web-0", "default", {"status": running()})
    seen = core.read_namespaced_pod("web-0", "default")
    assert (seen.status.phase, seen.status.pod_ip, seen.status.conditions[0].type) == ("Running", "10.88.0.5", "Ready")
    assert datetime.now(UTC) - seen.metadata.creation_timestamp < timedelta(minutes=1)  # noqa: TID251  real time
    assert [item.metadata.name for item in core.list_pod_for_all_namespaces(limit=1).items] == ["web-0"]


def test_the_client_sends_times_that_are_understood(core, kube):
    from kubernetes import client

    kube.create(PODS, pod())
    moment = datetime(2026, 1, 1, 12, 0, 0, 250000, tzinfo=UTC)
    core.patch_namespaced_pod_status("web-0", "default", client.V1Pod(status=client.V1PodStatus(start_time=moment)))
    assert kube.get(WEB)["status"]["startTime"] == "2026-01-01T12:00:00Z"


def test_the_client_deletes_with_grace_and_precondition(core, kube):
    from kubernetes import client

    uid = kube.create(PODS, pod())["metadata"]["uid"]
    other = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="other"))
    with pytest.raises(client.ApiException) as caught:
        core.delete_namespaced_pod("web-0", "default", body=other)
    assert (caught.value.status, caught.value.reason) == (409, "Conflict")
    ours = client.V1DeleteOptions(grace_period_seconds=3, preconditions=client.V1Preconditions(uid=uid))
    core.delete_namespaced_pod("web-0", "default", body=ours)
    assert kube.get(WEB)["metadata"]["deletionGracePeriodSeconds"] == 3
    core.delete_namespaced_pod("web-0", "default", grace_period_seconds=0)
    with pytest.raises(client.ApiException):
        core.read_namespaced_pod("web-0", "default")


def test_the_clients_watch_follows(core, kube):
    from kubernetes import watch

    kube.create(PODS, pod())
    seen = []
    for item in watch.Watch().stream(core.list_namespaced_pod, "default", timeout_seconds=5):
        seen.append((item["type"], item["object"].metadata.name))
        if item["type"] == "ADDED":
            kube.delete(WEB)
        elif item["type"] == "MODIFIED":
            if item["object"].metadata.deletion_grace_period_seconds:
                kube.delete(WEB, grace_seconds=0)
        else:
            break
    assert [type_ for type_, _ in seen] == ["ADDED", "MODIFIED", "MODIFIED", "DELETED"]
    assert {name for _, name in seen} == {"web-0"}


def test_the_client_reports_expiry(core, kube):
    from kubernetes import client, watch

    kube.create(PODS, pod())
    kube.expire_history()
    stream = watch.Watch().stream(core.list_namespaced_pod, "default", resource_version="5", timeout_seconds=5)
    with pytest.raises(client.ApiException) as caught:
        next(stream)
    assert caught.value.status == 410
