"""What a real API server does, step by step, kept as JSON: the fake one must do the same.

A trace is a list of requests made in one new namespace; what comes back is written down with everything that differs
from run to run replaced: UIDs and versions by their order of appearance ("uid-1", "rv-3": equal stays equal), times by
"TIME". `traces/NAME.json` holds what the real server answered. tests/e2e/test_traces.py compares it with both servers
(E2E_RECORD=1 writes it anew from the real one), tests/test_fake_kube_traces.py with the fake one, without any Go.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gevent.pool import Group

from tests.e2e.api import CLOCK, JSON, MERGE, STRATEGIC, Api
from vkcocoon_probes import spawn

DIRECTORY = Path(__file__).resolve().parent / "traces"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
QUIET_S = 1.0  # a watch is read until nothing more comes for so long

# What says nothing about the behavior that is compared.
DROPPED = {"managedFields", "creationTimestamp", "selfLink", "generateName", "observedGeneration"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
VERSION = re.compile(r"resourceVersion=\d+")
VERSIONS = re.compile(r"resource version: \d+ \(\d+\)")
UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class Tracer:
    """Makes the requests of one trace and writes down what comes back."""

    def __init__(self, api: Api, namespace: str, forget: Callable[[], None]) -> None:
        self.forget = forget
        self.api = api
        self.namespace = namespace
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.written: list[Any] = []
        self._names: dict[str, str] = {}

    def do(self, verb: str, path: str, body: Any = None, *, keep: tuple[str, ...] = (), **how: Any) -> Any:
        """One request; `keep` are the parts of the answer that are written down (dotted), all when empty."""
        answer = self.api.send(verb, path, body, **how)
        shown = answer.json
        if keep and answer.status < 300:
            shown = {part: _part(shown, part) for part in keep}
        self.note({"did": f"{verb} {self._short(path)}", "status": answer.status, "answer": shown})
        return answer.json

    def note(self, what: Any) -> None:
        self.written.append(self._plain(what))

    def watched(self, path: str, act: Callable[[], None], **query: Any) -> None:
        """Follow a collection while `act` runs; type, name and phase of each event are written down."""
        version = self.api.get(path)["metadata"]["resourceVersion"]
        events: list[Any] = []
        group = Group()

        def follow() -> None:
            for event in self.api.watch(path, resourceVersion=version, **query):
                events.append(event)

        spawn(group, "trace watch", follow)
        CLOCK.sleep(0.3)
        act()
        CLOCK.sleep(QUIET_S)
        group.kill()
        self.note({"watched": self._short(path), **query, "events": [_event(event) for event in events]})

    def _short(self, path: str) -> str:
        return path.replace(self.namespace, "NAMESPACE")

    def _plain(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self._plain(item, name) for name, item in value.items() if name not in DROPPED}
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if not isinstance(value, str):
            return value
        if key.endswith("resourceVersion"):
            return self._named("rv", value)
        # What follows a line break is Go's own picture of two structures.
        text = TIME.sub("TIME", value.partition("\n")[0].replace(self.namespace, "NAMESPACE"))
        text = VERSIONS.sub("resource version: OLD (NEW)", VERSION.sub("resourceVersion=OLD", text))
        return UID.sub(lambda found: self._named("uid", found[0]), text)

    def _named(self, kind: str, value: str) -> str:
        if value not in self._names:
            number = sum(name.startswith(kind) for name in self._names.values()) + 1
            self._names[value] = f"{kind}-{number}"
        return self._names[value]


def _part(obj: Any, path: str) -> Any:
    for step in path.split("."):
        obj = (obj or {}).get(step)
    return obj


def _event(event: Any) -> Any:
    obj = event["object"]
    if event["type"] in ("ERROR", "BOOKMARK"):
        return event
    metadata = obj["metadata"]
    return {
        "type": event["type"],
        "name": metadata["name"],
        "phase": obj.get("status", {}).get("phase"),
        "grace": metadata.get("deletionGracePeriodSeconds"),
    }


def pod(name: str, node: str | None = "trace-node", **spec: Any) -> dict[str, Any]:
    bound = {"nodeName": node} if node else {"schedulerName": "nobody"}
    containers = [{"name": "agent", "image": "registry.example/placeholder:1"}]
    return {
        "metadata": {"name": name},
        "spec": {**bound, "automountServiceAccountToken": False, "containers": containers, **spec},
    }


GRACE = ("metadata.uid", "metadata.deletionGracePeriodSeconds", "metadata.deletionTimestamp", "metadata.finalizers")


# The traces -------------------------------------------------------------------------------------------------------


def graceful_delete(trace: Tracer) -> None:
    """A bound pod: a graceful delete marks, a longer one is not heard, a shorter one is, grace 0 removes."""
    path = f"{trace.pods}/web"

    def act() -> None:
        made = trace.do("POST", trace.pods, pod("web"), keep=("metadata.uid", "status.phase"))
        trace.do("DELETE", path, {"gracePeriodSeconds": 30}, keep=GRACE)
        trace.do("DELETE", path, {"gracePeriodSeconds": 60}, keep=GRACE)
        trace.do("DELETE", path, keep=GRACE)
        trace.do("DELETE", path, {"gracePeriodSeconds": 5}, keep=GRACE)
        trace.do("DELETE", path, {"preconditions": {"uid": "not-this-one"}, "gracePeriodSeconds": 0})
        trace.do(
            "DELETE", path, {"preconditions": {"uid": made["metadata"]["uid"]}, "gracePeriodSeconds": 0}, keep=GRACE
        )
        trace.do("GET", path)
        trace.do("DELETE", path, {"gracePeriodSeconds": 0})

    trace.watched(trace.pods, act)


def delete_at_once(trace: Tracer) -> None:
    """A pod that is bound to no node, or has ended, is gone with its first delete, whatever its grace."""

    def act() -> None:
        trace.do("POST", trace.pods, pod("unbound", node=None), keep=("metadata.name",))
        trace.do("DELETE", f"{trace.pods}/unbound", keep=GRACE)
        trace.do("POST", trace.pods, pod("ended"), keep=("metadata.name",))
        trace.do(
            "PATCH",
            f"{trace.pods}/ended/status",
            {"status": {"phase": "Succeeded"}},
            content_type=MERGE,
            keep=("status.phase",),
        )
        trace.do("DELETE", f"{trace.pods}/ended", keep=GRACE)

    trace.watched(trace.pods, act)


def finalizer(trace: Tracer) -> None:
    """A finalizer keeps the object after grace 0; with the last one it goes."""
    path = f"{trace.pods}/kept"
    wish = pod("kept")
    wish["metadata"]["finalizers"] = ["example.com/keep"]

    def act() -> None:
        trace.do("POST", trace.pods, wish, keep=("metadata.finalizers",))
        trace.do("DELETE", path, {"gracePeriodSeconds": 0}, keep=GRACE)
        trace.do("PATCH", path, {"metadata": {"finalizers": None}}, content_type=MERGE, keep=("metadata.finalizers",))
        trace.do("GET", path)

    trace.watched(trace.pods, act)


def selector_transitions(trace: Tracer) -> None:
    """To a watch with a selector an object that begins to match appears, and one that ceases to match is deleted."""
    binding = {"metadata": {"name": "later"}, "target": {"kind": "Node", "name": "trace-node"}}

    def bind() -> None:
        trace.do("POST", trace.pods, pod("later", node=None), keep=("spec.nodeName", "status.phase"))
        trace.do("POST", f"{trace.pods}/later/binding", binding)

    trace.watched(trace.pods, bind, fieldSelector="spec.nodeName=trace-node")

    def run() -> None:
        body = {"status": {"phase": "Running"}}
        trace.do("PATCH", f"{trace.pods}/later/status", body, content_type=MERGE, keep=("status.phase",))
        trace.do("POST", f"{trace.pods}/later/binding", binding)

    trace.watched(trace.pods, run, fieldSelector="status.phase=Pending")
    trace.do("GET", f"{trace.pods}?fieldSelector=spec.color%3Dblue")


def write_without_change(trace: Tracer) -> None:
    """A write that changes nothing keeps the version and is seen by no watch."""
    path = f"{trace.pods}/still"
    label = {"metadata": {"labels": {"a": "b"}}}

    def act() -> None:
        for _ in range(2):
            trace.do("PATCH", path, label, content_type=MERGE, keep=("metadata.resourceVersion",))
        trace.do(
            "PATCH",
            f"{path}/status",
            {"status": {"phase": "Pending"}},
            content_type=STRATEGIC,
            keep=("metadata.resourceVersion",),
        )

    trace.do("POST", trace.pods, pod("still"), keep=("metadata.resourceVersion",))
    trace.watched(trace.pods, act)


def status_isolation(trace: Tracer) -> None:
    """The pod's own path leaves its status alone, the status path leaves the spec alone, but takes metadata."""
    path = f"{trace.pods}/apart"
    kept = ("status.phase", "status.reason", "spec.activeDeadlineSeconds", "metadata.labels", "metadata.annotations")
    trace.do("POST", trace.pods, {**pod("apart"), "status": {"phase": "Running"}}, keep=kept)
    trace.do("PATCH", path, {"status": {"phase": "Running", "reason": "Mine"}}, content_type=MERGE, keep=kept)
    body = {
        "metadata": {"labels": {"by": "status"}, "annotations": {"by": "status"}},
        "spec": {"activeDeadlineSeconds": 5},
        "status": {"phase": "Running"},
    }
    trace.do("PATCH", f"{path}/status", body, content_type=STRATEGIC, keep=kept)
    trace.do("PATCH", path, {"spec": {"nodeName": "elsewhere"}}, content_type=MERGE, keep=("spec.nodeName",))


