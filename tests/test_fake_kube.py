"""The fake API server keeps the promises of the real one: versions, preconditions, isolation, deletion in order.

In process and in virtual time; what holds here holds for the HTTP door too, which only translates.
"""

import enum
import random
from datetime import UTC, datetime

import pytest

from simulator.clock import VirtualClock
from simulator.fake_kube import FakeKube
from vkcocoon_kube import ApiError

PODS = "/api/v1/namespaces/default/pods"
WEB = f"{PODS}/web-0"
NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
T0 = "2026-01-01T00:00:00Z"


@pytest.fixture
def clock():
    clock = VirtualClock()
    yield clock
    clock.close()


@pytest.fixture
def kube(clock):
    return FakeKube(clock)


def pod(name="web-0", *, metadata=None, **spec):
    containers = [{"name": "agent", "image": "ghcr.io/acme/vm:24.04"}]
    return {"metadata": {"name": name, **(metadata or {})}, "spec": {"containers": containers, **spec}}


def bound(name="web-0", **changes):
    return pod(name, nodeName="n1", **changes)


def lease(**spec):
    return {"metadata": {"name": "n1"}, "spec": {"holderIdentity": "n1", "leaseDurationSeconds": 40, **spec}}


def container(state, *, restarts=0, ready=False):
    return {
        "name": "agent",
        "image": "x",
        "imageID": "",
        "ready": ready,
        "restartCount": restarts,
        "state": state,
    }


def refused(call, *args, **kwargs):
    """(status, reason, message) of a refusal."""
    with pytest.raises(ApiError) as caught:
        call(*args, **kwargs)
    error = caught.value
    return error.status, error.reason, error.message


def version(obj):
    return int(obj["metadata"]["resourceVersion"])


# Creation ------------------------------------------------------------------------------------------------------------


def test_a_pod_is_born_pending_with_identity_and_defaults(kube):
    made = kube.create(PODS, {**pod(), "status": {"phase": "Running", "podIP": "10.0.0.1"}})
    assert (made["apiVersion"], made["kind"]) == ("v1", "Pod")
    assert made["metadata"] == {
        "name": "web-0",
        "namespace": "default",
        "uid": made["metadata"]["uid"],
        "resourceVersion": "5",
        "generation": 1,
        "creationTimestamp": T0,
    }
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Always", 30)
    assert [item["tolerationSeconds"] for item in spec["tolerations"]] == [300, 300]


def test_a_node_may_bring_its_status(kube):
    made = kube.create(NODES, {"metadata": {"name": "n1"}, "status": {"capacity": {"cpu": "8"}}})
    assert made["status"]["capacity"] == made["status"]["allocatable"] == {"cpu": "8"}


def test_a_second_object_of_one_name_is_refused(kube):
    kube.create(PODS, pod())
    assert refused(kube.create, PODS, pod()) == (409, "AlreadyExists", 'pods "web-0" already exists')


def test_a_name_can_be_drawn_and_differs_each_time(kube):
    names = {kube.create(PODS, pod("", metadata={"generateName": "web-"}))["metadata"]["name"] for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("web-") and len(name) == 9 for name in names)


@pytest.mark.parametrize("name", ["Web", "web_0", "-web", "web-", "a" * 254])
def test_names_are_validated(kube, name):
    status, reason, message = refused(kube.create, PODS, pod(name))
    assert (status, reason) == (422, "Invalid")
    assert "metadata.name" in message


def test_a_name_is_required(kube):
    assert refused(kube.create, PODS, pod(""))[0] == 422


def test_a_namespace_has_to_exist(kube):
    status, reason, message = refused(kube.create, "/api/v1/namespaces/nowhere/pods", pod())
    assert (status, reason, message) == (404, "NotFound", 'namespaces "nowhere" not found')


def test_the_namespace_of_body_and_path_must_agree(kube):
    assert refused(kube.create, PODS, pod(metadata={"namespace": "other"}))[:2] == (400, "BadRequest")


def test_a_version_has_no_place_in_a_new_object(kube):
    assert refused(kube.create, PODS, pod(metadata={"resourceVersion": "5"}))[:2] == (400, "BadRequest")


def test_the_usual_namespaces_exist(kube):
    names = [item["metadata"]["name"] for item in kube.list("/api/v1/namespaces")["items"]]
    assert names == ["default", "kube-node-lease", "kube-public", "kube-system"]


