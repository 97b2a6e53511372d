"""The kubelet API of this node: what the API server, metrics-server and people with curl ask a node for.

    /containerLogs/NAMESPACE/POD[/UID]/CONTAINER    the log of the VM's hypervisor, all options of `kubectl logs`
    /metrics/resource, /stats/summary               what VMs and the host use
    /metrics                                        our own metrics, as on VK_METRICS_ADDR
    /metrics/cadvisor, /metrics/probes              nothing, in the right form: a 404 is a target that is down
    /pods, /runningpods/                            pods bound to this node; pods that have a VM
    /healthz
    /exec, /attach, /portForward, /run              a clear 501

Everything goes over TLS (vkcocoon_certificates) and to nobody who has not been let in (vkcocoon_access); what a client
may cost is bounded in vkcocoon_server. Nothing here changes a pod or a VM, and nothing is asked of the API server but
who may ask. Names are resolved when a request comes, so a pod that was made again is the new one; a log that is
followed belongs to one VM of one incarnation and ends with it.

Long pages are made in parts with a turn for everybody else between them, because there are probes to send.
`vkcocoon_service.serve` makes one `Kubelet`; it owns its server, and the streams that server sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from urllib.parse import parse_qs

import structlog

from vkcocoon_access import Access, Denied
from vkcocoon_certificates import Certificates
from vkcocoon_exposition import resource_metrics, summary
from vkcocoon_kube import KubeApi, Object, uid_of
from vkcocoon_probes import Clock
from vkcocoon_server import PEER, BoundedServer, Limits, Stream, listen, text_answer
from vkcocoon_stats import Stats, Subject
from vkcocoon_vmlog import BadLogQuery, LogQuery, selected
from vkcocoon_vms import VM, CommandError, VMNotFound

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

__all__ = ["HeldPod", "HeldPods", "Kubelet", "KubeletSettings", "Logs"]

# Between them room for everything else while so many logs are followed.
MOST_STREAMS = 192
LIMITS = Limits(request_bytes=64 * 1024, request_s=30.0, at_once=256)
FIRST_WORD_S = 1.0  # how long a log that is followed may be silent before its reader is told that all is well so far

TEXT = "text/plain; charset=utf-8"
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
UNSUPPORTED = {"exec": "exec", "run": "exec", "attach": "attach", "portForward": "port-forward"}

log = structlog.get_logger()


class HeldSpec(Protocol):
    @property
    def managed(self) -> bool:
        """Whether the VM is ours; else the pod's author has named one."""
        ...


