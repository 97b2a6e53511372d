"""The commands that look and change nothing: config, status, doctor, probe, leases.

They are for a person on the host, so they read the env-file as the unit does (vkcocoon_envfile), say what they found on
stdout and everything else on stderr, and end with 1 when what they were asked about is not well. Each imports what it
needs when it is called; the module itself loads nothing heavy, because help and completion go through it. `probe`
imports vkcocoon before anything that opens a socket (D6).

vkcocoon_cli adds these commands to its own.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vkcocoon_envfile import DEFAULT_PATH, EnvFileError, Environment, load_environment
from vkcocoon_settings import SETTINGS, Setting, SettingError, Settings
from vkcocoon_terminal import Mark, Paint, ago, columns, milliseconds, printable

if TYPE_CHECKING:
    from vkcocoon_doctor import Finding
    from vkcocoon_net import Lease, LeaseFile
    from vkcocoon_stages import Stage, Tools

__all__ = ["INSPECTIONS", "Misconfigured", "OneLine", "check_start", "config_lines", "remarks", "strange"]

MISCONFIGURED = 78
POD = r"([a-z0-9][a-z0-9-]*/)?[a-z0-9][a-z0-9.-]*"
CLEAR = "\x1b[H\x1b[2J"
NOT_WELL = 1

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class OneLine(click.ClickException):
    """Ends the program with one line on stderr, or one for each thing that is wrong."""

    def show(self, file: Any = None) -> None:
        for line in self.format_message().splitlines():
            click.echo(f"vk-cocoon: {line}", file=file or sys.stderr)


class Misconfigured(OneLine):
    exit_code = MISCONFIGURED


# What the commands share ------------------------------------------------------------------------------------------

env_file_option = click.option(
    "--env-file", metavar="PATH", help=f"The unit's env-file to read the settings from.  [default: {DEFAULT_PATH}]"
)
color_option = click.option(
    "--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="When to use colors."
)


def output_option(*forms: str) -> Callable[[AnyFunction], AnyFunction]:
    return click.option("-o", "--output", type=click.Choice(forms), default=forms[0], help="How to print it.")


def environment(env_file: str | None) -> Environment:
    """The environment with the env-file in it. Ends the program when that cannot be read."""
    try:
        return load_environment(os.environ, env_file)
    except EnvFileError as error:
        raise Misconfigured(str(error)) from None


def loaded(env_file: str | None) -> Settings:
    return Settings.load(environment(env_file).values)


def print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _say(text: str) -> None:
    click.echo(f"vk-cocoon: {text}", err=True)


# config -----------------------------------------------------------------------------------------------------------


@click.command()
@env_file_option
@output_option("table", "env", "json")
def config(env_file: str | None, output: str) -> None:
    """Show each setting, its value and where that comes from.

    What the daemon gets from its unit is in the env-file; the environment of this shell wins over it. Secrets are not
    shown. Exits with 78 when the daemon would, and says why: a value that cannot be right, or a kubeconfig or
    certificate that cannot be used.

    \b
    Examples:
      vk-cocoon config
      vk-cocoon config --env-file ./vk-cocoon.env -o env
    """
    found = environment(env_file)
    settings = Settings.load(found.values)
    if output == "json":
        print_json({row.name: _entry(row, settings, found) for row in SETTINGS})
    elif output == "env":
        for row in SETTINGS:
            click.echo(_env_line(row, settings, found))
    else:
        for line in config_lines(settings, lambda row: _origin(row, found)):
            click.echo(line)
    for remark in remarks(settings, found.values):
        _say(remark)
    Settings.load(found.values, files=True)
    check_start(settings)


def config_lines(settings: Settings, origin: Callable[[Setting], str]) -> list[str]:
    """Each setting in a line: variable, where its value comes from, value."""
    rows = [(row.env, origin(row), _shown(row, getattr(settings, row.name))) for row in SETTINGS]
    return columns(("SETTING", "FROM", "VALUE"), rows)[1:]


def _env_line(row: Setting, settings: Settings, found: Environment) -> str:
    """A line of an env-file; what is not set, or must not be shown, as a comment."""
    if _origin(row, found) == "default":
        return f"#{row.env}={row.default}"
    shown = _quoted(_shown(row, getattr(settings, row.name)))
    return f"{'#' if row.secret else ''}{row.env}={shown}"


def remarks(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    """What is odd about the settings and may be right all the same."""
    from vkcocoon_host import is_own_address

    for stranger, meant in Settings.strangers(environ).items():
        yield strange(stranger, meant)
    if settings.node_ip and not is_own_address(settings.node_ip):
        yield f"VK_NODE_IP: {settings.node_ip} is no address of this host; is it where the API server finds it?"


def check_start(settings: Settings) -> None:
    """Ends the program like `run` would when what the settings name is there and cannot be used."""
    import vkcocoon  # noqa: F401  first: it makes what follows cooperative
    from vkcocoon_certificates import Certificates
    from vkcocoon_kube import HttpKubeApi, KubeconfigError
    from vkcocoon_probes import SystemClock

    wrong = []
    try:
        HttpKubeApi(settings.kubeconfig).close()
    except KubeconfigError as error:
        wrong.append(f"KUBECONFIG: {' '.join(str(error).split())}")
    files = settings.tls_cert, settings.tls_key, settings.kubelet_client_ca
    try:
        Certificates(*files, names=["localhost"], clock=SystemClock())
    except SettingError as error:
        wrong.append(str(error))
    if wrong:
        raise Misconfigured("\n".join(wrong))


def strange(stranger: str, meant: str) -> str:
    """What is said of a variable that looks like ours and is not."""
    return f"{stranger} is no setting of vk-cocoon and is ignored" + (f"; did you mean {meant}?" if meant else "")


def _origin(row: Setting, found: Environment) -> str:
    return found.origins.get(row.env) or Settings.origin(row.name, found.values)


def _shown(row: Setting, value: object) -> str:
    if value is None:
        return "off"
    if value == "":
        return f"({row.absent})"
    return "(secret)" if row.secret else str(value)


def _entry(row: Setting, settings: Settings, found: Environment) -> dict[str, object]:
    value = getattr(settings, row.name)
    plain = value if isinstance(value, int) else "off" if value is None else str(value)
    return {
        "variable": row.env,
        "origin": _origin(row, found),
        "value": "(secret)" if row.secret and value else plain,
        "secret": row.secret,
    }


def _quoted(text: str) -> str:
    """As the env-file wants it; only where it must be."""
    plain = text and not any(char in text for char in " \t\"'\\#;$")
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# status -----------------------------------------------------------------------------------------------------------


@click.command()
@env_file_option
@output_option("table", "wide", "json")
@click.option("-w", "--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--every", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, help="Seconds between two looks."
)
def status(env_file: str | None, output: str, watch: bool, every: float) -> None:
    """Show the pods as the running daemon sees them, and what each waits for.

    Asks the daemon over its socket, which is for root. The columns FAILS and NEXT are of the probe: failures in a row
    of a pod that is still Ready, and when it is asked next. With -o json and --watch, each look is one line.

    \b
    Examples:
      vk-cocoon status
      vk-cocoon status -o wide --watch
      vk-cocoon status -o json | jq '.pods[] | select(.ready | not) | .reason'
    """
    from vkcocoon_window import NoAnswer, ask

    path = loaded(env_file).status_socket
    while True:
        try:
            document = ask(path)
        except NoAnswer as error:
            raise OneLine(str(error)) from None
        if watch and output != "json" and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            click.echo(CLEAR, nl=False)
        _show_status(document, output, one_line=watch)
        if not watch:
            return
        try:
            time.sleep(every)  # noqa: TID251  a person watches, in real time
        except KeyboardInterrupt:
            return


def _show_status(document: Mapping[str, Any], output: str, *, one_line: bool) -> None:
    if output == "json":
        click.echo(json.dumps(document, ensure_ascii=False)) if one_line else print_json(document)
        return
    pods = document["pods"]
    for line in columns(*_wide(pods) if output == "wide" else _narrow(pods)):
        click.echo(line)
    ready = sum(pod["ready"] for pod in pods)
    head = f"node {document['node']}: {len(pods)} pods, {ready} ready; vk-cocoon {document['version']}"
    _say(f"{head}, up {ago(document['uptime_seconds'])}")
    for check in document["checks"]:
        if check["trouble"]:
            _say(f"{check['name']}: {check['trouble']}")
    if document["pinger_degraded"]:
        _say("degraded: no raw ICMP socket, guests without a probe port count as ready once they have an address")


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _narrow(pods: list[Mapping[str, Any]]) -> Table:
    header = ("POD", "OS", "VM", "IP", "PROBE", "READY", "LIFECYCLE", "REASON", "LAST", "FAILS", "NEXT")
    return header, [_narrow_row(pod) for pod in pods]


def _narrow_row(pod: Mapping[str, Any]) -> tuple[str, ...]:
    last = pod["last_probe"]
    probed = ("", "", "")
    if last:
        failures = f"{last['failures']}/{last['failure_threshold']}"
        probed = (milliseconds(last["took_seconds"]), failures, f"{max(0.0, last['next_seconds']):.1f}s")
    head = (f"{pod['namespace']}/{pod['name']}", pod["os"], pod["vm"], pod["ip"], pod["probe"])
    return (*head, str(pod["ready"]), pod["lifecycle"], pod["reason"], *probed)


def _wide(pods: list[Mapping[str, Any]]) -> Table:
    header, rows = _narrow(pods)
    more = [
        (pod["since"] or "", str(pod["restarts"]), "yes" if pod["published"] else "not yet", pod["uid"], pod["message"])
        for pod in pods
    ]
    return (*header, "SINCE", "RESTARTS", "WRITTEN", "UID", "MESSAGE"), [
        (*a, *b) for a, b in zip(rows, more, strict=True)
    ]


# leases -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--mac", metavar="MAC", help="Only the lease of this MAC, however it is written.")
@env_file_option
@output_option("table", "json")
def leases(mac: str | None, env_file: str | None, output: str) -> None:
    """Show the DHCP leases in force, by address.

    Which pod has an address, the running daemon says, if it may be asked. Exits with 1 when the lease file cannot be
    read, or has no lease for the MAC asked for.

    \b
    Examples:
      vk-cocoon leases
      vk-cocoon leases --mac 0A-58-AC-16-00-15
    """
    import vkcocoon_logs
    from vkcocoon_net import LeaseFile, LeaseFileError, normalize_mac
    from vkcocoon_probes import SystemClock

    vkcocoon_logs.configure("error", "text")  # what the file is like is said below
    settings = loaded(env_file)
    wanted = normalize_mac(mac) if mac is not None else ""
    if mac is not None and not wanted:
        raise click.BadParameter(f"{mac!r} is no MAC address", param_hint="--mac")
    file, now = LeaseFile(settings.leases_path), SystemClock().now()
    try:
        rows = [row for row in file.rows(now) if wanted in ("", row.mac)]
    except LeaseFileError as error:
        raise OneLine(f"{error}; VK_LEASES_PATH must be cocoon-net's file") from None
    holders = _holders(settings.status_socket)
    entries = [_lease_entry(row, holders, file, now) for row in rows]
    age = now.timestamp() - os.stat(settings.leases_path).st_mtime
    if output == "json":
        print_json({"file": settings.leases_path, "age_seconds": round(age, 1), "leases": entries})
    else:
        _say(f"{settings.leases_path}, written {ago(age)} ago")
        table = [_lease_row(row, holders, file, now) for row in rows]
        for line in columns(("MAC", "IP", "POD", "ENDS", "NOTE"), table):
            click.echo(line)
    if wanted and not rows:
        raise OneLine(f"no lease in force for {wanted}")


def _holders(socket: str) -> dict[str, str]:
    """Which pod has which address, as far as a running daemon says so to us."""
    from vkcocoon_window import NoAnswer, ask

    try:
        pods = ask(socket)["pods"]
    except NoAnswer as error:
        _say(f"which pod has an address is not shown: {error}")
        return {}
    return {pod["ip"]: f"{pod['namespace']}/{pod['name']}" for pod in pods if pod["ip"]}


def _lease_entry(row: Lease, holders: Mapping[str, str], file: LeaseFile, now: datetime) -> dict[str, object]:
    endless = row.expiry.year == 9999
    return {
        "mac": row.mac,
        "ip": row.ip,
        "pod": holders.get(row.ip, ""),
        "expires": None if endless else f"{row.expiry:%Y-%m-%dT%H:%M:%SZ}",
        "conflict": file.conflict(row.mac, now),
    }


def _lease_row(row: Lease, holders: Mapping[str, str], file: LeaseFile, now: datetime) -> tuple[str, ...]:
    ends = "never" if row.expiry.year == 9999 else f"in {ago((row.expiry - now).total_seconds())}"
    return row.mac, row.ip, holders.get(row.ip, ""), ends, file.conflict(row.mac, now)


# probe ------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("target")
@click.option("--port", type=click.IntRange(1, 65535), help="Dial this port; only for an address.")
@click.option("--ssh-banner", is_flag=True, help="Await sshd's banner; only for an address.")
@env_file_option
@output_option("table", "json")
@color_option
def probe(target: str, port: int | None, ssh_banner: bool, env_file: str | None, output: str, color: str) -> None:
    """Look at one guest once, as its probe does, and show each stage with its time.

    TARGET is a pod (web-0, or namespace/web-0) or an IPv4 address. The running daemon is not asked and not disturbed.
    Exits with 1 when the guest would not be ready.

    \b
    Examples:
      vk-cocoon probe default/web-0
      vk-cocoon probe 10.88.0.23 --port 3389
    """
    import vkcocoon  # noqa: F401  first: it makes what follows cooperative
    import vkcocoon_logs

    vkcocoon_logs.configure("error", "text")  # the stages say it
    settings = loaded(env_file)
    tools = _tools(settings)
    paint = Paint(color, sys.stdout, os.environ)
    stages: list[Stage] = []
    for stage in _stages(target, port, ssh_banner, tools, settings):
        stages.append(stage)
        if output == "table":
            click.echo(_stage_line(stage, paint))
    ready = all(stage.mark is not Mark.FAILED for stage in stages)
    if output == "json":
        print_json({"target": target, "ready": ready, "stages": [_stage_entry(stage) for stage in stages]})
    elif not ready:
        click.echo(f"    see docs/not-ready.md#{stages[-1].reason.lower()}")
    sys.exit(0 if ready else NOT_WELL)


def _stages(target: str, port: int | None, ssh_banner: bool, tools: Tools, settings: Settings) -> Iterator[Stage]:
    from vkcocoon_net import is_unicast_ipv4
    from vkcocoon_stages import examine_address, examine_pod

    if is_unicast_ipv4(target):
        if port is not None and ssh_banner:
            raise click.UsageError("--port and --ssh-banner exclude each other: the banner is awaited at port 22")
        return examine_address(target, tools, port=port, banner=ssh_banner)
    if not re.fullmatch(POD, target) or re.fullmatch(r"[\d.]+", target):
        raise click.BadParameter(f"{target!r} is no pod (web-0, or namespace/web-0) and no IPv4 address of a guest")
    if port is not None or ssh_banner:
        raise click.UsageError("a pod says itself how it is probed; --port and --ssh-banner are for an address")
    return examine_pod(_pod(target, settings), tools)


def _pod(target: str, settings: Settings) -> Mapping[str, Any]:
    from vkcocoon_kube import ApiError, HttpKubeApi, KubeconfigError

    namespace, _, name = target.rpartition("/")
    try:
        return HttpKubeApi(settings.kubeconfig).get(f"/api/v1/namespaces/{namespace or 'default'}/pods/{name}")
    except KubeconfigError as error:
        raise Misconfigured(f"KUBECONFIG: {' '.join(str(error).split())}") from None
    except ApiError as error:
        raise OneLine(f"the pod {target} cannot be read: {error}") from None


def _tools(settings: Settings) -> Tools:
    from vkcocoon_guests import Reach
    from vkcocoon_net import LeaseFile, open_pinger, ssh_banner, tcp_accepts
    from vkcocoon_probes import SystemClock
    from vkcocoon_stages import Tools
    from vkcocoon_vms import CocoonCLI, CocoonMacosCLI

    return Tools(
        clock=SystemClock(),
        runtime=CocoonCLI(settings.cocoon_bin),
        macos=CocoonMacosCLI(settings.cocoon_macos_bin),
        leases=LeaseFile(settings.leases_path),
        reach=Reach(open_pinger(), tcp_accepts, ssh_banner),
    )


def _stage_line(stage: Stage, paint: Paint) -> str:
    reason = f"  {stage.reason}" if stage.reason else ""
    return f"{paint.mark(stage.mark)} {stage.name:<8} {milliseconds(stage.seconds):>9}  {printable(stage.text)}{reason}"


def _stage_entry(stage: Stage) -> dict[str, object]:
    return {
        "stage": stage.name,
        "result": str(stage.mark),
        "reason": stage.reason,
        "message": stage.text,
        "seconds": round(stage.seconds, 6),
    }


# doctor -----------------------------------------------------------------------------------------------------------


@click.command(short_help="Check this host and its service, and say how to mend them.")
@click.option("--pre", is_flag=True, help="Only what a host needs before anything is installed.")
@click.option("--strict", is_flag=True, help="Count warnings as errors.")
@env_file_option
@output_option("table", "json")
@color_option
def doctor(pre: bool, strict: bool, env_file: str | None, output: str, color: str) -> None:
    """Check this host, its leases, cocoon, the cluster and the service, and say how to mend what is wrong.

    Changes nothing. Exits with 1 when something is wrong; with --strict also for a warning.

    \b
    Examples:
      vk-cocoon doctor
      vk-cocoon doctor --pre
      vk-cocoon doctor -o json --strict
    """
    import vkcocoon  # first: it makes what follows cooperative
    import vkcocoon_logs

    vkcocoon_logs.configure("critical", "text")  # the findings say it
    paint = Paint(color, sys.stdout, os.environ)
    sections: dict[str, list[Finding]] = {}
    for section, finding in _findings(environment(env_file), env_file or DEFAULT_PATH, vkcocoon.__version__, pre=pre):
        if output == "table":
            for line in _finding_lines(section, finding, paint, first=section not in sections):
                click.echo(line)
        sections.setdefault(section, []).append(finding)
    marks = [finding.mark for found in sections.values() for finding in found]
    errors, warnings = marks.count(Mark.FAILED), marks.count(Mark.WARNING)
    if output == "json":
        told = [{"name": name, "checks": list(map(_finding_entry, found))} for name, found in sections.items()]
        print_json({"errors": errors, "warnings": warnings, "sections": told})
    else:
        click.echo(f"\n{_number(errors, 'error')}, {_number(warnings, 'warning')}")
    sys.exit(NOT_WELL if errors or (strict and warnings) else 0)


def _findings(found: Environment, env_file: str, version: str, *, pre: bool) -> Iterator[tuple[str, Finding]]:
    from vkcocoon_commands import CommandRunner
    from vkcocoon_doctor import Site, examine
    from vkcocoon_kube import HttpKubeApi
    from vkcocoon_probes import SystemClock
    from vkcocoon_window import ask

    settings = Settings.load(found.values)
    site = Site(
        settings=settings,
        clock=SystemClock(),
        execute=CommandRunner(),
        connect=lambda: HttpKubeApi(settings.kubeconfig),
        ask=ask,
        version=version,
        env_file=env_file,
        strangers=Settings.strangers(found.values),
    )
    return examine(site, pre=pre)


def _finding_lines(section: str, finding: Finding, paint: Paint, *, first: bool) -> Iterator[str]:
    if first:
        yield section
    yield f"{paint.mark(finding.mark)} {printable(finding.text)}"
    if finding.fix:
        yield f"    fix: {finding.fix}"


def _finding_entry(finding: Finding) -> dict[str, str]:
    return {"name": finding.name, "result": str(finding.mark), "text": finding.text, "fix": finding.fix}


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


INSPECTIONS: Mapping[str, tuple[click.Command, ...]] = {
    "Service": (config,),
    "Inspect": (status, doctor, probe, leases),
}