@pytest.mark.parametrize("path", ["/api/v1/foos", "/apis/nope/v1/things", "/api/v2/pods", f"{WEB}/nope", "/"])
def test_an_unknown_path_is_not_found(kube, path):
    assert refused(kube.get, path)[:2] == (404, "NotFound")


def test_same_seed_same_uids(clock):
    uids = [FakeKube(clock, rng=random.Random(7)).create(PODS, pod())["metadata"]["uid"] for _ in range(2)]
    assert uids[0] == uids[1] != FakeKube(clock, rng=random.Random(8)).create(PODS, pod())["metadata"]["uid"]


def test_what_is_handed_out_belongs_to_the_caller(kube):
    made = kube.create(PODS, pod())
    made["spec"]["containers"].clear()
    kube.list(PODS)["items"][0]["metadata"].clear()
    assert kube.get(WEB)["spec"]["containers"]
    assert kube.get(WEB)["metadata"]["name"] == "web-0"


# Versions and preconditions ------------------------------------------------------------------------------------------


def test_every_write_takes_the_next_version_of_all(kube):
    first, node = kube.create(PODS, pod("a")), kube.create(NODES, {"metadata": {"name": "n"}})
    patched = kube.patch(f"{PODS}/a", {"metadata": {"labels": {"x": "y"}}}, kind="merge")
    assert [version(item) - version(first) for item in (first, node, patched)] == [0, 1, 2]
    assert kube.list(PODS)["metadata"]["resourceVersion"] == patched["metadata"]["resourceVersion"]


@pytest.mark.parametrize("kind", ["strategic", "merge"])
def test_a_write_that_changes_nothing_is_none(kube, kind):
    kube.create(PODS, bound())
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "message": ""}]}
    first = kube.patch(f"{WEB}/status", {"status": status}, kind=kind)
    # An empty message is not stored, so sending it again is no change either.
    assert kube.patch(f"{WEB}/status", {"status": status}, kind=kind) == first
    assert "message" not in first["status"]["conditions"][0]


def test_a_stale_put_is_a_conflict(kube):
    old = kube.create(NODES, {"metadata": {"name": "n1"}})
    kube.patch(f"{NODES}/n1", {"spec": {"unschedulable": True}}, kind="merge")
    status, reason, message = refused(kube.replace, f"{NODES}/n1", old)
    assert (status, reason) == (409, "Conflict")
    assert message == (
        'Operation cannot be fulfilled on nodes "n1": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )


def test_a_put_without_version_wins_where_the_kind_allows_it(kube):
    kube.create(NODES, {"metadata": {"name": "n1"}})
    put = kube.replace(f"{NODES}/n1", {"metadata": {"name": "n1", "labels": {"a": "b"}}})
    assert put["metadata"]["labels"] == {"a": "b"}
    kube.create(LEASES, lease())
    assert refused(kube.replace, f"{LEASES}/n1", lease())[:2] == (422, "Invalid")


def test_a_put_creates_a_lease_but_no_pod(kube):
    assert kube.replace(f"{LEASES}/n1", lease())["spec"]["holderIdentity"] == "n1"
    assert refused(kube.replace, WEB, pod())[0] == 404


def test_the_uid_in_a_patch_must_not_differ(kube):
    uid = kube.create(PODS, bound())["metadata"]["uid"]
    kube.patch(f"{WEB}/status", {"metadata": {"uid": uid}, "status": {"phase": "Running"}}, kind="strategic")
    body = {"metadata": {"uid": "somebody-else"}, "status": {"phase": "Failed"}}
    status, reason, message = refused(kube.patch, f"{WEB}/status", body, kind="strategic")
    assert (status, reason) == (422, "Invalid")
    assert 'metadata.uid: Invalid value: "somebody-else": field is immutable' in message
    assert kube.get(WEB)["status"]["phase"] == "Running"


def test_the_version_in_a_patch_is_a_precondition(kube):
    old = kube.create(PODS, pod())["metadata"]["resourceVersion"]
    kube.patch(WEB, {"metadata": {"labels": {"a": "1"}}}, kind="merge")
    body = {"metadata": {"resourceVersion": old, "labels": {"a": "2"}}}
    assert refused(kube.patch, WEB, body, kind="merge")[:2] == (409, "Conflict")


def test_a_body_cannot_rename_or_move_an_object(kube):
    kube.create(PODS, pod())
    assert refused(kube.patch, WEB, {"metadata": {"name": "b"}}, kind="merge")[0] == 400
    assert refused(kube.patch, WEB, {"metadata": {"namespace": "b"}}, kind="merge")[0] == 400


def test_identity_is_not_for_clients_to_change(kube):
    made = kube.create(PODS, bound())
    kube.delete(WEB)
    wanted = {"creationTimestamp": "2020-01-01T00:00:00Z", "deletionTimestamp": None, "generation": 77}
    after = kube.patch(WEB, {"metadata": wanted}, kind="merge")["metadata"]
    assert after["creationTimestamp"] == T0
    assert after["generation"] == made["metadata"]["generation"] + 1
    assert after["deletionTimestamp"] == "2026-01-01T00:00:30Z"


# Status and spec do not touch each other -----------------------------------------------------------------------------


def test_a_status_write_leaves_the_spec_and_a_spec_write_the_status(kube):
    kube.create(PODS, bound())
    body = {"spec": {"nodeName": "elsewhere"}, "status": {"phase": "Running"}}
    after = kube.patch(f"{WEB}/status", body, kind="strategic")
    assert (after["spec"]["nodeName"], after["status"]["phase"]) == ("n1", "Running")
    body = {"metadata": {"labels": {"a": "b"}}, "status": {"phase": "Failed"}}
    after = kube.patch(WEB, body, kind="strategic")
    assert (after["metadata"]["labels"], after["status"]["phase"]) == ({"a": "b"}, "Running")


def test_a_status_write_does_store_annotations(kube):
    kube.create(PODS, bound())
    after = kube.patch(f"{WEB}/status", {"metadata": {"annotations": {"a": "b"}}}, kind="strategic")
    assert after["metadata"]["annotations"] == {"a": "b"}


def test_node_status_and_spec_are_apart_too(kube):
    kube.create(NODES, {"metadata": {"name": "n1"}})
    body = {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}, "status": {"phase": "Running"}}
    after = kube.patch(f"{NODES}/n1/status", body, kind="strategic")
    assert ("taints" in after["spec"], after["status"]["phase"]) == (False, "Running")
    after = kube.patch(f"{NODES}/n1", {**body, "status": {"phase": "Terminated"}}, kind="strategic")
    assert ("taints" in after["spec"], after["status"]["phase"]) == (True, "Running")


