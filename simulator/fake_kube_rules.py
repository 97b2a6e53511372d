"""What the API server does to an object on its way into the store: defaults, isolation of status and spec, validation.

One function per moment, each given the old object (never changed) and a new one it may fill: ``on_create``,
``on_update``. They hold no state and read no clock. ``simulator.fake_kube_store`` calls them between decoding and
storing.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from typing import Any

from simulator.fake_kube_resources import Target, invalid

__all__ = ["check_name", "is_terminal", "on_create", "on_update"]

Object = dict[str, Any]

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_TOTAL_ANNOTATION_SIZE = 256 * 1024

# What a running pod may still change about its spec, in the order the original names it.
_MUTABLE_SPEC = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)

# The admission plug-in of a real cluster gives every pod five minutes on a node that went silent.
_NOT_READY_TOLERATIONS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def on_create(target: Target, new: Object) -> None:
    """Fill defaults of a new object and refuse what cannot be; ``target`` carries its final name."""
    check_name(target)
    _check_metadata(target, new)
    if target.resource.plural == "pods":
        _create_pod(target, new)
    elif target.resource.plural == "nodes":
        _default_node(new)
    elif target.resource.plural == "namespaces":
        new["spec"] = {"finalizers": ["kubernetes"]}
        new["status"] = {"phase": "Active"}
        new["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = target.name
    _check_content(target, new)


def on_update(target: Target, old: Object, new: Object) -> None:
    """Put back what this request must not touch, refuse what it must not change."""
    _check_metadata(target, new)
    plural, status = target.resource.plural, target.subresource == "status"
    if plural == "pods":
        (_update_pod_status if status else _update_pod)(target, old, new)
    elif plural in ("nodes", "namespaces", "services"):
        # A namespace lets go of its finalizers through its own subresource only.
        frozen = ("spec",) if status else ("spec", "status") if plural == "namespaces" else ("status",)
        for key in frozen if target.subresource != "finalize" else ("status",):
            _restore(new, old, key)
        if plural == "nodes":
            _default_node(new)
            _check_node(target, old, new)
    _check_content(target, new)


def is_terminal(pod: Object) -> bool:
    """Succeeded or Failed: a pod that never runs again."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _restore(new: Object, old: Object, key: str) -> None:
    if key in old:
        new[key] = old[key]
    else:
        new.pop(key, None)


# Names and metadata --------------------------------------------------------------------------------------------------


def check_name(target: Target) -> None:
    shape, length = (_LABEL, 63) if target.resource.plural in ("namespaces", "services") else (_SUBDOMAIN, 253)
    if len(target.name) > length or shape.fullmatch(target.name) is None:
        rule = "RFC 1123 label" if length == 63 else "RFC 1123 subdomain"
        sentence = (
            f'Invalid value: "{target.name}": a lowercase {rule} must consist of lower case alphanumeric characters'
        )
        raise invalid(target, "metadata.name", sentence)


def _check_metadata(target: Target, new: Object) -> None:
    metadata = new["metadata"]
    for key, value in metadata.get("labels", {}).items():
        if _LABEL_KEY.fullmatch(key) is None:
            raise invalid(target, "metadata.labels", f'Invalid value: "{key}": name part must be valid')
        if len(value) > 63 or _LABEL_VALUE.fullmatch(value) is None:
            raise invalid(
                target, "metadata.labels", f'Invalid value: "{value}": a valid label must be at most 63 characters'
            )
    annotations = metadata.get("annotations", {})
    for key in annotations:
        if _LABEL_KEY.fullmatch(key.lower()) is None:
            raise invalid(target, "metadata.annotations", f'Invalid value: "{key}": name part must be valid')
    if sum(len(key) + len(value.encode()) for key, value in annotations.items()) > _TOTAL_ANNOTATION_SIZE:
        sentence = f"Too long: may not be more than {_TOTAL_ANNOTATION_SIZE} bytes"
        raise invalid(target, "metadata.annotations", sentence, "FieldValueTooLong")


def _check_content(target: Target, new: Object) -> None:
    if target.resource.plural == "leases":
        _check_lease(target, new["spec"])
    elif target.resource.plural == "secrets":
        _encode_secret(new)
    elif target.resource.plural == "events":
        _check_event(target, new)


