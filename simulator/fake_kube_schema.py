"""What the fake API server knows about the shape of objects: one table, five uses.

A real API server decodes every body into typed structures, and much that surprises its clients happens there: unknown
fields vanish, empty strings are not stored, times lose their fractions, a number where a string belongs is refused.
A fake that keeps whatever JSON it is given hides all of it, so the table below drives

- decoding (``decode``): types, pruning, what "empty" means for a field, formats of times;
- field validation, which is what kubectl asks for when it creates or applies something;
- strategic merge: which lists merge, and by which key (``simulator.fake_kube_patch``);
- the OpenAPI document kubectl and ``kubectl explain`` read (``simulator.fake_kube_openapi``).

Notation, one entry per field: ``name:type``, with a suffix. ``T[]`` is a list that a patch replaces, ``T[key]`` a list
that merges by that key, ``string[*]`` a list of strings that merges as a set. ``map`` maps strings to strings,
``quantities`` strings to quantities; ``any`` is kept as it is. ``!`` is written even when empty, ``?`` is kept when it
was given though it is empty (a pointer in the original), and anything else disappears when empty. Deep parts of a pod
that nothing here acts on (volume sources, probes, affinity) are ``any``.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any

__all__ = ["SCHEMA", "DecodeError", "Field", "decode", "fields_of"]

Object = dict[str, Any]

_OBJECT = "apiVersion:string kind:string metadata:ObjectMeta!"
_SCALARS = frozenset({"string", "int", "bool", "time", "microtime", "quantity", "intstr", "map", "quantities", "any"})

_DEFINITIONS = {
    "ObjectMeta": (
        "name:string generateName:string namespace:string selfLink:string uid:string resourceVersion:string"
        " generation:int creationTimestamp:time! deletionTimestamp:time deletionGracePeriodSeconds:int? labels:map"
        " annotations:map ownerReferences:OwnerReference[uid] finalizers:string[*] managedFields:any"
    ),
    "OwnerReference": (
        "apiVersion:string! kind:string! name:string! uid:string! controller:bool? blockOwnerDeletion:bool?"
    ),
    "Namespace": f"{_OBJECT} spec:NamespaceSpec! status:NamespaceStatus!",
    "NamespaceSpec": "finalizers:string[]",
    "NamespaceStatus": "phase:string conditions:any",
    "Node": f"{_OBJECT} spec:NodeSpec! status:NodeStatus!",
    "NodeSpec": (
        "podCIDR:string podCIDRs:string[*] providerID:string unschedulable:bool taints:Taint[] configSource:any"
    ),
    "Taint": "key:string! value:string effect:string! timeAdded:time",
    "NodeStatus": (
        "capacity:quantities allocatable:quantities phase:string conditions:NodeCondition[type]"
        " addresses:NodeAddress[type] daemonEndpoints:NodeDaemonEndpoints! nodeInfo:NodeSystemInfo! images:any"
        " volumesInUse:string[] volumesAttached:any config:any runtimeHandlers:any features:any"
        " declaredFeatures:string[]"
    ),
    "NodeCondition": (
        "type:string! status:string! lastHeartbeatTime:time! lastTransitionTime:time! reason:string message:string"
    ),
    "NodeAddress": "type:string! address:string!",
    "NodeDaemonEndpoints": "kubeletEndpoint:DaemonEndpoint!",
    "DaemonEndpoint": "Port:int!",
    "NodeSystemInfo": (
        "machineID:string! systemUUID:string! bootID:string! kernelVersion:string! osImage:string!"
        " containerRuntimeVersion:string! kubeletVersion:string! kubeProxyVersion:string! operatingSystem:string!"
        " architecture:string! swap:any"
    ),
    "Pod": f"{_OBJECT} spec:PodSpec! status:PodStatus!",
    "PodSpec": (
        "volumes:Volume[name] initContainers:Container[name] containers:Container[name]!"
        " ephemeralContainers:any restartPolicy:string terminationGracePeriodSeconds:int?"
        " activeDeadlineSeconds:int? dnsPolicy:string nodeSelector:map serviceAccountName:string"
        " serviceAccount:string automountServiceAccountToken:bool? nodeName:string hostNetwork:bool"
        " hostPID:bool hostIPC:bool shareProcessNamespace:bool? securityContext:any"
        " imagePullSecrets:LocalObjectReference[name] hostname:string subdomain:string affinity:any"
        " schedulerName:string tolerations:Toleration[] hostAliases:HostAlias[ip] priorityClassName:string"
        " priority:int? dnsConfig:any readinessGates:PodReadinessGate[] runtimeClassName:string?"
        " enableServiceLinks:bool? preemptionPolicy:string? overhead:quantities topologySpreadConstraints:any"
        " setHostnameAsFQDN:bool? os:any hostUsers:bool? schedulingGates:SchedulingGate[name]"
        " resourceClaims:any resources:any hostnameOverride:string? workloadRef:any"
    ),
    "LocalObjectReference": "name:string",
    "HostAlias": "ip:string! hostnames:string[]",
    "PodReadinessGate": "conditionType:string!",
    "SchedulingGate": "name:string!",
    "Toleration": "key:string operator:string value:string effect:string tolerationSeconds:int?",
    "Volume": (
        "name:string! hostPath:any emptyDir:any gcePersistentDisk:any awsElasticBlockStore:any gitRepo:any secret:any"
        " nfs:any iscsi:any glusterfs:any persistentVolumeClaim:any rbd:any flexVolume:any cinder:any cephfs:any"
        " flocker:any downwardAPI:any fc:any azureFile:any configMap:any vsphereVolume:any quobyte:any azureDisk:any"
        " photonPersistentDisk:any projected:any portworxVolume:any scaleIO:any storageos:any csi:any ephemeral:any"
        " image:any"
    ),
    "Container": (
        "name:string! image:string command:string[] args:string[] workingDir:string ports:ContainerPort[containerPort]"
        " envFrom:any env:EnvVar[name] resources:ResourceRequirements! resizePolicy:any restartPolicy:string?"
        " restartPolicyRules:any volumeMounts:VolumeMount[mountPath] volumeDevices:any livenessProbe:any"
        " readinessProbe:any startupProbe:any lifecycle:any terminationMessagePath:string"
        " terminationMessagePolicy:string imagePullPolicy:string securityContext:any stdin:bool stdinOnce:bool tty:bool"
    ),
    "ContainerPort": "name:string hostPort:int containerPort:int! protocol:string hostIP:string",
    "EnvVar": "name:string! value:string valueFrom:any",
    "VolumeMount": (
        "name:string! readOnly:bool recursiveReadOnly:string? mountPath:string! subPath:string mountPropagation:string?"
        " subPathExpr:string"
    ),
    "ResourceRequirements": "limits:quantities requests:quantities claims:any",
    "PodStatus": (
        "observedGeneration:int phase:string conditions:PodCondition[type] message:string reason:string"
        " nominatedNodeName:string hostIP:string hostIPs:HostIP[ip] podIP:string podIPs:PodIP[ip] startTime:time"
        " initContainerStatuses:ContainerStatus[] containerStatuses:ContainerStatus[] qosClass:string"
        " ephemeralContainerStatuses:ContainerStatus[] resize:string resourceClaimStatuses:any"
        " extendedResourceClaimStatus:any allocatedResources:quantities resources:any"
    ),
    "PodCondition": (
        "type:string! observedGeneration:int status:string! lastProbeTime:time! lastTransitionTime:time! reason:string"
        " message:string"
    ),
    "HostIP": "ip:string!",
    "PodIP": "ip:string!",
    "ContainerStatus": (
        "name:string! state:ContainerState! lastState:ContainerState! ready:bool! restartCount:int! image:string!"
        " imageID:string! containerID:string started:bool? allocatedResources:quantities resources:any volumeMounts:any"
        " user:any allocatedResourcesStatus:any stopSignal:string?"
    ),
    "ContainerState": (
        "waiting:ContainerStateWaiting running:ContainerStateRunning terminated:ContainerStateTerminated"
    ),
    "ContainerStateWaiting": "reason:string message:string",
    "ContainerStateRunning": "startedAt:time!",
    "ContainerStateTerminated": (
        "exitCode:int! signal:int reason:string message:string startedAt:time! finishedAt:time! containerID:string"
    ),
    "Event": (
        f"{_OBJECT} involvedObject:ObjectReference! reason:string message:string source:EventSource!"
        " firstTimestamp:time! lastTimestamp:time! count:int type:string eventTime:microtime! series:EventSeries"
        " action:string related:ObjectReference reportingComponent:string! reportingInstance:string!"
    ),
    "ObjectReference": (
        "kind:string namespace:string name:string uid:string apiVersion:string resourceVersion:string fieldPath:string"
    ),
    "EventSource": "component:string host:string",
    "EventSeries": "count:int lastObservedTime:microtime!",
    "ConfigMap": f"{_OBJECT} data:map binaryData:map immutable:bool?",
    "Secret": f"{_OBJECT} data:map stringData:map type:string immutable:bool?",
    "ServiceAccount": f"{_OBJECT} secrets:any imagePullSecrets:any automountServiceAccountToken:bool?",
    "Service": f"{_OBJECT} spec:any status:any",
    "Endpoints": f"{_OBJECT} subsets:any",
    "Lease": f"{_OBJECT} spec:LeaseSpec!",
    "LeaseSpec": (
        "holderIdentity:string? leaseDurationSeconds:int? acquireTime:microtime renewTime:microtime"
        " leaseTransitions:int? strategy:string? preferredHolder:string?"
    ),
    "TokenReview": f"{_OBJECT} spec:any status:any",
    "SubjectAccessReview": f"{_OBJECT} spec:any status:any",
    "SelfSubjectAccessReview": f"{_OBJECT} spec:any status:any",
}

_FIELD = re.compile(r"(\w+):(\w+)(?:\[([\w*]*)\])?([!?]?)")

# Go's layouts: a time may carry a fraction of any length and loses it, a MicroTime must carry exactly six digits.
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_ZERO_TIME = datetime(1, 1, 1, tzinfo=UTC)
_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")


class DecodeError(Exception):
    """A body that does not fit the type of its kind; the text is the reason a client is shown."""


@dataclass(frozen=True)
class Field:
    """One field of a type: what it holds and how a patch and an empty value treat it."""

    type: str
    is_list: bool
    merge_key: str  # "" replaces the list, "*" merges strings as a set
    always: bool
    pointer: bool

    @cached_property
    def is_struct(self) -> bool:
        return self.type not in _SCALARS

    @cached_property
    def is_text(self) -> bool:
        return self.type == "string" and not self.is_list


def _parse(definition: str) -> dict[str, Field]:
    fields = {}
    for entry in definition.split():
        match = _FIELD.fullmatch(entry)
        assert match is not None, entry
        name, type_, merge_key, suffix = match.groups()
        fields[name] = Field(type_, merge_key is not None, merge_key or "", suffix == "!", suffix == "?")
    return fields


SCHEMA: dict[str, dict[str, Field]] = {name: _parse(text) for name, text in _DEFINITIONS.items()}


def fields_of(type_name: str) -> dict[str, Field]:
    """The fields of a type; none for a scalar or a part kept as it is."""
    return SCHEMA.get(type_name, {})


def decode(kind: str, body: Object) -> tuple[Object, list[str]]:
    """The object as a typed server stores it, and the paths of the fields it does not know (and drops).

    Raises ``DecodeError`` for a value of the wrong type. The result is new; nothing of ``body`` is shared but scalars.
    """
    unknown: list[str] = []
    return _struct(kind, body, "", unknown), unknown


def _struct(type_name: str, value: Any, path: str, unknown: list[str]) -> Object:
    if not isinstance(value, dict):
        raise DecodeError(
            f"json: cannot unmarshal {_go_name(value)} into Go struct field {path} of type v1.{type_name}"
        )
    fields = SCHEMA[type_name]
    result: Object = {}
    for name, item in value.items():
        field = fields.get(name)
        if field is not None and field.is_text and type(item) is str:  # most of what there is
            if item or field.always or field.pointer:
                result[name] = item
            continue
        here = f"{path}.{name}" if path else str(name)
        if field is None:
            unknown.append(here)
            continue
        decoded = None if item is None else _field(field, item, here, unknown)
        if field.always or not _is_empty(field, decoded):
            result[name] = _zero(field, unknown) if decoded is None else decoded
    for name, field in fields.items():
        if field.always and name not in result:
            result[name] = _zero(field, unknown)
    return result


def _zero(field: Field, unknown: list[str]) -> Any:
    if field.is_list or field.type in ("time", "microtime"):
        return None
    if field.is_struct:
        return _struct(field.type, {}, "", unknown)
    return {"int": 0, "bool": False}.get(field.type, "")


def _is_empty(field: Field, value: Any) -> bool:
    if value is None:
        return True
    if field.pointer or (not field.is_list and (field.is_struct or field.type in ("any", "time", "microtime"))):
        return False
    return not value


def _field(field: Field, value: Any, path: str, unknown: list[str]) -> Any:
    if not field.is_list:
        return _value(field.type, value, path, unknown)
    if not isinstance(value, list):
        raise DecodeError(
            f"json: cannot unmarshal {_go_name(value)} into Go struct field {path} of type []{field.type}"
        )
    return [_value(field.type, item, f"{path}[{index}]", unknown) for index, item in enumerate(value)]


def _value(type_name: str, value: Any, path: str, unknown: list[str]) -> Any:
    if type_name not in _SCALARS:
        return _struct(type_name, value, path, unknown)
    return _DECODERS[type_name](value, path)


# Scalars -------------------------------------------------------------------------------------------------------------


def _go_name(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _mismatch(value: Any, path: str, wanted: str) -> DecodeError:
    return DecodeError(f"json: cannot unmarshal {_go_name(value)} into Go struct field {path} of type {wanted}")


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _mismatch(value, path, "string")
    return str(value)  # An enumeration of strings arrives as what it would be on the wire.


def _int(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _mismatch(value, path, "int")
    return value


def _bool(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _mismatch(value, path, "bool")
    return value


def _map(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _mismatch(value, path, "map[string]string")
    # A null value decodes to an empty string in a map, where in a structure it would be dropped.
    return {str(key): "" if item is None else _string(item, f"{path}.{key}") for key, item in value.items()}


def _quantity(value: Any, path: str) -> str:
    text = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if not isinstance(text, str) or _QUANTITY.fullmatch(text) is None:
        raise DecodeError(f"{path}: quantities must match the regular expression '{_QUANTITY.pattern}'")
    return text


def _quantities(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _mismatch(value, path, "map[string]resource.Quantity")
    return {str(key): _quantity(item, f"{path}.{key}") for key, item in value.items()}


def _int_or_string(value: Any, path: str) -> int | str:
    return value if isinstance(value, str) else _int(value, path)


def _time(value: Any, path: str) -> str | None:
    return _rewritten(_string(value, path), _TIME, "2006-01-02T15:04:05Z07:00", "seconds")


def _micro_time(value: Any, path: str) -> str | None:
    return _rewritten(_string(value, path), _MICRO_TIME, "2006-01-02T15:04:05.000000Z07:00", "microseconds")


@lru_cache(maxsize=4096)  # the times of an object are read again with each of its changes
def _rewritten(text: str, shape: re.Pattern[str], layout: str, precision: str) -> str | None:
    moment = _moment(text, shape, layout)
    # Go's zero time is "no time".
    return None if moment == _ZERO_TIME else moment.isoformat(timespec=precision).replace("+00:00", "Z")


def _moment(text: str, shape: re.Pattern[str], layout: str) -> datetime:
    if shape.fullmatch(text) is not None:
        # Nine digits of a second are legal, and more than Python's microseconds hold.
        trimmed = re.sub(r"\.(\d{1,6})\d*", r".\1", text)
        with suppress(ValueError, OverflowError):
            return datetime.fromisoformat(trimmed).astimezone(UTC)
    rest, wanted = _unparsed(text, layout)
    raise DecodeError(f'parsing time "{text}" as "{layout}": cannot parse "{rest}" as "{wanted}"')


def _unparsed(text: str, layout: str) -> tuple[str, str]:
    """Where Go gives up: the rest of the text, and the part of the layout it wanted there."""
    upto = re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", text)
    if upto is None or ".000000" not in layout:
        return text, layout
    rest = text[upto.end() :]
    return (rest[7:], "Z07:00") if re.match(r"\.\d{6}", rest) else (rest, ".000000")


def _any(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return {key: _any(item, path) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_any(item, path) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise DecodeError(f"{path}: {type(value).__name__} is not JSON")


_DECODERS = {
    "string": _string,
    "int": _int,
    "bool": _bool,
    "map": _map,
    "quantity": _quantity,
    "quantities": _quantities,
    "intstr": _int_or_string,
    "time": _time,
    "microtime": _micro_time,
    "any": _any,
}