def uid_preconditions(trace: Tracer) -> None:
    """A write that carries another pod's UID is a conflict, on every path."""
    path = f"{trace.pods}/known"
    trace.do("POST", trace.pods, pod("known"), keep=("metadata.uid",))
    other = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}}
    trace.do("PATCH", path, {**other, "spec": {"activeDeadlineSeconds": 9}}, content_type=MERGE)
    trace.do("PATCH", f"{path}/status", {**other, "status": {"phase": "Running"}}, content_type=STRATEGIC)
    trace.do("PATCH", path, {"metadata": {"resourceVersion": "1", "labels": {"a": "b"}}}, content_type=MERGE)
    trace.do("POST", trace.pods, pod("known"))


def gone(trace: Tracer) -> None:
    """A continue token that is none."""
    answer = trace.api.send("GET", f"{trace.pods}?limit=1&continue=nonsense")
    trace.note({"continue": answer.status, "reason": answer.json["reason"]})


def bookmark(trace: Tracer) -> None:
    """Before a watch ends by its timeout it says how far it got."""
    trace.do("POST", trace.pods, pod("marked"), keep=("metadata.resourceVersion",))
    version = trace.api.get(trace.pods)["metadata"]["resourceVersion"]
    query = {"resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": 10}
    events = [event for event in trace.api.watch(trace.pods, **query) if event["type"] == "BOOKMARK"]
    for event in events[:1]:
        marked = event["object"]
        fields = {name: sorted(value) if isinstance(value, dict) else value for name, value in marked.items()}
        trace.note(
            {"bookmark": {key: fields[key] for key in ("kind", "apiVersion")}, "named": "name" in marked["metadata"]}
        )
    trace.note({"bookmarks": bool(events)})


