"""The fake API server's way to a node: the log of a container, fetched from the kubelet's own port and passed on.

As a real API server does it: the pod says which node, the node says where its kubelet listens, and what the kubelet
says no to becomes a Status with its words. A real one shows the kubelet a certificate; this one a token, which it
vouches for itself when the kubelet asks. The kubelet's certificate is not looked at, as without an authority for it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from urllib.parse import quote, urlencode

from simulator.fake_kube import FakeKube
from simulator.fake_kube_resources import Refusal, Target, bad_request, parse_path
from vkcocoon_kube import Object

__all__ = ["NodeLog", "location_of_log"]

TOKEN = "the-fake-api-server"
USER = {"username": "kube-apiserver-kubelet-client", "groups": ["system:masters"]}
CONNECT_S = 10.0
CHUNK = 64 * 1024
# What kubectl may ask of a log; the rest is between it and the API server.
OPTIONS = ("follow", "previous", "sinceSeconds", "sinceTime", "timestamps", "tailLines", "limitBytes", "stream")


def location_of_log(kube: FakeKube, target: Target, query: Mapping[str, str]) -> tuple[str, int, str] | None:
    """Host, port and path of a container's log; None for a pod that is on no node yet. Raises Refusal."""
    pod = kube.store.get(target.whole)
    container = _container(pod, query.get("container", ""))
    if not (node_name := pod["spec"].get("nodeName", "")):
        return None
    node = kube.store.get(parse_path(f"/api/v1/nodes/{node_name}"))
    addresses = [each["address"] for each in node["status"].get("addresses", []) if each["type"] == "InternalIP"]
    port = node["status"].get("daemonEndpoints", {}).get("kubeletEndpoint", {}).get("Port", 0)
    if not addresses or not port:
        raise Refusal(500, "InternalError", f"node {node_name} has no address for its kubelet")
    wanted = {name: query[name] for name in OPTIONS if name in query}
    place = "/".join(quote(part, safe="") for part in (target.namespace, target.name, container))
    return addresses[0], int(port), f"/containerLogs/{place}?{urlencode(wanted)}"


def _container(pod: Object, wanted: str) -> str:
    names: list[str] = [each["name"] for each in pod["spec"]["containers"]]
    name = pod["metadata"]["name"]
    if not wanted and len(names) > 1:
        raise bad_request(f"a container name must be specified for pod {name}, choose one of: [{' '.join(names)}]")
    if wanted and wanted not in names:
        raise bad_request(f"container {wanted} is not valid for pod {name}")
    return wanted or names[0]


class NodeLog:
    """An open answer of a kubelet. `pieces` ends with the log, and breaks off when somebody calls `abandon`."""

    def __init__(self, kube: FakeKube, host: str, port: int, path: str) -> None:
        """Raises Refusal with the kubelet's own words, or when it cannot be reached."""
        kube.tokens.setdefault(TOKEN, USER)
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        self._connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=trust)
        try:
            self._connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
            wire = self._connection.sock  # the connection lets go of it when the answer is its last
            self._answer = self._connection.getresponse()
            if self._answer.status != 200:
                text = self._answer.read(CHUNK).decode("utf-8", "replace").strip()
                raise Refusal(self._answer.status, http.client.responses[self._answer.status].replace(" ", ""), text)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            url = json.dumps(f"https://{host}:{port}{path}")
            raise Refusal(500, "InternalError", f"Get {url}: {error}") from None
        wire.settimeout(None)  # somebody who follows waits for as long as it takes
        self._wire: socket.socket = wire

    def pieces(self) -> Iterator[bytes]:
        """Raises OSError when it breaks off."""
        try:
            while piece := self._answer.read1(CHUNK):
                yield piece
        except (ValueError, http.client.HTTPException) as error:
            raise ConnectionError(str(error)) from error
        finally:
            self._answer.close()
            self._wire.close()

    def abandon(self) -> None:
        """Nobody reads any more. Does not wait."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._wire.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
