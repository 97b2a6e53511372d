"""A node in virtual time for the tests of the provider: short names for what they do all the time."""

from simulator.fake_vms import GuestSpec
from vkcocoon_status import condition_of

FAST = GuestSpec(boot_s=0.0, lease_s=0.0)  # has its address in the instant it is made
PORT = "vm.cocoonstack.io/probe-port"


def annotations(world, name):
    """Our annotations of a pod, without the group's prefix."""
    found = world.pod(name)["metadata"].get("annotations") or {}
    return {key.partition("/")[2]: value for key, value in found.items() if key.startswith("vm.cocoonstack.io/")}


def status(world, name):
    return world.pod(name)["status"]


def reason(world, name, type_="Ready"):
    return condition_of(status(world, name), type_).get("reason")


def message(world, name, type_="Ready"):
    return condition_of(status(world, name), type_).get("message")


def calls(tool):
    """The verbs a fake command line was called with, without those that only look at everything there is."""
    looks = ("vm list", "vm status", "snapshot list")
    return [call["verb"] for call in tool.calls if call["verb"] not in looks]


def writes(world, name, verb="PATCH"):
    """The requests that wrote a pod: (instant, path below the pod, body)."""
    stem = f"/pods/{name}"
    return [
        (request.at, request.path.partition(stem)[2], request.body)
        for request in world.kube.requests
        if request.verb == verb and stem in request.path
    ]


def events(world, name):
    """Reason and message of the Events about a pod."""
    found = world.kube.admin.list("/api/v1/namespaces/default/events")["items"]
    return [(event["reason"], event["message"]) for event in found if event["involvedObject"]["name"] == name]