def micro_time(trace: Tracer) -> None:
    """A lease takes times of six digits and no others."""
    path = f"{LEASES}/{trace.namespace}"

    def lease(time: Any) -> dict[str, Any]:
        spec = {"holderIdentity": "a", "leaseDurationSeconds": 40, "renewTime": time}
        return {"metadata": {"name": trace.namespace, "namespace": "kube-node-lease"}, "spec": spec}

    for time in ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00.000Z", "2026-01-01T00:00:00.000000000Z"):
        trace.do("POST", LEASES, lease(time), keep=("spec",))
    trace.do("POST", LEASES, lease("2026-01-01T00:00:00.000000Z"), keep=("spec.renewTime",))
    trace.do("PUT", path, lease("2026-01-01T00:00:01.000001Z"), keep=("spec.renewTime",))
    trace.do("DELETE", path, keep=("status",))


def merge_of_conditions(trace: Tracer) -> None:
    """Conditions are merged by type; null and $patch delete take away; the rest stays."""
    path = f"{trace.pods}/merged/status"
    kept = ("status.conditions",)

    def patch(*conditions: dict[str, Any]) -> None:
        trace.do("PATCH", path, {"status": {"conditions": list(conditions)}}, content_type=STRATEGIC, keep=kept)

    trace.do("POST", trace.pods, pod("merged"), keep=("status.phase",))
    patch(
        {"type": "Ready", "status": "False", "reason": "A", "message": "a"}, {"type": "example.com/X", "status": "True"}
    )
    patch({"type": "Ready", "status": "True", "reason": "B"})
    patch({"type": "Ready", "status": "True", "message": None})
    patch({"type": "example.com/X", "$patch": "delete"})


