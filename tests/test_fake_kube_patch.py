"""The patches of the fake API server: strategic merge by the keys of the schema, RFC 7386 and RFC 6902."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.fake_kube_patch import PatchError, json_patch, merge_patch, strategic_merge

# Strategic merge -----------------------------------------------------------------------------------------------------


def status(**fields):
    return {"status": fields}


@pytest.mark.parametrize(
    ("kind", "path", "key"),
    [
        ("Pod", ("status", "conditions"), "type"),
        ("Pod", ("status", "podIPs"), "ip"),
        ("Pod", ("status", "hostIPs"), "ip"),
        ("Pod", ("spec", "containers"), "name"),
        ("Pod", ("spec", "volumes"), "name"),
        ("Pod", ("metadata", "ownerReferences"), "uid"),
        ("Node", ("status", "conditions"), "type"),
        ("Node", ("status", "addresses"), "type"),
    ],
)
def test_lists_with_a_merge_key_merge_and_what_is_new_comes_first(kind, path, key):
    section, name = path
    current = {section: {name: [{key: "a", "x": 1}, {key: "b", "x": 2}]}}
    patch = {section: {name: [{key: "c", "x": 3}, {key: "a", "x": 4}]}}
    merged = strategic_merge(kind, current, patch)[section][name]
    assert merged == [{key: "c", "x": 3}, {key: "a", "x": 4}, {key: "b", "x": 2}]


def test_lists_within_list_items_merge_too():
    def container(**fields):
        return {"spec": {"containers": [{"name": "c", **fields}]}}

    current = container(env=[{"name": "A", "value": "1"}], ports=[{"containerPort": 22, "name": "ssh"}])
    patch = container(env=[{"name": "B", "value": "2"}], ports=[{"containerPort": 22, "protocol": "TCP"}])
    (merged,) = strategic_merge("Pod", current, patch)["spec"]["containers"]
    assert merged["env"] == [{"name": "B", "value": "2"}, {"name": "A", "value": "1"}]
    assert merged["ports"] == [{"containerPort": 22, "name": "ssh", "protocol": "TCP"}]


@pytest.mark.parametrize(
    ("kind", "section", "name"),
    [
        ("Pod", "status", "containerStatuses"),
        ("Pod", "status", "initContainerStatuses"),
        ("Pod", "spec", "tolerations"),
        ("Node", "spec", "taints"),
    ],
)
def test_lists_without_a_merge_key_are_replaced(kind, section, name):
    merged = strategic_merge(kind, {section: {name: [{"name": "a"}]}}, {section: {name: [{"name": "b"}]}})
    assert merged == {section: {name: [{"name": "b"}]}}


def test_finalizers_are_a_set():
    current = {"metadata": {"finalizers": ["a", "b"]}}
    merged = strategic_merge("Pod", current, {"metadata": {"finalizers": ["b", "c", "c"]}})
    assert merged["metadata"]["finalizers"] == ["a", "b", "c"]
    merged = strategic_merge("Pod", merged, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a", "x"]}})
    assert merged["metadata"]["finalizers"] == ["b", "c"]


def test_null_removes_at_any_depth():
    current = {"metadata": {"labels": {"a": "1", "b": "2"}}, "status": {"podIP": "10.0.0.1", "phase": "Running"}}
    patch = {"metadata": {"labels": {"a": None, "new": None}}, "status": {"podIP": None, "message": None}}
    merged = strategic_merge("Pod", current, patch)
    assert merged == {"metadata": {"labels": {"b": "2"}}, "status": {"phase": "Running"}}


def test_null_in_a_list_item_removes_its_field():
    current = status(conditions=[{"type": "Ready", "status": "False", "reason": "PingTimeout"}])
    merged = strategic_merge("Pod", current, status(conditions=[{"type": "Ready", "status": "True", "reason": None}]))
    assert merged == status(conditions=[{"type": "Ready", "status": "True"}])


def test_null_leaves_no_trace_in_what_is_new():
    merged = strategic_merge("Pod", {}, status(conditions=[{"type": "Ready", "reason": None}], podIP=None))
    assert merged == status(conditions=[{"type": "Ready"}])


@pytest.mark.parametrize("position", [0, 1])
def test_a_replace_directive_anywhere_in_a_list_replaces_it_whole(position):
    items = [{"ip": "10.0.0.2"}]
    items.insert(position, {"$patch": "replace"})
    merged = strategic_merge("Pod", status(podIPs=[{"ip": "10.0.0.1"}]), status(podIPs=items))
    assert merged == status(podIPs=[{"ip": "10.0.0.2"}])


def test_a_replace_directive_alone_empties_the_list():
    merged = strategic_merge("Pod", status(podIPs=[{"ip": "10.0.0.1"}]), status(podIPs=[{"$patch": "replace"}]))
    assert merged == status(podIPs=[])


def test_a_delete_directive_removes_one_item():
    current = status(conditions=[{"type": "A"}, {"type": "B"}])
    merged = strategic_merge("Pod", current, status(conditions=[{"type": "A", "$patch": "delete"}, {"type": "C"}]))
    assert merged == status(conditions=[{"type": "C"}, {"type": "B"}])


def test_directives_on_objects():
    current = {"spec": {"nodeSelector": {"a": "1"}, "priority": 1}}
    merged = strategic_merge("Pod", current, {"spec": {"nodeSelector": {"$patch": "replace", "b": "2"}}})
    assert merged["spec"] == {"nodeSelector": {"b": "2"}, "priority": 1}
    assert strategic_merge("Pod", current, {"spec": {"$patch": "delete"}}) == {"spec": {}}


def test_retain_keys_drops_the_others():
    current = {"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    patch = {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/x"}, "$retainKeys": ["name", "hostPath"]}]}}
    merged = strategic_merge("Pod", current, patch)
    assert merged["spec"]["volumes"] == [{"name": "v", "hostPath": {"path": "/x"}}]


def test_the_order_of_elements_is_not_stored():
    patch = status(**{"$setElementOrder/conditions": [{"type": "B"}, {"type": "A"}], "conditions": [{"type": "B"}]})
    merged = strategic_merge("Pod", status(conditions=[{"type": "A"}]), patch)
    assert merged == status(conditions=[{"type": "B"}, {"type": "A"}])


def test_items_that_share_a_merge_key_survive_a_patch_of_others():
    current = {
        "status": {"addresses": [{"type": "InternalIP", "address": "a"}, {"type": "InternalIP", "address": "b"}]}
    }
    patch = {"status": {"addresses": [{"type": "Hostname", "address": "n1"}]}}
    merged = strategic_merge("Node", current, patch)["status"]["addresses"]
    assert [item["address"] for item in merged] == ["n1", "a", "b"]


def test_an_item_without_its_merge_key_is_refused():
    with pytest.raises(PatchError, match="does not contain declared merge key: type"):
        strategic_merge("Pod", {}, status(conditions=[{"status": "True"}]))


@pytest.mark.parametrize(
    "patch", [[], "x", {"$patch": "explode"}, {"spec": {"$retainKeys": "x"}}, {"$deleteFromPrimitiveList/x": 1}]
)
def test_a_malformed_strategic_patch_is_called_so(patch):
    with pytest.raises(PatchError) as caught:
        strategic_merge("Pod", {}, patch)
    assert caught.value.malformed


def test_the_arguments_are_left_alone():
    current = status(conditions=[{"type": "A", "status": "True"}])
    patch = status(conditions=[{"type": "A", "status": "False"}], podIP=None)
    before = copy.deepcopy((current, patch))
    strategic_merge("Pod", current, patch)
    assert (current, patch) == before


# Merge patch ---------------------------------------------------------------------------------------------------------

# The examples of RFC 7386, appendix A.
RFC_7386 = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"a": "foo"}, None, None),
    ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]


@pytest.mark.parametrize(("current", "patch", "result"), RFC_7386)
def test_merge_patch_follows_its_rfc(current, patch, result):
    assert merge_patch(current, patch) == result


def json_values(leaf):
    keys = st.text("ab~/0", max_size=2)
    return st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    )


plain = json_values(st.booleans() | st.integers(-2, 2) | st.text("ab", max_size=2))


@given(plain, plain)
def test_a_merge_patch_without_nulls_can_be_applied_twice(current, patch):
    once = merge_patch(current, patch)
    assert merge_patch(once, patch) == once


# JSON patch ----------------------------------------------------------------------------------------------------------


def op(name, path, **more):
    return {"op": name, "path": path, **{key.rstrip("_"): value for key, value in more.items()}}


@pytest.mark.parametrize(
    ("current", "operations", "result"),
    [
        ({"a": 1}, [op("add", "/b", value=2)], {"a": 1, "b": 2}),
        ({"a": [1, 3]}, [op("add", "/a/1", value=2)], {"a": [1, 2, 3]}),
        ({"a": [1]}, [op("add", "/a/-", value=2)], {"a": [1, 2]}),
        ({"a": [1]}, [op("add", "/a/1", value=2)], {"a": [1, 2]}),
        ({"a": 1}, [op("add", "/a", value={"b": 2})], {"a": {"b": 2}}),
        ({"a": 1}, [op("add", "", value=[1])], [1]),
        ({"a": 1, "b": 2}, [op("remove", "/a")], {"b": 2}),
        ({"a": [1, 2, 3]}, [op("remove", "/a/1")], {"a": [1, 3]}),
        ({"a": [1, 2]}, [op("replace", "/a/0", value=9)], {"a": [9, 2]}),
        ({"a": 1}, [op("replace", "", value={})], {}),
        ({"a": {"b": 1}}, [op("move", "/c", from_="/a/b")], {"a": {}, "c": 1}),
        ({"a": [1, 2, 3]}, [op("move", "/a/2", from_="/a/0")], {"a": [2, 3, 1]}),
        ({"a": {"b": 1}}, [op("copy", "/c", from_="/a")], {"a": {"b": 1}, "c": {"b": 1}}),
        ({"a": 1}, [op("move", "/a", from_="/a")], {"a": 1}),
        ({"a/b": 1, "m~n": 2}, [op("remove", "/a~1b"), op("test", "/m~0n", value=2)], {"m~n": 2}),
        ({"~1": 1}, [op("remove", "/~01")], {}),
        ({"": 1}, [op("replace", "/", value=2)], {"": 2}),
        ({"a": {"x": [1, {"y": None}]}}, [op("test", "/a", value={"x": [1, {"y": None}]})], None),
    ],
)
def test_json_patch_operations(current, operations, result):
    assert json_patch(current, operations) == (current if result is None else result)


@pytest.mark.parametrize(
    "operation",
    [
        op("remove", "/nope"),
        op("replace", "/nope", value=1),
        op("add", "/nope/deep", value=1),
        op("add", "/list/3", value=1),
        op("add", "/list/01", value=1),
        op("remove", "/list/-"),
        op("test", "/flag", value=1),
        op("test", "/list", value=[1]),
        op("move", "/object/inside", from_="/object"),
        op("copy", "/x", from_="/nope"),
        op("remove", ""),
    ],
)
def test_a_json_patch_that_does_not_fit_changes_nothing(operation):
    current = {"flag": True, "list": [1, 2], "object": {"inside": 1}}
    before = copy.deepcopy(current)
    with pytest.raises(PatchError) as caught:
        json_patch(current, [op("add", "/new", value=1), operation])
    assert not caught.value.malformed
    assert current == before


@pytest.mark.parametrize(
    "operations",
    [{}, [1], [{"op": "add"}], [op("add", "/a")], [op("nope", "/a")], [op("add", "a", value=1)], [op("move", "/a")]],
)
def test_a_malformed_json_patch_is_called_so(operations):
    with pytest.raises(PatchError) as caught:
        json_patch({"a": 1}, operations)
    assert caught.value.malformed


def pointers(value, prefix=""):
    """A pointer to every place in a document."""
    yield prefix
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from pointers(item, f"{prefix}/{str(key).replace('~', '~0').replace('/', '~1')}")


@given(plain)
def test_every_place_of_a_document_can_be_tested_and_replaced(document):
    for pointer in pointers(document):
        marked = json_patch(document, [op("replace", pointer, value="marked")])
        assert json_patch(marked, [op("test", pointer, value="marked")]) == marked
        if pointer:
            assert len(list(pointers(json_patch(document, [op("remove", pointer)])))) < len(list(pointers(document)))