def _encode_secret(secret: Object) -> None:
    secret.setdefault("type", "Opaque")
    plain = secret.pop("stringData", {})
    if plain:
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in plain.items()}
        secret["data"] = {**secret.get("data", {}), **encoded}


def _check_lease(target: Target, spec: Object) -> None:
    duration = spec.get("leaseDurationSeconds", 1)
    if duration <= 0:
        raise invalid(target, "spec.leaseDurationSeconds", f"Invalid value: {duration}: must be greater than 0")
    if spec.get("holderIdentity", "x") == "":
        raise invalid(target, "spec.holderIdentity", 'Invalid value: "": must not be empty')
    transitions = spec.get("leaseTransitions", 0)
    if transitions < 0:
        sentence = f"Invalid value: {transitions}: must be greater than or equal to 0"
        raise invalid(target, "spec.leaseTransitions", sentence)


def _check_event(target: Target, event: Object) -> None:
    # Events about things without a namespace, such as nodes, live in "default".
    wanted = event["involvedObject"].get("namespace") or "default"
    if wanted != target.namespace:
        given = event["involvedObject"].get("namespace", "")
        raise invalid(target, "involvedObject.namespace", f'Invalid value: "{given}": does not match event.namespace')


# Nodes ---------------------------------------------------------------------------------------------------------------


def _default_node(node: Object) -> None:
    status = node["status"]
    if "capacity" in status and "allocatable" not in status:
        status["allocatable"] = dict(status["capacity"])


def _check_node(target: Target, old: Object, new: Object) -> None:
    before, after = old["spec"].get("providerID", ""), new["spec"].get("providerID", "")
    if before and before != after:
        raise invalid(target, "spec.providerID", "Forbidden: node updates may not change providerID except from empty")
    seen = set()
    for index, address in enumerate(new["status"].get("addresses", [])):
        pair = (address["type"], address["address"])
        if pair in seen:
            sentence = f'Duplicate value: "{pair[0]} {pair[1]}"'
            raise invalid(target, f"status.addresses[{index}]", sentence, "FieldValueDuplicate")
        seen.add(pair)


# Pods: spec ----------------------------------------------------------------------------------------------------------


def _create_pod(target: Target, pod: Object) -> None:
    spec = pod["spec"]
    if not spec.get("containers"):
        raise invalid(target, "spec.containers", "Required value", "FieldValueRequired")
    _default_pod_spec(spec)
    _check_containers(target, spec)
    pod["metadata"]["generation"] = 1
    pod["status"] = {"phase": "Pending", "qosClass": _qos_class(spec)}


def _default_pod_spec(spec: Object) -> None:
    defaults: Object = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
        "serviceAccountName": "default",
    }
    for key, value in defaults.items():
        spec.setdefault(key, value)
    spec["serviceAccount"] = spec["serviceAccountName"]
    if spec["terminationGracePeriodSeconds"] < 0:
        spec["terminationGracePeriodSeconds"] = 1
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("imagePullPolicy", _pull_policy(container.get("image", "")))
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")
    _tolerate_silent_nodes(spec)


def _pull_policy(image: str) -> str:
    name = image.rpartition("/")[2].partition("@")[0]
    return "Always" if ":" not in name or name.endswith(":latest") else "IfNotPresent"


def _tolerate_silent_nodes(spec: Object) -> None:
    tolerations = list(spec.get("tolerations", ()))
    for key in _NOT_READY_TOLERATIONS:
        if not any(
            item.get("key", key) == key and item.get("effect", "NoExecute") == "NoExecute" for item in tolerations
        ):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    spec["tolerations"] = tolerations


def _check_containers(target: Target, spec: Object) -> None:
    names: set[str] = set()
    for index, container in enumerate(spec["containers"]):
        path = f"spec.containers[{index}]"
        if not container["name"]:
            raise invalid(target, f"{path}.name", "Required value", "FieldValueRequired")
        if _LABEL.fullmatch(container["name"]) is None:
            raise invalid(target, f"{path}.name", f'Invalid value: "{container["name"]}": a lowercase RFC 1123 label')
        if container["name"] in names:
            raise invalid(target, f"{path}.name", f'Duplicate value: "{container["name"]}"', "FieldValueDuplicate")
        if not container.get("image"):
            raise invalid(target, f"{path}.image", "Required value", "FieldValueRequired")
        names.add(container["name"])
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        sentence = f'Unsupported value: "{spec["restartPolicy"]}": supported values: "Always", "Never", "OnFailure"'
        raise invalid(target, "spec.restartPolicy", sentence, "FieldValueNotSupported")