def test_the_spec_of_a_pod_hardly_changes(kube):
    kube.create(PODS, bound())
    for body in ({"nodeName": "n2"}, {"restartPolicy": "Never"}, {"containers": [{"name": "agent", "tty": True}]}):
        assert refused(kube.patch, WEB, {"spec": body}, kind="strategic")[:2] == (422, "Invalid")
    body = {"activeDeadlineSeconds": 60, "containers": [{"name": "agent", "image": "other"}]}
    after = kube.patch(WEB, {"spec": body}, kind="strategic")
    assert (after["spec"]["containers"][0]["image"], after["metadata"]["generation"]) == ("other", 2)


def test_a_finished_container_stays_finished_unless_it_restarts(kube):
    ended = {"status": {"containerStatuses": [container({"terminated": {"exitCode": 0}})]}}
    running = {"status": {"containerStatuses": [container({"running": {}})]}}
    for policy, allowed in (("Always", True), ("Never", False), ("OnFailure", False)):
        path = f"{PODS}/{policy.lower()}/status"
        kube.create(PODS, bound(policy.lower(), restartPolicy=policy))
        kube.patch(path, ended, kind="strategic")
        if allowed:
            kube.patch(path, running, kind="strategic")
        else:
            status, _, message = refused(kube.patch, path, running, kind="strategic")
            assert status == 422
            assert "may not be transitioned to non-terminated state" in message


def test_a_failed_container_may_run_again_on_failure(kube):
    kube.create(PODS, bound(restartPolicy="OnFailure"))
    ended = {"status": {"containerStatuses": [container({"terminated": {"exitCode": 1}})]}}
    kube.patch(f"{WEB}/status", ended, kind="strategic")
    kube.patch(f"{WEB}/status", {"status": {"containerStatuses": [container({"running": {}})]}}, kind="strategic")