def merge_of_addresses(trace: Tracer) -> None:
    """podIPs are merged by address, so that a new one is refused unless the list is replaced."""
    path = f"{trace.pods}/moved/status"
    kept = ("status.podIP", "status.podIPs", "status.hostIP", "status.hostIPs")

    def patch(**status: Any) -> None:
        trace.do("PATCH", path, {"status": status}, content_type=STRATEGIC, keep=kept)

    trace.do("POST", trace.pods, pod("moved"), keep=("status.phase",))
    patch(podIP="10.88.0.5", podIPs=[{"ip": "10.88.0.5"}], hostIP="192.0.2.1", hostIPs=[{"ip": "192.0.2.1"}])
    patch(podIP="10.88.0.6", podIPs=[{"ip": "10.88.0.6"}])
    patch(podIP="10.88.0.7", podIPs=[{"$patch": "replace"}, {"ip": "10.88.0.7"}])
    patch(podIP=None, podIPs=None)
    patch(podIP="not an address", podIPs=[{"$patch": "replace"}, {"ip": "not an address"}])


def containers_that_ended(trace: Tracer) -> None:
    """A container that ended for good stays ended; a list of statuses is replaced whole."""

    def patch(name: str, **state: Any) -> None:
        status = {"name": "agent", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
        body = {"status": {"containerStatuses": [status]}}
        trace.do(
            "PATCH", f"{trace.pods}/{name}/status", body, content_type=STRATEGIC, keep=("status.containerStatuses",)
        )

    for name, policy in (("always", "Always"), ("never", "Never")):
        trace.do("POST", trace.pods, pod(name, restartPolicy=policy), keep=("status.phase",))
        patch(name, terminated={"exitCode": 0, "reason": "Completed"})
        patch(name, running={"startedAt": "2026-01-01T00:00:00Z"})


def table(trace: Tracer) -> None:
    """What kubectl prints: columns, and the cells of a pod that runs and of one that ends."""
    for name in ("running", "ending"):
        trace.do("POST", trace.pods, pod(name), keep=("status.phase",))
        status = {
            "phase": "Running",
            "podIP": "10.88.0.9",
            "podIPs": [{"ip": "10.88.0.9"}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {
                    "name": "agent",
                    "image": "x",
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                }
            ],
        }
        trace.do(
            "PATCH", f"{trace.pods}/{name}/status", {"status": status}, content_type=STRATEGIC, keep=("status.phase",)
        )
    trace.do(
        "DELETE", f"{trace.pods}/ending", {"gracePeriodSeconds": 30}, keep=("metadata.deletionGracePeriodSeconds",)
    )
    shown = trace.api.ask("GET", trace.pods, accept=TABLE)
    columns = [
        {key: column[key] for key in ("name", "type", "format", "priority")} for column in shown["columnDefinitions"]
    ]
    age = next(number for number, column in enumerate(columns) if column["name"] == "Age")
    rows = [[cell if number != age else "AGE" for number, cell in enumerate(row["cells"])] for row in shown["rows"]]
    trace.note(
        {"kind": shown["kind"], "columns": columns, "rows": rows, "row object": shown["rows"][0]["object"]["kind"]}
    )


def json_patch(trace: Tracer) -> None:
    """A JSON patch whose test fails changes nothing; an unknown kind of patch is refused."""
    path = f"{trace.pods}/tested"
    trace.do("POST", trace.pods, pod("tested"), keep=("metadata.labels",))
    for value in ("wrong", "tested"):
        body = [
            {"op": "test", "path": "/metadata/name", "value": value},
            {"op": "add", "path": "/metadata/labels", "value": {"a": "b"}},
        ]
        answer = trace.api.send("PATCH", path, body, content_type=JSON)
        labels = answer.json["metadata"].get("labels") if answer.status == 200 else None
        trace.note({"patched": value, "status": answer.status, "reason": answer.json.get("reason"), "labels": labels})
    answer = trace.api.send("PATCH", path, {}, content_type="application/unknown")
    trace.note({"unknown": answer.status, "reason": answer.json.get("reason")})


def history_forgotten(trace: Tracer) -> None:
    """What was compacted: a list in pages goes on with what is there now, an old list and an old watch begin anew."""
    for name in ("a", "b", "c"):
        trace.do("POST", trace.pods, pod(name), keep=("metadata.name",))
    page = trace.api.get(f"{trace.pods}?limit=1")["metadata"]
    old = f"resourceVersion={page['resourceVersion']}"
    trace.do("PATCH", f"{trace.pods}/c", {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE, keep=("kind",))
    trace.forget()
    refused = trace.api.send("GET", f"{trace.pods}?limit=1&continue={page['continue']}").json
    token = refused["metadata"].pop("continue")
    trace.note({"continued": refused, "token": bool(token)})
    rest = trace.api.get(f"{trace.pods}?limit=1&continue={token}")
    trace.note({"with the token": _names(rest), "more": bool(rest["metadata"].get("continue"))})
    trace.do("GET", f"{trace.pods}?{old}&resourceVersionMatch=Exact")
    trace.note({"not older than": _names(trace.api.get(f"{trace.pods}?{old}&resourceVersionMatch=NotOlderThan"))})
    events = list(trace.api.watch(trace.pods, resourceVersion=page["resourceVersion"], timeoutSeconds=5))
    trace.note({"watched": [_event(event) for event in events]})


def _names(page: Any) -> list[str]:
    return [item["metadata"]["name"] for item in page["items"]]


TRACES = {
    function.__name__: function
    for function in (
        graceful_delete,
        delete_at_once,
        finalizer,
        selector_transitions,
        write_without_change,
        status_isolation,
        uid_preconditions,
        gone,
        history_forgotten,
        bookmark,
        micro_time,
        merge_of_conditions,
        merge_of_addresses,
        containers_that_ended,
        table,
        json_patch,
    )
}


def play(name: str, api: Api, namespace: str, forget: Callable[[], None]) -> list[Any]:
    """What this server does; `forget` makes it lose its history."""
    tracer = Tracer(api, namespace, forget)
    TRACES[name](tracer)
    return tracer.written


def recorded(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def record(name: str, version: str, written: list[Any]) -> None:
    about = (TRACES[name].__doc__ or "").strip()
    document = {"about": about, "kubernetes": version, "steps": written}
    (DIRECTORY / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
