"""What the tests of the kubelet half share: a fake API in virtual time, pods to put into it, what was asked of it."""

import random
from collections.abc import Callable
from typing import Any

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_kube import Reflector, uid_of
from vkcocoon_publish import Publishers

NODE = "n1"
T0 = "2026-01-01T00:00:00Z"


class Lowest(random.Random):
    """Draws the low end of every range, so that jittered instants are exact."""

    def uniform(self, a: float, b: float) -> float:
        return a


class Settings:
    """The settings that the kubelet half reads."""

    node_name = NODE
    node_pool = "default"
    node_ip = "192.0.2.7"
    provider_id = ""
    snapshot_cpu_class = ""
    kubelet_port = 10250
    reserve_percent = 20
    node_cpu = node_mem = node_storage = node_hugepages = ""
    node_pods = 256
    cocoon_root_dir = "/"

    def __init__(self, **changes: Any) -> None:
        self.__dict__.update(changes)


def pod(name: str = "web-0", **changes: Any) -> dict[str, Any]:
    """A pod bound to the node, as a user would create it; keywords are fields of metadata."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": {"vm.cocoonstack.io/name": f"vk-{name}"},
            **changes,
        },
        "spec": {"nodeName": NODE, "containers": [{"name": "agent", "image": "placeholder"}]},
    }


def path_of(name: str = "web-0") -> str:
    return f"/api/v1/namespaces/default/pods/{name}"


def status(
    ready: bool = True, *, phase: str = "Running", ip: str = "10.88.0.5", since: str = T0, reason: str = ""
) -> dict[str, Any]:
    """A status of ours, smaller than the real one but of its shape."""
    word = "True" if ready else "False"
    reason = reason or ("ProbeSucceeded" if ready else "PingTimeout")
    conditions = [
        {"type": type_, "status": word, "reason": reason, "message": "", "lastTransitionTime": since}
        for type_ in ("Ready", "ContainersReady")
    ]
    state = {"terminated": {"exitCode": 0, "reason": "Completed"}} if phase == "Succeeded" else {"running": {}}
    return {
        "phase": phase,
        "startTime": T0,
        **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
        "conditions": conditions,
        "containerStatuses": [
            {"name": "agent", "image": "placeholder", "imageID": "", "ready": ready, "restartCount": 0, "state": state}
        ],
    }


def news(of: dict[str, Any], status_: dict[str, Any], **annotations: str | None) -> dict[str, Any]:
    """What a provider's notify carries; annotation keywords are the last part of our keys."""
    metadata = {key: of["metadata"][key] for key in ("namespace", "name", "uid")}
    owned = {f"vm.cocoonstack.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return {"metadata": {**metadata, "annotations": owned}, "status": status_}


class Feed:
    """A reflector's handler that only feeds the publishers."""

    def __init__(self, publishers: Publishers) -> None:
        self.publishers = publishers

    def changed(self, obj: dict[str, Any]) -> None:
        self.publishers.observe(obj)

    def gone(self, obj: dict[str, Any]) -> None:
        self.publishers.forget(uid_of(obj))

    def listed(self) -> None:
        self.publishers.recheck()


class Desk:
    """Publishers over a fake API, with a reflector that shows them what the API holds."""

    def __init__(self, clock: VirtualClock, door: Callable[[FakeKube], Any] = lambda kube: kube) -> None:
        self.clock = clock
        self.kube = FakeKube(clock)
        self.objects: dict[str, Any] = {}
        self.publishers = Publishers(door(self.kube), clock, cached=self._cached, rng=Lowest())
        selector = f"spec.nodeName={NODE}"
        self.reflector = Reflector(
            self.kube, clock, "/api/v1/pods", Feed(self.publishers), field_selector=selector, rng=Lowest()
        )

    def _cached(self, uid: str) -> dict[str, Any] | None:
        return self.reflector.objects.get(uid)

    def pod(self, name: str = "web-0", **changes: Any) -> dict[str, Any]:
        """Create a pod behind everybody's back, and let the reflector see it."""
        made = self.kube.admin.create("/api/v1/namespaces/default/pods", pod(name, **changes))
        self.clock.run(0)
        return made

    def overlook(self, made: dict[str, Any]) -> None:
        """From now on the list lacks the pod, without a word."""
        self.reflector.close()
        del self.reflector.objects[uid_of(made)]

    def held(self, name: str = "web-0") -> dict[str, Any]:
        return self.kube.admin.get(path_of(name))

    def close(self) -> None:
        self.publishers.close()
        self.reflector.close()


def asked(kube: FakeKube, *verbs: str) -> list[tuple[float, str]]:
    """Instant and "VERB path" of the requests with these verbs (default: all that write)."""
    verbs = verbs or ("POST", "PUT", "PATCH", "DELETE")
    return [(request.at, str(request)) for request in kube.requests if request.verb in verbs]


def condition(obj: dict[str, Any], type_: str = "Ready") -> dict[str, Any]:
    return next((c for c in obj["status"].get("conditions", ()) if c["type"] == type_), {})