def test_addresses_of_a_pod_agree_with_each_other(kube):
    kube.create(PODS, bound())
    after = kube.patch(f"{WEB}/status", {"status": {"podIP": "10.0.0.1"}}, kind="strategic")
    assert after["status"]["podIPs"] == [{"ip": "10.0.0.1"}]
    body = {"status": {"hostIP": "192.0.2.1", "hostIPs": [{"ip": "192.0.2.2"}]}}
    assert refused(kube.patch, f"{WEB}/status", body, kind="strategic")[0] == 422
    assert refused(kube.patch, f"{WEB}/status", {"status": {"podIP": "10.0.0"}}, kind="merge")[0] == 422
    # podIP decides when both are given.
    after = kube.patch(f"{WEB}/status", {"status": {"podIP": "10.0.0.2"}}, kind="merge")
    assert after["status"]["podIPs"] == [{"ip": "10.0.0.2"}]


def test_host_addresses_pile_up_unless_they_are_replaced_whole(kube):
    kube.create(PODS, bound())
    first = {"hostIP": "192.0.2.1", "hostIPs": [{"ip": "192.0.2.1"}]}
    second = {"hostIP": "192.0.2.2", "hostIPs": [{"ip": "192.0.2.2"}]}
    kube.patch(f"{WEB}/status", {"status": first}, kind="strategic")
    assert refused(kube.patch, f"{WEB}/status", {"status": second}, kind="strategic")[0] == 422
    second["hostIPs"].append({"$patch": "replace"})
    after = kube.patch(f"{WEB}/status", {"status": second}, kind="strategic")
    assert after["status"]["hostIPs"] == [{"ip": "192.0.2.2"}]


def test_foreign_conditions_survive_a_strategic_patch_and_not_a_merge_patch(kube):
    kube.create(PODS, bound())
    gate, ready = {"type": "example.com/gate", "status": "True"}, {"type": "Ready", "status": "True"}
    kube.patch(f"{WEB}/status", {"status": {"conditions": [gate]}}, kind="strategic")
    after = kube.patch(f"{WEB}/status", {"status": {"conditions": [ready]}}, kind="strategic")
    assert [item["type"] for item in after["status"]["conditions"]] == ["Ready", "example.com/gate"]
    after = kube.patch(f"{WEB}/status", {"status": {"conditions": [ready]}}, kind="merge")
    assert [item["type"] for item in after["status"]["conditions"]] == ["Ready"]


# Decoding ------------------------------------------------------------------------------------------------------------


def test_unknown_fields_vanish(kube):
    kube.create(PODS, bound())
    after = kube.patch(f"{WEB}/status", {"status": {"phase": "Running", "mood": "good"}}, kind="strategic")
    assert "mood" not in after["status"]


@pytest.mark.parametrize(
    "text", ["2026-01-01T00:00:05.5Z", "2026-01-01T00:00:05.123456789Z", "2026-01-01T02:00:05+02:00"]
)
def test_status_times_are_kept_in_whole_seconds_of_utc(kube, text):
    kube.create(PODS, bound())
    after = kube.patch(f"{WEB}/status", {"status": {"startTime": text}}, kind="strategic")
    assert after["status"]["startTime"] == "2026-01-01T00:00:05Z"


def test_the_zero_time_is_no_time(kube):
    kube.create(PODS, bound())
    after = kube.patch(f"{WEB}/status", {"status": {"startTime": "0001-01-01T00:00:00Z"}}, kind="strategic")
    assert "startTime" not in after["status"]


@pytest.mark.parametrize(
    "value", ["2026-01-01T00:00:05", "2026-01-01 00:00:05Z", "2026-13-01T00:00:05Z", "now", "", 1767225600]
)
def test_a_malformed_time_is_refused_whole(kube, value):
    kube.create(PODS, bound())
    body = {"status": {"phase": "Running", "startTime": value}}
    assert refused(kube.patch, f"{WEB}/status", body, kind="strategic")[:2] == (422, "Invalid")
    assert kube.get(WEB)["status"]["phase"] == "Pending"


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("2026-01-01T00:00:05.000000Z", True),
        ("2026-01-01T00:00:05.123456+02:00", True),
        ("2026-01-01T00:00:05Z", False),
        ("2026-01-01T00:00:05.123Z", False),
        ("2026-01-01T00:00:05.1234567Z", False),
    ],
)
def test_a_lease_takes_exactly_six_digits_of_a_second(kube, text, fine):
    if fine:
        kube.create(LEASES, lease(renewTime=text))
        return
    status, reason, message = refused(kube.create, LEASES, lease(renewTime=text))
    assert (status, reason) == (400, "BadRequest")
    assert message.startswith('Lease in version "v1" cannot be handled as a Lease: parsing time')


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"annotations": {"a": 1}}},
        {"metadata": {"labels": {"a": True}}},
        {"status": {"conditions": {}}},
        {"status": {"phase": None, "podIP": 7}},
        {"status": {"containerStatuses": [{"name": "a", "ready": "yes"}]}},
        {"status": {"containerStatuses": [{"name": "a", "restartCount": True}]}},
        {"status": {"containerStatuses": [{"name": "a", "restartCount": 1.5}]}},
        {"status": {"containerStatuses": [{"name": "a", "allocatedResources": ["1"]}]}},
        {"status": {"containerStatuses": [{"name": "a", "allocatedResources": {"cpu": "lots"}}]}},
        {"metadata": {"labels": ["a"]}},
        {"status": "Running"},
    ],
)
def test_values_of_the_wrong_type_are_refused(kube, body):
    kube.create(PODS, bound())
    assert refused(kube.patch, f"{WEB}/status", body, kind="strategic")[:2] == (422, "Invalid")


