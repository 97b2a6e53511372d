"""What can be seen in a run, in words: ``ready``, ``probe fails PingTimeout``, ``begins vm clone``.

One vocabulary for everything that refers to what happens: the trigger of an event (`when`), and expectations that
count, order or exclude. `observation` reads a text and gives a test on entries of the timeline; `SIGHTS` is the table
behind it, and the reference is made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.document import Kind, unknown
from vkcocoon_record import Entry

__all__ = ["SIGHT", "SIGHTS", "Observation", "Sight", "observation"]

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sight:
    """One kind of thing that can be seen. ``argument``: "" takes none, ``[X]`` may have one, ``X`` needs one."""

    name: str
    argument: str
    text: str
    actor: str
    kinds: tuple[str, ...]  # of timeline entries; () = any
    test: Callable[[Fields, str], bool] = lambda fields, argument: True


def _is(name: str) -> Callable[[Fields, str], bool]:
    return lambda fields, argument: argument in ("", str(fields.get(name, "")))


def _verb(fields: Fields, argument: str) -> bool:
    return argument in ("", fields["verb"])


def _ready(value: str) -> Callable[[Fields, str], bool]:
    return lambda fields, argument: fields["ready"] == value


SIGHTS: tuple[Sight, ...] = (
    # What Kubernetes holds
    Sight("created", "", "the pod object is there", "kube", ("created",)),
    Sight("ready", "", "Kubernetes holds Ready=True", "kube", ("ready",), _ready("True")),
    Sight(
        "not ready", "", "Kubernetes holds Ready=False; the first status counts", "kube", ("ready",), _ready("False")
    ),
    Sight(
        "flip", "", "Ready changes; the first status does not count", "kube", ("ready",), lambda f, _: bool(f["was"])
    ),
    Sight("reason", "REASON", "the reason of Ready becomes this", "kube", ("reason",), _is("reason")),
    Sight("phase", "PHASE", "the phase becomes this", "kube", ("phase",), _is("phase")),
    Sight("address", "[IP]", "podIP changes, to this", "kube", ("address",), _is("address")),
    Sight(
        "lifecycle", "STATE", "the annotation lifecycle-state becomes this", "kube", ("lifecycle",), _is("lifecycle")
    ),
    Sight("terminating", "", "deletion was asked for", "kube", ("terminating",)),
    Sight("deleted", "", "the pod object is gone", "kube", ("deleted",)),
    Sight(
        "event", "REASON", "a Kubernetes Event of that reason is written, or counted on", "event", (), lambda f, _: True
    ),
    # What the daemon does
    Sight("probe", "", "a probe ends", "probe", ("ok", "fails")),
    Sight("probe ok", "", "a probe succeeds", "probe", ("ok",)),
    Sight("probe fails", "[REASON]", "a probe fails, for this reason", "probe", ("fails",), _is("reason")),
    Sight("hands over", "", "a status is handed over to be published", "daemon", ("hands over",)),
    Sight("hands over ready", "", "a Ready status is", "daemon", ("hands over",), _ready("True")),
    Sight("push", "", "a status is accepted by the API", "push", ("status",), lambda f, _: "refused" not in f),
    Sight(
        "push of annotations",
        "",
        "our annotations are accepted",
        "push",
        ("annotations",),
        lambda f, _: "refused" not in f,
    ),
    Sight(
        "refused push",
        "",
        "the API refuses a write about the pod, or does not answer it",
        "push",
        (),
        lambda f, _: "refused" in f,
    ),
    Sight("begins", "VERB", "a command begins, such as vm clone", "command", ("begins",), _verb),
    Sight("ends", "VERB", "a command ends", "command", ("ends",), _verb),
    Sight("daemon starts", "", "the daemon is started", "daemon", ("start",)),
    Sight("daemon stops", "", "the daemon is asked to stop", "daemon", ("stop",)),
    Sight("daemon is killed", "", "the daemon is killed", "daemon", ("kill",)),
    # What guests and host do
    Sight("power on", "", "the VM's process begins", "host", ("power on",)),
    Sight("power off", "", "the VM's process is ended by a command", "host", ("power off",)),
    Sight("guest address", "[IP]", "the guest takes an address, this one", "guest", ("address",), _is("ip")),
    Sight("lease", "[IP]", "cocoon-net has a new or moved lease for the guest", "lease", ("granted",), _is("ip")),
    Sight("lease gone", "", "cocoon-net has no lease for it any more", "lease", ("gone",)),
    # The scenario itself
    Sight("happens", "ID", "an event of the scenario with that id happens", "scenario", (), _is("id")),
)


@dataclass(frozen=True, slots=True)
class Observation:
    """A text of the vocabulary and its test on an entry."""

    text: str
    sight: Sight
    argument: str

    def sees(self, entry: Entry, pod: str | None = None) -> bool:
        """Is this it, about that pod (None: about any)?"""
        sight = self.sight
        if entry.actor != sight.actor or (pod is not None and entry.key != pod):
            return False
        if sight.kinds and entry.kind not in sight.kinds:
            return False
        if sight.name == "event":
            return entry.kind == self.argument
        return sight.test(dict(entry.fields), self.argument)


def observation(given: Any) -> Observation:
    """Reads a text such as ``probe fails PingTimeout``. Raises ValueError."""
    text = " ".join(str(given).split())
    fits = [sight for sight in SIGHTS if text == sight.name or text.startswith(f"{sight.name} ")]
    if not fits:
        raise ValueError(unknown("observation", text, [sight.name for sight in SIGHTS]))
    sight = max(fits, key=lambda sight: len(sight.name))
    argument = text.removeprefix(sight.name).strip()
    if argument and not sight.argument:
        raise ValueError(unknown("observation", text, [sight.name for sight in SIGHTS]))
    if not argument and sight.argument and not sight.argument.startswith("["):
        raise ValueError(f"{text!r} needs to say which: {sight.name} {sight.argument}")
    return Observation(text, sight, argument)


SIGHT = Kind("observation", "`probe fails PingTimeout`", observation)
