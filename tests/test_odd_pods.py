"""Pods as others may legally make them: names in any spelling, a heap of annotations, fields that we do not know."""

import copy

import pytest

from tests.provider_rig import FAST, status

HEAP = "x" * 100 * 1024
LONGEST = ".".join(["n" * 62] * 4)  # 251 of the 253 characters that are allowed


@pytest.mark.parametrize("name", ["a", "0", "0-1", "a.b-c.0", "xn--bcher-kva", LONGEST], ids=lambda name: name[:20])
def test_a_pod_with_any_legal_name_comes_up_and_goes(world, name):
    world.create_pod(name, namespace="n" * 63, guest=FAST, annotations={"vm.cocoonstack.io/name": "vk-odd"})
    world.run(5)
    assert world.ready(name, namespace="n" * 63)
    world.delete_pod(name, namespace="n" * 63)
    world.run(5)
    assert world.pod(name, namespace="n" * 63) is None
    assert world.vm_names() == []


def test_a_heap_of_annotations_and_labels_costs_nothing_and_survives(world):
    labels = {f"example.com/l-{number}": "v" * 63 for number in range(100)}
    world.create_pod("web-0", guest=FAST, annotations={"example.com/heap": HEAP}, labels=labels)
    world.run(5)
    assert world.ready("web-0")
    metadata = world.pod("web-0")["metadata"]
    assert metadata["annotations"]["example.com/heap"] == HEAP
    assert metadata["labels"] == labels
    sent = [request.body for request in world.kube.requests if request.verb == "PATCH" and "/web-0" in request.path]
    assert sent
    assert all(HEAP not in str(body) and "example.com/l-1" not in str(body) for body in sent)


def test_fields_that_nobody_knows_yet_change_nothing(world):
    world.create_pod("web-0", guest=FAST)
    world.run(5)
    made, before = world.host.cocoon.count("vm clone"), status(world, "web-0")
    pod = copy.deepcopy(world.pod("web-0"))
    for part in (pod, pod["metadata"], pod["spec"], pod["status"], pod["spec"]["containers"][0]):
        part |= {"inventedLater": {"deep": [1, None, {"er": "x"}]}, "alsoNew": None}
    pod["spec"]["containers"].append({"name": "side", "image": "x", "inventedLater": []})
    world.clock.spawn("update", world.daemon.provider.update_pod, pod)
    world.run(10)
    assert world.host.cocoon.count("vm clone") == made
    assert world.ready("web-0")
    assert status(world, "web-0")["conditions"] == before["conditions"]