def test_the_same_mistake_in_a_whole_object_is_a_bad_request(kube):
    assert refused(kube.create, PODS, pod(metadata={"annotations": {"a": 1}}))[:2] == (400, "BadRequest")


def test_a_body_of_another_kind_is_refused(kube):
    assert refused(kube.create, PODS, {**pod(), "kind": "Node"})[:2] == (400, "BadRequest")


def test_labels_are_validated(kube):
    kube.create(PODS, pod())
    for labels in ({"a b": "c"}, {"a": "x" * 64}, {"a": "no spaces"}):
        assert refused(kube.patch, WEB, {"metadata": {"labels": labels}}, kind="merge")[:2] == (422, "Invalid")


@pytest.mark.parametrize("length", [63, 64])
def test_a_label_value_has_a_longest_length(kube, length):
    made = pod(metadata={"labels": {"a": "x" * length}})
    if length == 63:
        kube.create(PODS, made)
    else:
        assert refused(kube.create, PODS, made)[:2] == (422, "Invalid")


@pytest.mark.parametrize("spec", [{"leaseDurationSeconds": 0}, {"holderIdentity": ""}, {"leaseTransitions": -1}])
def test_a_lease_that_makes_no_sense_is_refused(kube, spec):
    status, reason, message = refused(kube.create, LEASES, lease(**spec))
    assert (status, reason) == (422, "Invalid")
    assert f"spec.{next(iter(spec))}" in message


def test_the_smallest_lease_is_accepted(kube):
    assert kube.create(LEASES, lease(leaseDurationSeconds=1, leaseTransitions=0))["spec"]["leaseTransitions"] == 0


@pytest.mark.parametrize(
    ("requests", "limits", "word"),
    [
        ({}, {}, "BestEffort"),
        ({"cpu": "1"}, {}, "Burstable"),
        ({"cpu": "1", "memory": "1Gi"}, {"cpu": "2", "memory": "1Gi"}, "Burstable"),
        ({"cpu": "1", "memory": "1Gi"}, {"cpu": "1", "memory": "1Gi"}, "Guaranteed"),
        ({}, {"cpu": "1", "memory": "1Gi"}, "Guaranteed"),
        ({}, {"cpu": "1"}, "Burstable"),
    ],
)
def test_the_quality_of_service_follows_from_the_resources(kube, requests, limits, word):
    resources = {"requests": requests, "limits": limits}
    made = kube.create(PODS, pod(containers=[{"name": "agent", "image": "x", "resources": resources}]))
    assert made["status"]["qosClass"] == word


@pytest.mark.parametrize(
    "containers",
    [
        [],
        [{"name": "", "image": "x"}],
        [{"name": "A", "image": "x"}],
        [{"name": "a"}],
        [{"name": "a", "image": "x"}, {"name": "a", "image": "x"}],
    ],
)
def test_containers_are_validated(kube, containers):
    status, reason, message = refused(kube.create, PODS, pod(containers=containers))
    assert (status, reason) == (422, "Invalid")
    assert "spec.containers" in message


