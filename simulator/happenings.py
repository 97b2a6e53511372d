"""What can happen in a scenario: what people, guests, the network, the commands, the API and the daemon do, or suffer.

`HAPPENINGS` is the table: each row is a key that an event may have, what it takes, and what it does to a world. A
happening that lasts returns what ends it, and may be given a duration (`for`). Rows take their text from here into the
reference, so what is not said here is said nowhere.

They act from outside, through doors that no fault touches (`kube.admin`, the knobs of the fakes), never on the daemon's
inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from simulator.document import Kind, Parameter
from simulator.fake_kube_faults import Request
from simulator.fake_tools import Step
from simulator.values import (
    COUNT,
    FLAG,
    IP,
    MAP,
    POD,
    PORT,
    SHARE,
    SIGNED_TIME,
    TEXT,
    TEXT_OR_NONE,
    TIME,
    split,
    word,
)
from vkcocoon_kube import ApiError

if TYPE_CHECKING:
    from simulator.world import World

__all__ = ["BEHAVIORS", "HAPPENINGS", "Happening", "Undo"]

Undo = Callable[[], object]

REASONS = {
    0: "NoAnswer",
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """A row of the table. ``act(world, **values)`` returns what ends it, if it ``lasts``."""

    name: str
    section: str
    text: str
    parameters: tuple[Parameter, ...]
    act: Callable[..., Any]
    lasts: bool = False


P_POD = Parameter("pod", POD, "the pod", needed=True)
P_REQUESTS = Parameter("requests", TEXT, "which requests, a glob such as `PATCH */status`", default="*")
P_OF_POD = Parameter("pod", POD, "only requests about this pod")
P_TIMES = Parameter("times", COUNT, "how many times; without it, for as long as it lasts")

# People and controllers -----------------------------------------------------------------------------------------------


def _delete(world: World, pod: str, grace: float | None) -> None:
    try:
        world.delete_pod(**split(pod), grace_seconds=None if grace is None else round(grace))
    except ApiError as error:
        raise LookupError(f"pod {pod}: {error.message}") from error


def _recreate(world: World, pod: str) -> None:
    world.recreate_pod(**split(pod))


def _hibernate(world: World, pod: str) -> None:
    world.annotate(**split(pod), hibernate="true")


def _wake(world: World, pod: str) -> None:
    world.annotate(**split(pod), hibernate=None)


def _probe_port(world: World, pod: str, port: str | None) -> None:
    world.annotate(**split(pod), probe_port=port)


def _annotate(world: World, pod: str, keys: dict[str, str | None]) -> None:
    world.change_pod(pod, {"metadata": {"annotations": keys}})


def _overwrite(world: World, pod: str, type_: str, status: str) -> None:
    world.change_status(pod, {"conditions": [{"type": type_, "status": status, "reason": "Overwritten"}]})


# Guests ---------------------------------------------------------------------------------------------------------------


def _silent(world: World, pod: str) -> Undo:
    world.guest_of(pod).silent(True)
    return lambda: world.guest_of(pod).silent(False)


def _speaks(world: World, pod: str) -> None:
    world.guest_of(pod).silent(False)


def _no_echo(world: World, pod: str) -> Undo:
    world.guest_of(pod).echo = False

    def answers() -> None:
        world.guest_of(pod).echo = True

    return answers


def _echo(world: World, pod: str) -> None:
    world.guest_of(pod).echo = True


def _open(world: World, pod: str, port: int, says: str | None) -> Undo:
    world.guest_of(pod).open(port, says)
    return lambda: world.guest_of(pod).close(port)


def _close(world: World, pod: str, port: int) -> Undo:
    world.guest_of(pod).close(port)
    return lambda: world.guest_of(pod).open(port)


def _banner(world: World, pod: str, text: str | None) -> None:
    world.guest_of(pod).banner(text)


def _quality(attribute: str) -> Callable[..., Undo]:
    """Something about the line to a guest that is one way for a while."""

    def act(world: World, pod: str, value: Any) -> Undo:
        guest = world.guest_of(pod)
        before = getattr(guest, attribute)
        setattr(guest, attribute, value)
        return lambda: setattr(guest, attribute, before)

    return act


def _unreachable(world: World, pod: str, times: int, text: str) -> None:
    world.host.pinger.fail(world.guest_of(pod).ip, text, times)


def _boots_in(world: World, pod: str, time: float) -> None:
    guest = world.guest_of(pod)
    guest.spec = replace(guest.spec, boot_s=time)


def _crash(world: World, pod: str) -> None:
    world.guest_of(pod).crash()


def _reboot(world: World, pod: str) -> None:
    world.guest_of(pod).reboot()


def _qemu(world: World, pod: str, how: str) -> None:
    guest = world.guest_of(pod)
    if how == "reuse pid":
        world.host.reuse_pid(guest.pid)
    elif how == "zombie":
        world.host.zombie(guest.pid)
    elif how == "second":
        world.host.plant_qemu(guest.name)
    else:
        guest.crash()


# Addresses ------------------------------------------------------------------------------------------------------------


def _lease(world: World, pod: str, ip: str, expires: float | None, only: str) -> None:
    guest = world.guest_of(pod)
    if only != "guest":
        end = None if expires is None else world.clock.now() + timedelta(seconds=expires)
        world.leases.lease(guest.mac, ip, end)
    if only != "file":
        guest.renumber(ip)


def _lose_lease(world: World, pod: str) -> None:
    world.leases.release(world.guest_of(pod).mac)


def _lease_file(world: World, how: str) -> Undo:
    leases = world.leases
    if how == "stale":
        leases.frozen = True
    else:
        leases.write(how)  # type: ignore[arg-type]
        leases.frozen = how not in ("rename", "in_place", "same_stamp")

    def whole_again() -> None:
        leases.frozen = False
        leases.write()

    return whole_again


def _cocoon_net(world: World, how: str) -> None:
    if how == "restart":
        world.leases.restart()
    elif how == "forget":
        world.leases.forget_file()
    else:
        world.leases.sweep()


def _release_fails(world: World, times: int) -> None:
    world.leases.failing_releases = times


# Commands and VMs -----------------------------------------------------------------------------------------------------


def _command(world: World, verb: str, pod: str | None, tool: str, step: str, times: int, **how: Any) -> None:
    fakes = {"cocoon": world.host.cocoon, "cocoon-macos": world.host.macos}
    fake = fakes["cocoon-macos" if pod is not None and world.os_of(pod) == "macos" else tool]
    about: dict[str, Any] = {"name": "*" if pod is None else world.vm_of(pod), "times": times or None}
    if how["slow"] is not None:
        fake.slow(verb, how["slow"], step=step, **about)
    if how["hangs"]:
        fake.hang(verb, step=step, **about)
    if how["killed"]:
        fake.kill(verb, step=step, **about)
    if how["fails"] is not None:
        fake.fail(verb, stderr=how["fails"], step=step, **about)
    if how["prints"] is not None:
        fake.garble(verb, how["prints"], **about)


def _behaves(world: World, how: str, pod: str | None, display: int) -> Undo:
    program, knob, value = BEHAVIORS[how]
    fake: Any = world.host.macos if program == "macos" else world.host.cocoon
    if knob == "hides_mac":
        value = tuple(world.vm_of(key) for key in ([pod] if pod is not None else world.announced()))
    elif knob == "busy_displays":
        value = (display,)
    before = getattr(fake, knob)
    setattr(fake, knob, value)
    return lambda: setattr(fake, knob, before)


def _commands_missing(world: World) -> Undo:
    world.host.cocoon.missing = world.host.macos.missing = True

    def back() -> None:
        world.host.cocoon.missing = world.host.macos.missing = False

    return back


def _remove_vm(world: World, pod: str) -> None:
    argv = ["cocoon", "vm", "rm", "--force", world.vm_of(pod)]
    world.clock.spawn(f"somebody removes {pod}", world.host.cocoon.execute, argv, 60.0)


def _vm_events(world: World, how: str) -> None:
    cocoon = world.host.cocoon
    {"end": cocoon.end_stream, "torn line": cocoon.tear_line, "list fails": cocoon.fail_listing}[how]()


# The API --------------------------------------------------------------------------------------------------------------


def _matching(requests: str, pod: str | None) -> Callable[[Request], bool]:
    about = "" if pod is None else "/namespaces/{namespace}/pods/{name}".format(**split(pod))

    def match(request: Request) -> bool:
        path = request.path.removesuffix("/status")
        return fnmatchcase(str(request), requests) and (not about or path.endswith(about))

    return match


def _api_fails(
    world: World,
    *,
    status: int,
    requests: str,
    pod: str | None,
    times: int | None,
    stored: bool,
    retry_after: float | None,
) -> Undo:
    error = ApiError(status, REASONS[status], f"injected {status}", retry_after=retry_after)
    return world.kube.fail(_matching(requests, pod), error, times, stored=stored).cancel


def _api_hangs(world: World, requests: str, pod: str | None, stored: bool, only_open: bool) -> Undo:
    matches, now = _matching(requests, pod), world.clock.monotonic()

    def match(request: Request) -> bool:
        return matches(request) and (not only_open or request.at <= now)

    return world.kube.hang(match, stored=stored).release


def _api_slow(world: World, by: float, requests: str, pod: str | None) -> Undo:
    matches = _matching(requests, pod)
    world.kube.latency = lambda request: by if matches(request) else 0.0

    def fast() -> None:
        world.kube.latency = 0.0

    return fast


def _api_down(world: World) -> Undo:
    world.kube.down = True

    def up() -> None:
        world.kube.down = False

    return up


def _watch_late(world: World, by: float) -> Undo:
    world.kube.watch_delay = by

    def prompt() -> None:
        world.kube.watch_delay = 0.0

    return prompt


def _cut_watches(world: World, how: str) -> None:
    world.kube.cut_watches(mid_line=how == "in the middle of a line")


def _expire_history(world: World, told: str) -> None:
    world.kube.gone = "http" if told == "http" else "event"
    world.kube.expire_history()
    world.kube.cut_watches()


def _stale_lists(world: World) -> Undo:
    world.kube.freeze_cache()
    return lambda: world.kube.freeze_cache(False)


def _watch_error(world: World, status: int) -> None:
    error = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status}
    world.kube.inject({"type": "ERROR", "object": {**error, "reason": REASONS[status], "message": "injected"}})


# Time and the daemon --------------------------------------------------------------------------------------------------


def _daemon(world: World, how: str) -> Undo:
    if how in ("stop", "restart"):
        world.stop()
    if how == "kill":
        world.kill()
    if how in ("start", "restart"):
        world.start()
    return lambda: world.start() if world.daemon is None else None


def _wall_clock(world: World, step: float) -> Undo:
    world.clock.step_wall(step)
    return lambda: world.clock.step_wall(-step)


_COMMANDS = (
    "vm run", "vm clone", "vm start", "vm stop", "vm rm", "vm inspect", "vm list", "vm status",
    "vm exec", "vm net", "vm reconcile-stale-create", "snapshot save", "snapshot inspect", "snapshot list",
    "snapshot rm", "image pull", "image inspect",
)  # fmt: skip
# How a tool may be, by the word of a scenario: which tool, which of its knobs, and the value.
BEHAVIORS: dict[str, tuple[str, str, Any]] = {
    "old": ("cocoon", "old", True),
    "No VMs found.": ("cocoon", "empty_sentence", True),
    "lists without a look": ("cocoon", "list_hides_stale", True),
    "pids of clones": ("cocoon", "clone_hides_pid", False),
    "runs without pids": ("cocoon", "run_hides_start", True),
    "empty networks": ("cocoon", "empty_network", True),
    "with a daemon": ("cocoon", "daemon", True),
    "without state": ("macos", "shows_state", False),
    "without a MAC": ("macos", "hides_mac", ()),
    "without firmware": ("macos", "firmware_missing", True),
    "busy display": ("macos", "busy_displays", ()),
}
_FILES = (
    "missing", "torn", "empty", "null", "object", "two_documents", "unreadable", "stale",
    "rename", "in_place", "same_stamp",
)  # fmt: skip


def _status(given: Any) -> int:
    if given not in REASONS or isinstance(given, bool):
        raise ValueError(f"{given!r} is no status; known: {', '.join(map(str, REASONS))}")
    return int(given)


_STATUS = Kind("status", "a status of HTTP, or `0` for no answer at all", _status)

_PEOPLE, _GUESTS, _LEASES = "People and controllers", "Guests", "Addresses"
_TOOLS, _API, _REST = "Commands and VMs", "The API server", "Time and the daemon"

ROWS: tuple[Happening, ...] = (
    Happening("delete", _PEOPLE, "The pod is deleted.", (P_POD, Parameter("grace", TIME, "its grace period")), _delete),
    Happening(
        "recreate", _PEOPLE, "The pod is removed by force and created again under its name.", (P_POD,), _recreate
    ),
    Happening("hibernate", _PEOPLE, "The pod is asked to hibernate.", (P_POD,), _hibernate),
    Happening("wake", _PEOPLE, "The pod is asked to wake up.", (P_POD,), _wake),
    Happening(
        "probe_port",
        _PEOPLE,
        "The probe-port annotation is set as it is written here, right or wrong, or taken away.",
        (P_POD, Parameter("port", TEXT_OR_NONE, "its text; `null` takes it away", needed=True)),
        _probe_port,
    ),
    Happening(
        "annotate",
        _PEOPLE,
        "Annotations of the pod are changed.",
        (P_POD, Parameter("keys", MAP, "full names and values", needed=True)),
        _annotate,
    ),
    Happening(
        "overwrite",
        _PEOPLE,
        "Somebody else writes a condition of ours.",
        (
            P_POD,
            Parameter("type", TEXT, "its type", default="Ready"),
            Parameter("status", TEXT, "its value", default="False"),
        ),
        lambda world, pod, type, status: _overwrite(world, pod, type, status.capitalize()),
    ),
    Happening("silent", _GUESTS, "The guest answers nothing any more: a hang.", (P_POD,), _silent, lasts=True),
    Happening("speaks", _GUESTS, "It answers again.", (P_POD,), _speaks),
    Happening("no_echo", _GUESTS, "It ignores echoes; ports go on.", (P_POD,), _no_echo, lasts=True),
    Happening("echo", _GUESTS, "It answers echoes.", (P_POD,), _echo),
    Happening(
        "open",
        _GUESTS,
        "A port accepts.",
        (
            P_POD,
            Parameter("port", PORT, "the port", needed=True),
            Parameter("says", TEXT_OR_NONE, "what it says to who connects"),
        ),
        _open,
        lasts=True,
    ),
    Happening(
        "close",
        _GUESTS,
        "A port refuses.",
        (P_POD, Parameter("port", PORT, "the port", needed=True)),
        _close,
        lasts=True,
    ),
    Happening(
        "banner",
        _GUESTS,
        "What port 22 says changes.",
        (P_POD, Parameter("text", TEXT_OR_NONE, "the text, lines as in the guest; `null`: it is silent", needed=True)),
        _banner,
    ),
    Happening(
        "latency",
        _GUESTS,
        "Answers take that long.",
        (P_POD, Parameter("value", TIME, "how long", needed=True)),
        _quality("latency_s"),
        lasts=True,
    ),
    Happening(
        "loss",
        _GUESTS,
        "That share of questions is lost.",
        (P_POD, Parameter("value", SHARE, "how many", needed=True)),
        _quality("loss"),
        lasts=True,
    ),
    Happening(
        "flood",
        _GUESTS,
        "Each echo also brings replies that are wrong in one respect each; needs `wire: packets`.",
        (P_POD, Parameter("value", FLAG, "whether", default=True)),
        _quality("flood"),
        lasts=True,
    ),
    Happening(
        "unreachable",
        _GUESTS,
        "The next echoes come back as an error of the network.",
        (P_POD, Parameter("times", COUNT, "how many", default=1), Parameter("text", TEXT, "the error", default="")),
        _unreachable,
    ),
    Happening(
        "boots_in",
        _GUESTS,
        "From its next boot on it takes that long to boot.",
        (P_POD, Parameter("time", TIME, "how long", needed=True)),
        _boots_in,
    ),
    Happening("crash", _GUESTS, "The hypervisor's process dies; nobody is told.", (P_POD,), _crash),
    Happening("reboot", _GUESTS, "It reboots from inside; the QEMU of a Mac exits by that.", (P_POD,), _reboot),
    Happening(
        "qemu",
        _GUESTS,
        "Something happens to the process of the VM.",
        (P_POD, Parameter("how", word("how of qemu", ("crash", "reuse pid", "zombie", "second")), "what", needed=True)),
        _qemu,
    ),
    Happening(
        "lease",
        _LEASES,
        "The guest gets another address.",
        (
            P_POD,
            Parameter("ip", IP, "the address", needed=True),
            Parameter("expires", TIME, "how long the lease is good for; a day if not given"),
            Parameter("only", word("only of lease", ("both", "file", "guest")), "who hears of it", default="both"),
        ),
        _lease,
    ),
    Happening(
        "lose_lease",
        _LEASES,
        "The row of the guest leaves the lease file; the guest does not notice.",
        (P_POD,),
        _lose_lease,
    ),
    Happening(
        "lease_file",
        _LEASES,
        "The lease file becomes something else, or is written in an odd way. While it is spoiled, cocoon-net does not"
        " write it again.",
        (Parameter("how", word("how of lease_file", _FILES), "what it becomes", needed=True),),
        _lease_file,
        lasts=True,
    ),
    Happening(
        "cocoon_net",
        _LEASES,
        "The DHCP daemon restarts from its file, forgets everything, or sweeps out expired rows now.",
        (Parameter("how", word("how of cocoon_net", ("restart", "forget", "sweep")), "what it does", needed=True),),
        _cocoon_net,
    ),
    Happening(
        "release_fails",
        _LEASES,
        "The next releases of leases are answered with an error.",
        (Parameter("times", COUNT, "how many", default=1),),
        _release_fails,
    ),
    Happening(
        "command",
        _TOOLS,
        "The next calls of a command go wrong.",
        (
            Parameter("verb", word("verb of command", _COMMANDS), "the command", needed=True),
            Parameter("pod", POD, "only about the VM of this pod"),
            Parameter("tool", word("tool of command", ("cocoon", "cocoon-macos")), "whose command", default="cocoon"),
            Parameter("slow", TIME, "they take that much longer"),
            Parameter("fails", TEXT_OR_NONE, "they fail with this on stderr"),
            Parameter("hangs", FLAG, "they never end by themselves", default=False),
            Parameter("killed", FLAG, "they die of SIGKILL and clean nothing up", default=False),
            Parameter("prints", TEXT_OR_NONE, "they do their work and print this"),
            Parameter(
                "step",
                word("step of command", (Step.BEFORE, Step.MIDDLE, Step.LATE, Step.AFTER)),
                "when: before anything happened, with the name taken, when it runs but no record says so, or when"
                " everything is done",
                default=Step.MIDDLE,
            ),
            Parameter("times", COUNT, "how many calls; 0 is all", default=1),
        ),
        _command,
    ),
    Happening(
        "behaves",
        _TOOLS,
        "A tool is of another kind: an old cocoon; one that prints a sentence for no VMs, lists states as they are"
        " stored, pids of clones, records from before the start, an empty `network`; one with its daemon; a"
        " cocoon-macos whose records have no state, or no MAC, that lacks its firmware, or finds the port of a display"
        " taken.",
        (
            Parameter("how", word("how of behaves", tuple(BEHAVIORS)), "which", needed=True),
            Parameter("pod", POD, "whose MAC; of all if not given"),
            Parameter("display", COUNT, "which display", default=0),
        ),
        _behaves,
        lasts=True,
    ),
    Happening("commands_missing", _TOOLS, "Neither tool can be run.", (), _commands_missing, lasts=True),
    Happening("remove_vm", _TOOLS, "Somebody removes the VM behind our back.", (P_POD,), _remove_vm),
    Happening(
        "vm_events",
        _TOOLS,
        "The event stream of cocoon ends, prints half a line, or fails to read its list.",
        (Parameter("how", word("how of vm_events", ("end", "torn line", "list fails")), "what", needed=True),),
        _vm_events,
    ),
    Happening(
        "api_fails",
        _API,
        "Requests are answered with an error.",
        (
            Parameter("status", _STATUS, "which", needed=True),
            P_REQUESTS,
            P_OF_POD,
            P_TIMES,
            Parameter("stored", FLAG, "the request was carried out all the same", default=False),
            Parameter("retry_after", TIME, "the server asks to wait that long"),
        ),
        _api_fails,
        lasts=True,
    ),
    Happening(
        "api_hangs",
        _API,
        "Requests get no answer, and open watches go silent.",
        (
            P_REQUESTS,
            P_OF_POD,
            Parameter("stored", FLAG, "they are carried out, only not answered", default=False),
            Parameter("only_open", FLAG, "only those that are under way at this moment", default=False),
        ),
        _api_hangs,
        lasts=True,
    ),
    Happening(
        "api_slow",
        _API,
        "Requests take that long.",
        (Parameter("by", TIME, "how long", needed=True), P_REQUESTS, P_OF_POD),
        _api_slow,
        lasts=True,
    ),
    Happening("api_down", _API, "Nothing is answered, and open watches break.", (), _api_down, lasts=True),
    Happening(
        "watch_late",
        _API,
        "Changes reach watches late.",
        (Parameter("by", TIME, "how late", needed=True),),
        _watch_late,
        lasts=True,
    ),
    Happening(
        "cut_watches",
        _API,
        "Open watches end.",
        (
            Parameter(
                "how", word("how of cut_watches", ("orderly", "in the middle of a line")), "how", default="orderly"
            ),
        ),
        _cut_watches,
    ),
    Happening(
        "expire_history",
        _API,
        "Watches end, and no version handed out so far can be watched from (410).",
        (
            Parameter(
                "told", word("told of expire_history", ("event", "http")), "how the server says so", default="event"
            ),
        ),
        _expire_history,
    ),
    Happening(
        "stale_lists",
        _API,
        "Lists that accept any version show what was there when this began.",
        (),
        _stale_lists,
        lasts=True,
    ),
    Happening(
        "watch_error",
        _API,
        "Open watches are sent an ERROR event.",
        (Parameter("status", _STATUS, "its code", default=500),),
        _watch_error,
    ),
    Happening(
        "wall_clock",
        _REST,
        "The wall clock is set; time itself goes on as it did.",
        (Parameter("step", SIGNED_TIME, "by how much", needed=True),),
        _wall_clock,
        lasts=True,
    ),
    Happening(
        "daemon",
        _REST,
        "vk-cocoon is stopped (as by SIGTERM), killed (as by SIGKILL), started, or stopped and started. With `for` it"
        " is started again after that.",
        (Parameter("how", word("how of daemon", ("stop", "kill", "start", "restart")), "what", needed=True),),
        _daemon,
        lasts=True,
    ),
)

HAPPENINGS = {row.name: row for row in ROWS}
