"""The way out of a corner without one: whoever stayed on the host connects, and hands the connection in.

`server_of` says where a kubeconfig leads, `dial` answers a request on a channel with a connected socket. Both run in
the user's terminal, where nothing is cooperative; the other end of the channel is simulator.live_clusters.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

__all__ = ["Unusable", "current_cluster", "dial", "server_of"]

PATIENCE_S = 5.0
FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


class Unusable(Exception):
    """The cluster cannot be played on; the message is one line."""


def current_cluster(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A kubeconfig with only absolute paths, and the cluster of its current context, a part of it. Raises Unusable."""
    try:
        config = yaml.safe_load(path.read_text())
        contexts = {each["name"]: each["context"] for each in config["contexts"]}
        clusters = {each["name"]: each["cluster"] for each in config["clusters"]}
        cluster = clusters[contexts[config["current-context"]]["cluster"]]
        url = urlsplit(str(cluster["server"]))
        if url.scheme not in ("http", "https") or not url.hostname:
            raise Unusable(f"{path}: {cluster['server']!r} is no address of an API server")
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise Unusable(f"{path}: it names no server for its current context: {' '.join(str(error).split())}") from error
    for part in (*clusters.values(), *(each.get("user") or {} for each in config.get("users") or ())):
        for key in FILES:
            if part.get(key):
                part[key] = str((path.parent / part[key]).resolve())
    return config, cluster


def server_of(path: Path) -> tuple[str, int]:
    """Host and port of the API server that a kubeconfig leads to. Raises Unusable."""
    url = urlsplit(str(current_cluster(path)[1]["server"]))
    return str(url.hostname), url.port or (443 if url.scheme == "https" else 80)


def dial(channel: socket.socket, address: tuple[str, int]) -> bool:
    """Answer one request with a connection to that address, or with the reason why not. False: nobody asks any more."""
    if not channel.recv(1):
        return False
    try:
        with socket.create_connection(address, PATIENCE_S) as connection:
            connection.settimeout(None)
            socket.send_fds(channel, [b"."], [connection.fileno()])
    except OSError as error:
        channel.sendall((error.strerror or str(error) or type(error).__name__).encode())
    return True