def test_a_node_keeps_its_provider_and_lists_an_address_once(kube):
    kube.create(NODES, {"metadata": {"name": "n1"}})
    kube.patch(f"{NODES}/n1", {"spec": {"providerID": "cocoon://n1"}}, kind="merge")
    assert refused(kube.patch, f"{NODES}/n1", {"spec": {"providerID": "other"}}, kind="merge")[0] == 422
    twice = [{"type": "InternalIP", "address": "192.0.2.1"}] * 2
    assert refused(kube.patch, f"{NODES}/n1/status", {"status": {"addresses": twice}}, kind="merge")[0] == 422


def test_an_enumeration_of_strings_is_stored_as_strings(kube):
    class Word(enum.StrEnum):
        RUNNING = "Running"

    kube.create(PODS, bound())
    kube.patch(f"{WEB}/status", {"status": {"phase": Word.RUNNING}}, kind="strategic")
    assert type(kube.get(WEB)["status"]["phase"]) is str


def test_what_is_no_json_is_refused(kube):
    kube.create(PODS, bound())
    item = container({"running": {}}) | {"resources": {"at": datetime.now(UTC)}}  # noqa: TID251  any will do
    body = {"status": {"containerStatuses": [item]}}
    assert refused(kube.patch, f"{WEB}/status", body, kind="strategic")[:2] == (422, "Invalid")


def test_events_live_where_their_object_lives(kube):
    event = {"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "namespace": "default", "name": "web-0"}}
    assert refused(kube.create, "/api/v1/namespaces/kube-system/events", event)[:2] == (422, "Invalid")
    kube.create("/api/v1/namespaces/default/events", event)
    about_node = {"metadata": {"name": "n"}, "involvedObject": {"kind": "Node", "name": "n1"}}
    kube.create("/api/v1/namespaces/default/events", about_node)


def test_a_secret_is_stored_encoded(kube):
    made = kube.create("/api/v1/namespaces/default/secrets", {"metadata": {"name": "s"}, "stringData": {"k": "v"}})
    assert (made["data"], made["type"], "stringData" in made) == ({"k": "dg=="}, "Opaque", False)


# Deletion ------------------------------------------------------------------------------------------------------------


def test_a_bound_pod_is_only_marked_and_stays_until_somebody_deletes_it_for_good(kube, clock):
    kube.create(PODS, bound())
    clock.run(10)
    marked = kube.delete(WEB)["metadata"]
    assert marked["deletionTimestamp"] == "2026-01-01T00:00:40Z"
    assert (marked["deletionGracePeriodSeconds"], marked["generation"]) == (30, 2)
    clock.run(3600)
    assert kube.get(WEB)["metadata"] == marked
    kube.delete(WEB, grace_seconds=0)
    assert refused(kube.get, WEB)[:2] == (404, "NotFound")


@pytest.mark.parametrize("why", ["unbound", "succeeded", "failed"])
def test_a_pod_nobody_runs_goes_at_once(kube, why):
    kube.create(PODS, pod() if why == "unbound" else bound())
    if why != "unbound":
        kube.patch(f"{WEB}/status", {"status": {"phase": why.capitalize()}}, kind="strategic")
    kube.delete(WEB)
    assert refused(kube.get, WEB)[0] == 404


def test_a_shorter_grace_counts_from_the_first_request_and_a_longer_one_is_ignored(kube, clock):
    kube.create(PODS, bound())
    first = kube.delete(WEB, grace_seconds=20)
    clock.run(5)
    assert kube.delete(WEB) == kube.delete(WEB, grace_seconds=60) == first
    shorter = kube.delete(WEB, grace_seconds=10)["metadata"]
    assert (shorter["deletionTimestamp"], shorter["deletionGracePeriodSeconds"]) == ("2026-01-01T00:00:10Z", 10)
    assert shorter["generation"] == 2


def test_a_negative_grace_means_one_second(kube):
    kube.create(PODS, bound())
    assert kube.delete(WEB, grace_seconds=-5)["metadata"]["deletionGracePeriodSeconds"] == 1


def test_the_grace_of_the_spec_counts_when_none_is_given(kube):
    kube.create(PODS, bound(terminationGracePeriodSeconds=90))
    assert kube.delete(WEB)["metadata"]["deletionTimestamp"] == "2026-01-01T00:01:30Z"


def test_deleting_the_wrong_uid_is_a_conflict_and_deletes_nothing(kube):
    uid = kube.create(PODS, bound())["metadata"]["uid"]
    status, reason, message = refused(kube.delete, WEB, uid="other", grace_seconds=0)
    assert (status, reason) == (409, "Conflict")
    assert "The object might have been deleted and then recreated" in message
    kube.delete(WEB, uid=uid, grace_seconds=0)
    assert refused(kube.delete, WEB, uid=uid, grace_seconds=0)[:2] == (404, "NotFound")


def test_a_finalizer_keeps_the_pod_until_it_is_taken_off(kube):
    kube.create(PODS, bound(metadata={"finalizers": ["example.com/keep"]}))
    kept = kube.delete(WEB, grace_seconds=0)["metadata"]
    assert (kept["deletionGracePeriodSeconds"], kept["deletionTimestamp"]) == (0, T0)
    assert kube.delete(WEB, grace_seconds=0)["metadata"] == kept
    kube.patch(WEB, {"metadata": {"finalizers": None}}, kind="merge")
    assert refused(kube.get, WEB)[0] == 404


def test_a_finalizer_taken_off_within_the_grace_does_not_remove_the_pod(kube):
    kube.create(PODS, bound(metadata={"finalizers": ["example.com/keep"]}))
    kube.delete(WEB)
    kube.patch(WEB, {"metadata": {"finalizers": None}}, kind="merge")
    assert kube.get(WEB)["metadata"]["deletionGracePeriodSeconds"] == 30


def test_a_new_pod_of_the_same_name_is_another_pod(kube):
    first = kube.create(PODS, bound())["metadata"]["uid"]
    kube.delete(WEB, grace_seconds=0)
    assert kube.create(PODS, bound())["metadata"]["uid"] != first


def test_a_node_goes_at_once_and_says_so(kube):
    uid = kube.create(NODES, {"metadata": {"name": "n1"}})["metadata"]["uid"]
    assert kube.delete(f"{NODES}/n1") == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {"name": "n1", "kind": "nodes", "uid": uid},
        "code": 200,
    }