def _qos_class(spec: Object) -> str:
    resources = [container["resources"] for container in spec["containers"]]
    if not any(item.get("requests") or item.get("limits") for item in resources):
        return "BestEffort"
    for item in resources:
        limits = item.get("limits", {})
        requests = item.get("requests", limits)
        if any(limits.get(name) is None or limits[name] != requests.get(name) for name in ("cpu", "memory")):
            return "Burstable"
    return "Guaranteed"


def _update_pod(target: Target, old: Object, new: Object) -> None:
    _restore(new, old, "status")
    _default_pod_spec(new["spec"])
    before, after = old["spec"], new["spec"]
    if before.get("nodeName", "") != after.get("nodeName", ""):
        raise invalid(target, "spec", f"Forbidden: {_MUTABLE_SPEC}", "FieldValueForbidden")
    if _frozen(before) != _frozen(after) or not _only_added(before, after):
        raise invalid(target, "spec", f"Forbidden: {_MUTABLE_SPEC}", "FieldValueForbidden")


def _frozen(spec: Object) -> Object:
    """The spec without what may change."""
    rest = {key: value for key, value in spec.items() if key not in ("activeDeadlineSeconds", "tolerations")}
    for name in ("containers", "initContainers"):
        if name in rest:
            rest[name] = [{key: value for key, value in item.items() if key != "image"} for item in rest[name]]
    return rest


def _only_added(before: Object, after: Object) -> bool:
    tolerations = after.get("tolerations", [])
    return all(item in tolerations for item in before.get("tolerations", []))


# Pods: status --------------------------------------------------------------------------------------------------------


def _update_pod_status(target: Target, old: Object, new: Object) -> None:
    _restore(new, old, "spec")
    _restore(new["metadata"], old["metadata"], "ownerReferences")
    before, after = old["status"], new["status"]
    after["qosClass"] = before["qosClass"]
    if "observedGeneration" in before:
        after.setdefault("observedGeneration", before["observedGeneration"])
    _settle_pod_ips(after)
    _check_ips(target, after)
    _check_transitions(target, old["spec"]["restartPolicy"], before, after)


def _settle_pod_ips(status: Object) -> None:
    """podIP is authoritative over podIPs, and is filled from it when it is absent."""
    first = (status.get("podIPs") or [{}])[0].get("ip", "")
    address = status.get("podIP", "")
    if address and address != first:
        status["podIPs"] = [{"ip": address}]
    elif first:
        status["podIP"] = first


def _check_ips(target: Target, status: Object) -> None:
    for field in ("podIPs", "hostIPs"):
        versions = []
        for index, item in enumerate(status.get(field, [])):
            try:
                versions.append(ipaddress.ip_address(item["ip"]).version)
            except ValueError:
                sentence = (
                    f'Invalid value: "{item["ip"]}": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)'
                )
                raise invalid(target, f"status.{field}[{index}]", sentence) from None
        if len(versions) != len(set(versions)):
            written = ",".join(f'{{"IP":"{item["ip"]}"}}' for item in status[field])
            sentence = f"Invalid value: [{written}]: may specify no more than one IP for each IP family"
            raise invalid(target, f"status.{field}", sentence)
    hosts = status.get("hostIPs", [])
    if hosts and hosts[0]["ip"] != status.get("hostIP", ""):
        sentence = f'Invalid value: "{hosts[0]["ip"]}": must be equal to `hostIP`'
        raise invalid(target, "status.hostIPs[0].ip", sentence)


def _check_transitions(target: Target, policy: str, before: Object, after: Object) -> None:
    """A container that ended for good stays ended."""
    if policy == "Always":
        return
    states = {item["name"]: item["state"] for item in after.get("containerStatuses", [])}
    for index, item in enumerate(before.get("containerStatuses", [])):
        ended = item["state"].get("terminated")
        if ended is None or (policy == "OnFailure" and ended["exitCode"] != 0):
            continue
        if "terminated" not in states.get(item["name"], {"terminated": {}}):
            field = f"status.containerStatuses[{index}].state"
            sentence = "Forbidden: may not be transitioned to non-terminated state"
            raise invalid(target, field, sentence, "FieldValueForbidden")
