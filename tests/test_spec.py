"""The annotation contract: what a pod asks for, what is refused with a sentence, and the probe port (O1)."""

import pytest

from vkcocoon_spec import PodSpec, SpecError, probe_port
from vkcocoon_vms import CloneSpec, MacosSpec, RunSpec

PORT = "vm.cocoonstack.io/probe-port"


def spec(resources=None, **annotations):
    names = {
        "vm_name": "vm.cocoonstack.io/name",
        "backend": "vm.cocoonstack.io/backend",
        "no_direct_io": "vm.cocoonstack.io/no-direct-io",
        "fork_from": "vm.cocoonstack.io/fork-from",
        "hibernate": "vm.cocoonstack.io/hibernate",
        "clone_from_dir": "vm.cocoonstack.io/clone-from-dir",
    }
    given = {names.get(key, f"cocoonset.cocoonstack.io/{key}"): value for key, value in annotations.items()}
    pod = {
        "metadata": {"name": "p", "uid": "u", "annotations": {"vm.cocoonstack.io/name": "vm-1"} | given},
        "spec": {"containers": [{"name": "agent", "resources": resources or {}}]},
    }
    return PodSpec.of(pod)


@pytest.mark.parametrize(
    ("text", "port"),
    [("", None), ("1", 1), ("22", 22), (" 22 ", 22), ("65535", 65535), ("00080", 80), ("\t443\n", 443)],
)
def test_a_declared_probe_port_is_one_to_five_ascii_digits(text, port):
    assert probe_port({PORT: text}) == port
    assert probe_port({}) is None


@pytest.mark.parametrize(
    "text", ["0", "00000", "65536", "-1", "+22", "8_0", "٣٠", "ssh", "2 2", "22.0", "0x16", "000022", " ", "²"]
)
def test_anything_else_is_refused_by_name_and_value(text):
    with pytest.raises(SpecError) as refused:
        probe_port({PORT: text})
    assert PORT in str(refused.value)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["True", "TRUE", "1", "yes", " true", ""])
def test_booleans_are_true_only_when_spelled_exactly_so(text):
    assert spec(managed="true").managed
    assert not spec(managed=text).managed


def test_run_takes_the_cpu_limit_rounded_up_and_the_memory_request():
    resources = {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"cpu": "2500m", "memory": "8Gi"}}
    order = spec(
        resources, managed="true", mode="RUN", os="Windows", image="win:1", storage="60Gi", network="cocoon-dhcp"
    )
    assert order.run_mode
    assert order.run_spec() == RunSpec(
        name="vm-1",
        image="win:1",
        cpu=3,
        memory=4 * 2**30,
        storage=str(60 * 2**30),
        network="cocoon-dhcp",
        windows=True,
        cpu_weight=39,
        cpu_quota_us=250_000,
        cpu_period_us=100_000,
    )


def test_without_resources_the_tool_decides():
    assert spec(image="x").run_spec() == RunSpec(name="vm-1", image="x")


def test_clone_names_the_snapshot_of_the_image_annotation_without_a_latest_tag():
    assert spec(image="base:7", backend="firecracker").clone_spec() == CloneSpec(
        name="vm-1", snapshot="base:7", firecracker=True
    )
    assert spec(image="base:latest").clone_spec().snapshot == "base"
    assert spec().clone_spec("vm-1").snapshot == "vm-1"


def test_a_clone_of_a_directory_or_of_a_fork_is_no_clone_of_the_image():
    assert spec(clone_from_dir="/srv/export").clone_from_dir == "/srv/export"
    assert spec().clone_spec(from_dir="/srv/export") == CloneSpec(name="vm-1", from_dir="/srv/export")
    assert spec(fork_from=" vm-0 ").fork_from == "vm-0"
    assert spec(image="base").clone_spec("fork-vm-0").snapshot == "fork-vm-0"


@pytest.mark.parametrize(("os", "mode"), [("linux", "mmap"), ("windows", "copy")])
def test_memory_comes_as_the_node_is_told_and_for_windows_always_by_copy(os, mode):
    assert spec(image="base", os=os).clone_spec(restore_mode="mmap").restore_mode == mode
    assert spec(image="base", os=os).clone_spec().restore_mode == ""


@pytest.mark.parametrize(
    ("resources", "weight", "quota"),
    [
        ({}, 0, 0),
        ({"requests": {"cpu": "1"}}, 39, 0),
        ({"limits": {"cpu": "2"}}, 79, 200_000),
        ({"requests": {"cpu": "250m"}, "limits": {"cpu": "1500m"}}, 10, 150_000),
        ({"requests": {"cpu": "1m"}, "limits": {"cpu": "1m"}}, 1, 1_000),
        ({"requests": {"cpu": "1000"}}, 10_000, 0),
    ],
)
def test_requests_and_limits_become_the_weight_and_quota_of_a_cgroup_for_run_and_clone_alike(resources, weight, quota):
    for order in (spec(resources, image="x").run_spec(), spec(resources, image="x").clone_spec()):
        period = 100_000 if quota else 0
        assert (order.cpu_weight, order.cpu_quota_us, order.cpu_period_us) == (weight, quota, period)