def test_nothing_new_enters_a_namespace_that_is_going(kube):
    kube.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    assert kube.delete("/api/v1/namespaces/team")["status"]["phase"] == "Terminating"
    status, reason, message = refused(kube.create, "/api/v1/namespaces/team/pods", pod())
    assert (status, reason) == (403, "Forbidden")
    assert "because it is being terminated" in message


# Subresources and reviews --------------------------------------------------------------------------------------------


def test_a_binding_gives_a_pod_its_node_once(kube):
    kube.create(PODS, pod())
    kube.create(f"{WEB}/binding", {"target": {"kind": "Node", "name": "n1"}})
    after = kube.get(WEB)
    assert after["spec"]["nodeName"] == "n1"
    assert [(item["type"], item["status"]) for item in after["status"]["conditions"]] == [("PodScheduled", "True")]
    assert refused(kube.create, f"{WEB}/binding", {"target": {"name": "n2"}})[:2] == (409, "Conflict")


def test_an_eviction_is_a_deletion(kube):
    kube.create(PODS, bound())
    assert kube.create(f"{WEB}/eviction", {"deleteOptions": {"gracePeriodSeconds": 7}})["code"] == 201
    assert kube.get(WEB)["metadata"]["deletionGracePeriodSeconds"] == 7


def test_reviews_are_answered_and_not_stored(kube):
    kube.tokens["t0ken"] = {"username": "alice", "groups": ["ops"]}
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    assert kube.create(path, {"spec": {"token": "t0ken"}})["status"] == {
        "authenticated": True,
        "user": {"username": "alice", "groups": ["ops"]},
    }
    assert not kube.create(path, {"spec": {"token": "other"}})["status"]["authenticated"]
    kube.allows = lambda spec: spec["user"] == "alice"
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    assert kube.create(path, {"spec": {"user": "alice"}})["status"] == {"allowed": True}
    assert kube.create(path, {"spec": {"user": "bob"}})["status"] == {"allowed": False}
    assert refused(kube.list, path)[:2] == (405, "MethodNotAllowed")


# Lists ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(kube):
    for index in range(7):
        labels = {"app": "web" if index % 2 else "db", **({"canary": ""} if index == 3 else {})}
        kube.create(PODS, pod(f"p{index}", metadata={"labels": labels}, nodeName=f"n{index % 3}"))
    return kube


def names(page):
    return [item["metadata"]["name"] for item in page["items"]]


