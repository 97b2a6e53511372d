"""What the tests of the pod controller share: a provider that follows a script, and the controller over a fake API."""

import copy

from gevent.event import Event
from kube_rig import Lowest, Settings, news, path_of, pod, status

from simulator.fake_kube import FakeKube
from vkcocoon_events import EventRecorder
from vkcocoon_kube import ApiError
from vkcocoon_pods import PodController
from vkcocoon_status import NotOurs

PODS = "/api/v1/namespaces/default/pods"
BOOM = ApiError(500, "InternalError", "boom")


class ScriptedProvider:
    """Does what PodController asks, slowly or not at all if told so; remembers pods by UID."""

    def __init__(self, clock):
        self.clock = clock
        self.notify = None
        self.pods = {}
        self.calls = []  # (instant, operation, name, uid's serial)
        self.took = {}  # operation -> seconds
        self.failures = {}  # operation -> how many more times it fails
        self.refuse = ""
        self.delete_status = status(False, phase="Succeeded")

    def create_pod(self, given):
        self._work("create", given)
        if self.refuse:
            raise NotOurs(self.refuse)
        self.pods[given["metadata"]["uid"]] = given
        self.notify(news(given, status(), id="v1", lifecycle_state="ready"))

    def update_pod(self, given):
        self._work("update", given)
        self.pods[given["metadata"]["uid"]] = given

    def delete_pod(self, given):
        known = given["metadata"]["uid"] in self.pods
        if known:
            self.notify(news(given, status(False, reason="Terminating"), id="v1"))
        self._work("delete", given)
        self.pods.pop(given["metadata"]["uid"], None)
        if known:
            self.notify(news(given, self.delete_status, id="v1"))

    def get_pod(self, namespace, name):
        return next((copy.deepcopy(pod) for pod in self.pods.values() if pod["metadata"]["name"] == name), None)

    def observed(self, pod):
        pass

    def vanished(self, uid):
        pass

    def uids(self):
        return {pod["metadata"]["uid"] for pod in self.get_pods()}

    def get_pods(self):
        return [copy.deepcopy(pod) for pod in self.pods.values()]

    def knows(self, uid):
        return uid in self.pods

    def _work(self, operation, given):
        self.calls.append((self.clock.elapsed(), operation, given["metadata"]["name"], given["metadata"]["uid"]))
        if seconds := self.took.get(operation):
            self.clock.sleep(seconds)
        if self.failures.get(operation):
            self.failures[operation] -= 1
            raise RuntimeError(f"{operation} does not work")


class Rig:
    def __init__(self, clock):
        self.clock = clock
        self.kube = FakeKube(clock)
        self.provider = ScriptedProvider(clock)
        self.recorder = EventRecorder(self.kube, clock, node_name="n1", rng=Lowest())
        self.gate = Event()
        self.gate.set()
        self.controller = None
        self.restart()

    def restart(self):
        """A new controller over the same provider, as after a restart of the daemon with everything adopted."""
        if self.controller is not None:
            self.controller.close()
        self.controller = PodController(
            self.kube,
            self.clock,
            self.provider,
            Settings(),
            recorder=self.recorder,
            gate=self.gate,
            rng=Lowest(),
        )
        self.provider.notify = self.controller.notify

    def start(self):
        self.recorder.start()
        self.controller.start()
        self.clock.run(0)

    def create(self, name="web-0", **changes):
        made = self.kube.admin.create(PODS, pod(name, **changes))
        self.clock.run(0)
        return made

    def edit(self, body, name="web-0"):
        self.kube.admin.patch(path_of(name), body, kind="merge")
        self.clock.run(0)

    def delete(self, name="web-0", grace=30):
        self.kube.admin.delete(path_of(name), grace_seconds=grace)
        self.clock.run(0)

    def held(self, name="web-0"):
        try:
            return self.kube.admin.get(path_of(name))
        except ApiError as error:
            assert error.status == 404
            return None

    def calls(self, operation=""):
        return [(at, verb) for at, verb, _, _ in self.provider.calls if operation in ("", verb)]

    def events(self):
        items = self.kube.admin.list("/api/v1/namespaces/default/events")["items"]
        return {(item["reason"], item["message"]): item["count"] for item in items}

    def leftovers(self):
        controller = self.controller
        return len(controller._pods), len(controller._lines), len(controller._publishers), len(controller._group)

    def close(self):
        self.controller.close()
        self.recorder.close()


NOTHING_LEFT = (0, 0, 0, 1)  # only the greenlet that looks again