@pytest.mark.parametrize(
    ("wanted", "ours", "refused"),
    [("", "", False), ("", "a", False), ("a", "a", False), ("a", "b", True), ("a", "", True)],
)
def test_a_pod_for_another_class_of_cpus_is_refused(wanted, ours, refused):
    selector = {"cocoonstack.io/snapshot-cpu-class": wanted} if wanted else {}
    pod = {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [{}], "nodeSelector": selector}}
    try:
        PodSpec.of(pod).check_cpu_class(ours)
    except SpecError as error:
        assert refused and "cocoonstack.io/snapshot-cpu-class" in str(error)
    else:
        assert not refused


@pytest.mark.parametrize(
    ("policy", "main", "saved"),
    [
        (None, False, True),
        ("always", False, True),
        ("never", True, False),
        ("main-only", True, True),
        ("main-only", False, False),
        ("Never", False, True),  # what is not understood keeps data
    ],
)
def test_the_snapshot_policy_decides_whose_state_outlives_the_pod(policy, main, saved):
    annotations = {"vm.cocoonstack.io/name": "vk-team-box-0" if main else "vk-team-box-1"}
    annotations |= {"cocoonset.cocoonstack.io/snapshot-policy": policy} if policy else {}
    owner = {"kind": "CocoonSet", "name": "box"}
    pod = {"metadata": {"name": "p-0", "namespace": "team", "annotations": annotations, "ownerReferences": [owner]}}
    assert PodSpec.of(pod).saved_at_deletion is saved


def test_a_name_that_ends_in_0_is_not_the_main_of_a_set_that_does_not_own_it():
    annotations = {"vm.cocoonstack.io/name": "vk-team-box-0"}
    for owners in ([], [{"kind": "ReplicaSet", "name": "box"}], [{"kind": "CocoonSet", "name": "other"}]):
        pod = {
            "metadata": {"name": "box-0", "namespace": "team", "annotations": annotations, "ownerReferences": owners}
        }
        assert not PodSpec.of(pod).main


def test_macos_gets_an_even_number_of_cpus_and_whole_mebibytes():
    resources = {"requests": {"cpu": "3", "memory": "9000000000"}}
    order = spec(resources, managed="true", os=" MacOS ", image="tahoe", storage="100Gi")
    assert order.macos
    assert order.macos_spec(3) == MacosSpec(
        name="vm-1", image="tahoe", cpu=4, memory_mib=8583, storage=100 * 2**30, vnc=3
    )
    assert spec(managed="true", os="macos", image="tahoe").macos_spec(-1) == MacosSpec(name="vm-1", image="tahoe")


def test_an_unmanaged_pod_is_never_a_macos_guest_of_ours():
    assert not spec(os="macos").macos


@pytest.mark.parametrize("name", ["a" * 64, "-x", "a/b", "a b", ".x"])
def test_a_vm_name_that_cocoon_would_refuse_is_refused_before_any_work(name):
    with pytest.raises(SpecError, match=r"vm\.cocoonstack\.io/name"):
        spec(vm_name=name).check_name()
    spec(vm_name="a" * 63).check_name()


@pytest.mark.parametrize(
    ("order", "named"),
    [
        (lambda: spec().run_spec(), "cocoonset.cocoonstack.io/image"),
        (lambda: spec(image="x", storage="many").run_spec(), "cocoonset.cocoonstack.io/storage"),
        (lambda: spec({"limits": {"cpu": "two"}}, image="x").run_spec(), "resources.limits.cpu"),
        (lambda: spec({"limits": {"cpu": "-1"}}, image="x").run_spec(), "resources.limits.cpu"),
        (lambda: spec(image="x" * 64).clone_spec(), "cocoonset.cocoonstack.io/image"),
        (lambda: spec(clone_from_dir="relative/path").clone_from_dir, "vm.cocoonstack.io/clone-from-dir"),
        (lambda: spec(clone_from_dir="/a/../b").clone_from_dir, "vm.cocoonstack.io/clone-from-dir"),
        (lambda: spec(clone_from_dir="//a").clone_from_dir, "vm.cocoonstack.io/clone-from-dir"),
        (lambda: spec(clone_from_dir="/a/").clone_from_dir, "vm.cocoonstack.io/clone-from-dir"),
        (lambda: spec(clone_from_dir="/a", mode="run").clone_from_dir, "cocoonset.cocoonstack.io/mode"),
        (lambda: spec(clone_from_dir="/a", fork_from="vm-0").clone_from_dir, "vm.cocoonstack.io/fork-from"),
    ],
)
def test_an_order_that_cannot_be_met_names_what_is_wrong(order, named):
    with pytest.raises(SpecError) as refused:
        order()
    assert named in str(refused.value)


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("", 0), ("-1", 0), ("x", 0), ("٣", 0), ("9" * 30, 0)])
def test_a_generation_that_cannot_be_read_counts_as_zero(text, number):
    assert spec(generation=text).generation == number