def test_pages_together_show_the_moment_of_the_first(crowd):
    first = crowd.list(PODS, limit=3)
    assert (names(first), first["metadata"]["remainingItemCount"]) == (["p0", "p1", "p2"], 4)
    crowd.delete(f"{PODS}/p4", grace_seconds=0)
    crowd.create(PODS, pod("p9"))
    second = crowd.list(PODS, limit=3, continue_=first["metadata"]["continue"])
    third = crowd.list(PODS, limit=3, continue_=second["metadata"]["continue"])
    assert names(second) + names(third) == ["p3", "p4", "p5", "p6"]
    assert {page["metadata"]["resourceVersion"] for page in (first, second, third)} == {
        first["metadata"]["resourceVersion"]
    }
    assert "continue" not in third["metadata"]


def test_an_old_page_token_expires_with_the_history(crowd):
    token = crowd.list(PODS, limit=3)["metadata"]["continue"]
    crowd.expire_history()
    assert refused(crowd.list, PODS, limit=3, continue_=token)[:2] == (410, "Expired")


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("spec.nodeName=n1", ["p1", "p4"]),
        ("spec.nodeName==n1,metadata.name!=p4", ["p1"]),
        ("metadata.name=p6", ["p6"]),
        ("status.phase=Running", []),
        ("spec.nodeName=", []),
        ("spec.hostNetwork=false,metadata.name=p0", ["p0"]),
    ],
)
def test_field_selectors(crowd, selector, expected):
    assert names(crowd.list("/api/v1/pods", field_selector=selector)) == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("app=web", ["p1", "p3", "p5"]),
        ("app!=web", ["p0", "p2", "p4", "p6"]),
        ("app in (web, x),!canary", ["p1", "p5"]),
        ("canary", ["p3"]),
        ("app notin (db)", ["p1", "p3", "p5"]),
        ("other!=x,app==db", ["p0", "p2", "p4", "p6"]),
    ],
)
def test_label_selectors(crowd, selector, expected):
    assert names(crowd.list(PODS, label_selector=selector)) == expected


@pytest.mark.parametrize("selector", ["spec.image=x", "status.hostIP=1", "metadata.uid=x"])
def test_an_unsupported_field_is_named(crowd, selector):
    field = selector.partition("=")[0]
    assert refused(crowd.list, PODS, field_selector=selector) == (
        400,
        "BadRequest",
        f"field label not supported: {field}",
    )


def test_events_are_found_by_what_they_are_about_and_who_tells(kube):
    about = {"kind": "Pod", "namespace": "default", "name": "web-0", "uid": "u1"}
    events = "/api/v1/namespaces/default/events"
    kube.create(events, {"metadata": {"name": "a"}, "involvedObject": about, "source": {"component": "vk-cocoon"}})
    kube.create(events, {"metadata": {"name": "b"}, "involvedObject": about, "reportingComponent": "vk-cocoon"})
    kube.create(events, {"metadata": {"name": "c"}, "involvedObject": {**about, "uid": "u2"}, "type": "Warning"})
    assert names(kube.list(events, field_selector="involvedObject.uid=u1,involvedObject.name=web-0")) == ["a", "b"]
    assert names(kube.list(events, field_selector="source=vk-cocoon")) == ["a", "b"]
    assert names(kube.list(events, field_selector="type=Warning")) == ["c"]


@pytest.mark.parametrize("selector", ["spec.nodeName", "=n1", "!"])
def test_an_unreadable_field_selector_is_a_bad_request(crowd, selector):
    status, reason, message = refused(crowd.list, PODS, field_selector=selector)
    assert (status, reason, message[:17]) == (400, "BadRequest", "invalid selector:")


@pytest.mark.parametrize("selector", ["app in web", "a=b=c", "!", "app in (a"])
def test_an_unreadable_label_selector_is_a_bad_request(crowd, selector):
    assert refused(crowd.list, PODS, label_selector=selector)[:2] == (400, "BadRequest")


def test_a_version_from_the_future_is_refused(crowd):
    status, reason, message = refused(crowd.list, PODS, resource_version="999")
    assert (status, reason) == (504, "Timeout")
    assert message == "Timeout: Too large resource version: 999, current: 11"


def test_a_lagging_cache_answers_lists_that_take_any_version_only(crowd):
    crowd.freeze_cache()
    crowd.delete(f"{PODS}/p0", grace_seconds=0)
    assert names(crowd.list(PODS, resource_version="0"))[0] == "p0"
    assert names(crowd.list(PODS))[0] == "p1"
    crowd.freeze_cache(False)
    assert names(crowd.list(PODS, resource_version="0"))[0] == "p1"