class HeldPod(Protocol):
    """One incarnation of a pod as the provider holds it; to be read only."""

    @property
    def spec(self) -> HeldSpec: ...
    @property
    def uid(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def pod(self) -> Object: ...
    @property
    def vm(self) -> VM | None: ...
    @property
    def gone(self) -> bool: ...
    @property
    def status(self) -> Mapping[str, Any] | None: ...
    @property
    def reason(self) -> str: ...


class HeldPods(Protocol):
    """The provider's pods. Neither method waits."""

    def __iter__(self) -> Iterator[HeldPod]: ...
    def find(self, key: str) -> HeldPod | None: ...


class Logs(Protocol):
    """CocoonCLI.logs."""

    def __call__(self, ref: str, *, follow: bool, tail: int | None) -> Iterator[bytes]: ...


class KubeletSettings(Protocol):
    @property
    def node_name(self) -> str: ...
    @property
    def node_ip(self) -> str: ...
    @property
    def kubelet_port(self) -> int: ...
    @property
    def kubelet_auth(self) -> str: ...
    @property
    def kubelet_client_ca(self) -> str: ...
    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def cocoon_cgroup_parent(self) -> str: ...


class _Refused(Exception):
    """The request is answered with this status and sentence."""

    def __init__(self, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: str

    @property
    def segments(self) -> list[str]:
        return self.path.strip("/").split("/")


@dataclass(frozen=True, slots=True)
class _Answer:
    content_type: str
    body: list[bytes] | Stream


class Kubelet:
    """Serves the kubelet API on every interface from `start` to `close`; `address` is where it really listens then.

    `assigned` are the pods the API server has bound to this node, `logs` reads the log of a VM, `reviews` is the API
    for questions about clients (with connections of its own), `exposition` renders our own metrics. Raises SettingError
    for certificates that cannot be used; `start` raises CannotListen.
    """

    def __init__(
        self,
        settings: KubeletSettings,
        clock: Clock,
        *,
        held: HeldPods,
        assigned: Callable[[], Iterable[Object]],
        logs: Logs,
        reviews: KubeApi,
        exposition: Callable[[], bytes] = lambda: b"",
        limits: Limits = LIMITS,
        proc: str = "/proc",
        cgroup: str = "/sys/fs/cgroup",
    ) -> None:
        self.address: tuple[str, int] = ("", settings.kubelet_port)
        self._settings = settings
        self._clock = clock
        self._held = held
        self._assigned = assigned
        self._logs = logs
        self._limits = limits
        self._certificates = Certificates(
            settings.tls_cert,
            settings.tls_key,
            settings.kubelet_client_ca,
            names=[settings.node_name, "localhost", *filter(None, [settings.node_ip]), "127.0.0.1"],
            clock=clock,
        )
        self._access = None if settings.kubelet_auth == "off" else Access(reviews, clock, settings.node_name)
        self._stats = Stats(clock, self._subjects, parent=settings.cocoon_cgroup_parent, proc=proc, cgroup=cgroup)
        self._pages: dict[str, Callable[[_Request], _Answer]] = {
            "healthz": lambda _: _Answer(TEXT, [b"ok"]),
            "healthz/ping": lambda _: _Answer(TEXT, [b"ok"]),
            "metrics": lambda _: _Answer(EXPOSITION, [exposition()]),
            "metrics/cadvisor": lambda _: _Answer(EXPOSITION, []),
            "metrics/probes": lambda _: _Answer(EXPOSITION, []),
            "metrics/resource": lambda _: self._page(EXPOSITION, resource_metrics(self._stats.sample())),
            "pods": lambda _: self._page(JSON, self._pod_list()),
            "runningpods": lambda _: self._page(JSON, self._running_pods()),
            "stats/summary": self._summary,
        }
        self._streams: list[Stream] = []
        self._server: BoundedServer | None = None

    def start(self) -> None:
        listener = listen(self.address, "VK_KUBELET_PORT")
        self.address = listener.getsockname()[:2]
        self._server = BoundedServer(
            listener, self._answer, clock=self._clock, limits=self._limits, tls=self._certificates.context
        )
        self._server.start()
        log.info("serving the kubelet API", port=self.address[1], own_certificate=self._certificates.own)
        if self._access is None:
            log.warning("everybody who reaches the kubelet port is served: VK_KUBELET_AUTH is off")
        elif not self._settings.kubelet_client_ca:
            log.warning("kubectl logs will be refused: the API server shows a certificate, and no VK_KUBELET_CLIENT_CA "
                        "says whose to believe")  # fmt: skip

    def close(self) -> None:
        """Stop at once; logs that are followed end without their end."""
        if self._server is not None:
            self._server.close_all()
            self._server = None
        self._stats.close()

    # One request

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        request = _Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""))
        try:
            if self._access is not None:
                peer, authorization = environ.get(PEER), environ.get("HTTP_AUTHORIZATION", "")
                self._access.check(request.method, request.path, certificate=peer, authorization=authorization)
            answer = self._routed(request)
        except Denied as denied:
            challenge = [("WWW-Authenticate", 'Bearer realm="kubelet"')] * (denied.status == HTTPStatus.UNAUTHORIZED)
            return text_answer(environ, start_response, denied.status, str(denied), challenge)
        except BadLogQuery as bad:
            return text_answer(environ, start_response, bad.status, str(bad))
        except _Refused as refused:
            return text_answer(environ, start_response, refused.status, str(refused), refused.headers)
        start_response("200 OK", [("Content-Type", answer.content_type), ("Connection", "close")])
        return answer.body  # a Stream is for the server, see there

    def _routed(self, request: _Request) -> _Answer:
        first = request.segments[0]
        if first in UNSUPPORTED:
            self._refuse_upgrade(request)
        if first == "containerLogs":
            self._only_get(request)
            return self._container_logs(request)
        make = self._pages.get("/".join(request.segments))
        if make is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "404 page not found")
        self._only_get(request)
        return make(request)

    def _only_get(self, request: _Request) -> None:
        if request.method != "GET":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered", ("Allow", "GET"))

    def _page(self, content_type: str, parts: Iterable[bytes]) -> _Answer:
        """Made before its first byte is sent, so that its length is known and an error in it is an answer."""
        page = []
        for part in parts:
            page.append(part)
            self._clock.sleep(0)
        return _Answer(content_type, page)

    # Pods

    def _pod_list(self) -> Iterator[bytes]:
        """Pods as the API server has them, with the status we know: it may not have been delivered yet."""
        statuses = {pod.uid: pod.status for pod in self._held if pod.status is not None}
        return _listed(
            {**pod, "status": statuses.get(uid_of(pod), pod.get("status") or {})} for pod in self._assigned()
        )

    def _running_pods(self) -> Iterator[bytes]:
        return _listed(_outline(pod) for pod in self._held if pod.vm is not None and not pod.gone)

    def _target(self, request: _Request) -> tuple[HeldPod, str]:
        """The pod and the container a path is about, the container "" when it names none. Raises _Refused."""
        verb, *names = request.segments
        container = "" if verb == "portForward" else names.pop() if names else ""
        if len(names) not in (2, 3) or not all(names) or (not container and verb != "portForward"):
            raise _Refused(HTTPStatus.NOT_FOUND, "404 page not found")
        key, uid = "/".join(names[:2]), "".join(names[2:])
        pod = self._held.find(key)
        if pod is None or (uid and uid != pod.uid):
            self._refuse_unknown(key, uid)
        if container and container not in _containers(pod.pod):
            raise _Refused(HTTPStatus.NOT_FOUND, f'container "{container}" not found in pod "{key}"')
        return pod, container

    def _refuse_unknown(self, key: str, uid: str) -> NoReturn:
        for pod in self._assigned():
            metadata = pod["metadata"]
            if key == f"{metadata.get('namespace')}/{metadata.get('name')}" and uid in ("", metadata.get("uid")):
                raise _Refused(HTTPStatus.BAD_REQUEST, f'pod "{key}" has no VM yet')
        raise _Refused(HTTPStatus.NOT_FOUND, f'pod "{key}" not found')

    def _refuse_upgrade(self, request: _Request) -> NoReturn:
        if request.method not in ("GET", "POST"):
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and POST are answered", ("Allow", "GET, POST"))
        self._target(request)
        what = UNSUPPORTED[request.segments[0]]
        raise _Refused(
            HTTPStatus.NOT_IMPLEMENTED, f"{what} is not supported: the pods of this node are virtual machines"
        )

    # Logs

    def _container_logs(self, request: _Request) -> _Answer:
        pod, container = self._target(request)
        query = LogQuery.parse(request.query, self._clock.now())
        vm = pod.vm
        if vm is not None and not pod.spec.managed and vm.id in self._managed_vms():
            raise _Refused(HTTPStatus.FORBIDDEN, f'the VM that pod "{pod.key}" names is that of another pod')
        if query.previous:
            text = f'previous terminated container "{container}" in pod "{pod.key}" not found: a VM has only one log'
            raise _Refused(HTTPStatus.BAD_REQUEST, text)
        if vm is None:
            text = f'container "{container}" in pod "{pod.key}" is waiting to start: {pod.reason or "it has no VM yet"}'
            raise _Refused(HTTPStatus.BAD_REQUEST, text)
        if vm.is_macos:
            raise _Refused(HTTPStatus.NOT_IMPLEMENTED, "there is no log of a macOS guest: cocoon-macos keeps none")
        self._streams = [stream for stream in self._streams if not stream.closed]
        if len(self._streams) >= MOST_STREAMS:
            text = f"{MOST_STREAMS} logs are being read already"
            raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, text, ("Retry-After", "10"))
        return _Answer(TEXT, self._opened(pod, vm, query))

    def _opened(self, pod: HeldPod, vm: VM, query: LogQuery) -> Stream:
        """The log as a stream that has begun well. Raises _Refused."""
        needs_times = query.timestamps or query.since is not None
        started = self._stats.started(vm) if needs_times else None
        try:
            pieces = self._logs(vm.id, follow=query.follow, tail=query.tail)
            stream = Stream(
                selected(pieces, query, started=started, now=self._clock.now),
                clock=self._clock,
                name=f"log of {pod.key}",
                alive=lambda: self._is_still(pod, vm),
            )
            self._streams.append(stream)
            self._begin(stream, FIRST_WORD_S if query.follow else None)
            return stream
        except VMNotFound:
            raise _Refused(HTTPStatus.BAD_REQUEST, f'the VM of pod "{pod.key}" is gone') from None
        except CommandError as error:
            raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, f'the log of "{pod.key}": {error}') from None

    @staticmethod
    def _begin(stream: Stream, patience: float | None) -> None:
        """Open it, and leave none behind that nobody will read."""
        try:
            stream.open(patience)
        except BaseException:
            stream.close()
            raise

    def _is_still(self, pod: HeldPod, vm: VM) -> bool:
        """Whether that pod still is this incarnation with this VM."""
        return self._held.find(pod.key) is pod and pod.vm is not None and pod.vm.id == vm.id and not pod.gone

    # Numbers

    def _summary(self, request: _Request) -> _Answer:
        only = parse_qs(request.query).get("only_cpu_and_memory", [""])[0].lower() == "true"
        return self._page(JSON, summary(self._stats.sample(traffic=not only), self._settings.node_name))

    def _subjects(self) -> Iterator[Subject]:
        managed = self._managed_vms()
        for pod in self._held:
            containers, vm = _containers(pod.pod), pod.vm
            if vm is not None and vm.id and not pod.gone and containers and (pod.spec.managed or vm.id not in managed):
                namespace, _, name = pod.key.partition("/")
                yield Subject(pod.uid, namespace, name, containers[0], vm)

    def _managed_vms(self) -> set[str]:
        """The VMs of pods whose VM is ours: what an annotation says must not open them to somebody else's pod."""
        return {pod.vm.id for pod in self._held if pod.vm is not None and pod.spec.managed}


def _containers(pod: Object) -> list[str]:
    return [str(container.get("name")) for container in (pod.get("spec") or {}).get("containers") or ()]


def _outline(pod: HeldPod) -> Object:
    """A pod as the list of running ones has it: who it is, and no more."""
    namespace, _, name = pod.key.partition("/")
    containers = [
        {"name": container.get("name"), "image": container.get("image"), "resources": {}}
        for container in (pod.pod.get("spec") or {}).get("containers") or ()
    ]
    metadata = {"name": name, "namespace": namespace, "uid": pod.uid}
    return {"metadata": metadata, "spec": {"containers": containers}, "status": {}}


def _listed(pods: Iterable[Object]) -> Iterator[bytes]:
    """A PodList in parts, one pod each."""
    separator = b'{"kind":"PodList","apiVersion":"v1","metadata":{},"items":['
    for pod in pods:
        yield separator + json.dumps(pod, separators=(",", ":")).encode()
        separator = b","
    yield (separator if separator != b"," else b"") + b"]}\n"
