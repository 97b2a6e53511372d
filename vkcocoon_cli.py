"""The commands: what a person or a unit file types.

Each command says what it needs and imports it when it is called, so that help, version and completion answer at once
and never load gevent, kubernetes, paramiko or rich. `run` and `simulate` import vkcocoon before anything else, because
that import makes the process cooperative and must not come too late (D6).

Data goes to stdout, talk to stderr. Exit codes (D5): 0 ok, 1 failed, 2 wrong usage, 70 internal error, 78 a setting
that cannot be right, 130 ended by Ctrl-C. They are decided in one place, `_Commands`.
"""

import difflib
import json
import logging
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import util
from typing import Any, NoReturn

import click

from vkcocoon_inspection import INSPECTIONS, Misconfigured, OneLine, check_start, config_lines, remarks, strange
from vkcocoon_settings import SETTINGS, SettingError, Settings, WrongSettings

__all__ = ["cli", "main"]

INTERNAL_ERROR = 70
INTERRUPTED = 130  # as shells say it

SECTIONS = {
    "run": "Service",
    **{command.name or "": section for section, commands in INSPECTIONS.items() for command in commands},
    "simulate": "Simulate",
    "playground": "Simulate",
    "completion": "Other",
    "version": "Other",
}


class _Output:
    """stdout, and the error when it could not be written, to tell that from errors of the commands."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.trouble: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._noted(self._stream.write, text)

    def flush(self) -> None:
        if self._stream is not None:  # as it is when there was none to begin with
            self._noted(self._stream.flush)

    def _noted(self, call: Callable[..., Any], *words: str) -> Any:
        try:
            return call(*words)
        except OSError as error:
            self.trouble = error
            raise

    def away(self) -> None:
        """Put the stream itself back. What it did not take is dropped, or the interpreter would complain at its end."""
        if sys.stdout is self:
            sys.stdout = self._stream
        if self.trouble is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class _Commands(click.Group):
    """Commands listed under headings, and the one place where exceptions become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for section in dict.fromkeys(SECTIONS.values()):
            rows = [
                (name.ljust(width), command.get_short_help_str(80))
                for name, command in self.commands.items()
                if SECTIONS[name] == section
            ]
            with formatter.section(section):
                formatter.write_dl(rows)

    def main(self, *args: Any, **options: Any) -> NoReturn:
        stdout = _Output(sys.stdout)
        if sys.stdout is not None:
            sys.stdout = stdout
        try:
            code = self._run(*args, **options)
            stdout.flush()
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except OSError as error:
            if stdout.trouble is not error:
                raise
            code = 1
        finally:
            stdout.away()
        if stdout.trouble is not None and not isinstance(stdout.trouble, BrokenPipeError):
            click.echo(f"vk-cocoon: stdout cannot be written: {stdout.trouble.strerror}", err=True)
        sys.exit(code)

    def _run(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options | {"standalone_mode": False})
        except SystemExit as ended:
            return ended.code
        except click.Abort:
            return INTERRUPTED

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (SettingError, WrongSettings) as error:
            raise Misconfigured(str(error)) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click's own ways to end; it closes a broken pipe quietly
        except Exception as error:  # the root of the program: whatever it was, say so in full and exit 70
            if error is getattr(sys.stdout, "trouble", None):
                raise
            click.echo(f"vk-cocoon {_version()}: internal error, please report it:\n{traceback.format_exc()}", err=True)
            ctx.exit(INTERNAL_ERROR)


class _RunCommand(click.Command):
    """`run --help` with the settings under the headings of their table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        grouped = {f"--{row.name.replace('_', '-')}": row.group for row in SETTINGS}
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record:
                sections.setdefault(grouped.get(parameter.opts[0], "Other"), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


class _Duration(click.ParamType[float]):
    """ "90", "90s", "1m30s", "500ms", "2h"; a float of seconds."""

    name = "duration"
    UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
            return float(text)
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|h|m|s)", text, re.ASCII)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            self.fail(f"{text!r} is not a duration such as 30s, 1m30s or 500ms", param, ctx)
        return sum(float(number) * self.UNITS[unit] for number, unit in parts)


DURATION = _Duration()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.pass_context
def cli(ctx: click.Context, version: bool) -> None:
    """A kubelet for Cocoon microVMs and macOS guests.

    \b
    Examples:
      vk-cocoon run --check-config
      vk-cocoon simulate three-guests --seed 7
      vk-cocoon playground --for 30s
    """
    if version:
        click.echo(f"vk-cocoon {_version()}")
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


# run --------------------------------------------------------------------------------------------------------------


def _settings_options(command: Any) -> Any:
    # Applied in reverse, because click puts the option of the outermost decorator first.
    for row in reversed(SETTINGS):
        if row.flag:
            default = row.default or row.absent
            option = click.option(
                row.flag, row.name, metavar=row.kind.metavar, help=f"{row.help}  [{row.env}; default: {default}]"
            )
            command = option(command)
    return command


@cli.command(cls=_RunCommand)
@_settings_options
@click.option("--check-config", is_flag=True, help="Check the settings, show where each comes from, and exit.")
def run(check_config: bool, **flags: str | None) -> None:
    """Run the kubelet of this host (what the systemd unit starts).

    \b
    Examples:
      vk-cocoon run
      vk-cocoon run --node-name rack1-host7 --log-level debug
      vk-cocoon run --check-config
    """
    given = {name: text for name, text in flags.items() if text}
    settings = Settings.load(os.environ, given, files=True)
    if check_config:
        _show_config(settings, given)
        return
    import vkcocoon
    import vkcocoon_logs
    from vkcocoon_host import HostError
    from vkcocoon_http import CannotListen
    from vkcocoon_kube import KubeconfigError

    vkcocoon_logs.configure(settings.log_level, settings.log_format)
    for stranger, meant in Settings.strangers(os.environ).items():
        logging.getLogger("vkcocoon_settings").warning(strange(stranger, meant))
    try:
        sys.exit(vkcocoon.main(settings))
    except KubeconfigError as error:
        raise Misconfigured(f"KUBECONFIG: {' '.join(str(error).split())}") from None
    except (CannotListen, HostError) as error:
        # Not 78: the port may be free and the network there when the unit tries again.
        raise OneLine(str(error)) from None


def _show_config(settings: Settings, flags: dict[str, str]) -> None:
    for line in config_lines(settings, lambda row: Settings.origin(row.name, os.environ, flags)):
        click.echo(line)
    for remark in remarks(settings, os.environ):
        click.echo(f"vk-cocoon: {remark}", err=True)
    check_start(settings)


for _command in (command for commands in INSPECTIONS.values() for command in commands):
    cli.add_command(_command)


# simulate, playground ---------------------------------------------------------------------------------------------


@cli.command()
@click.argument("scenario", required=False)
@click.option("--from-log", metavar="PATH", help="Make the scenario from the event log of a host or a simulation.")
@click.option("--write", metavar="FILE", help="Where to write the scenario made from a log; - is stdout.")
@click.option("--seed", type=click.IntRange(min=0), help="Draw the order of simultaneous things from this number.")
@click.option("--until", type=DURATION, metavar="TIME", help="Stop at this instant of virtual time, such as 6m20s.")
@click.option("--events", metavar="FILE", help="Write the event log there, one JSON object a line; - is stdout.")
@click.option("--report", metavar="FILE", help="Write a page with a lane for everything, to be opened in a browser.")
@click.option("--timeline", is_flag=True, help="Show lanes instead of a list of events.")
@click.option("--check", is_flag=True, help="Run it twice and fail where the two runs differ.")
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="Run it with N seeds; stop at the first failure.")
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="J", help="In so many processes; one per core if not given."
)
@click.option("--smallest", metavar="FILE", help="Where to write the smallest scenario that fails.")
@click.option("--prepare", metavar="MODULE:FUNCTION", default="", help="Call this first, to put a bug back.")
def simulate(scenario: str | None, **options: Any) -> None:
    """Run a scenario on simulated VMs in virtual time.

    SCENARIO is a YAML file, or the name of one that is shipped. Exits with 1 when one of its expectations or an
    invariant is broken. With --from-log it is made from what a daemon wrote under run --record (a file, or the whole
    directory), written to PATH.replay.yaml unless --write says otherwise, and run; exits with 1 when it does not show
    the flips of the log.

    \b
    Examples:
      vk-cocoon simulate three-guests
      vk-cocoon simulate my-race.yaml --seed 7 --check
      vk-cocoon simulate my-race.yaml --runs 2000
      vk-cocoon simulate three-guests --report run.html
      vk-cocoon simulate three-guests --events - | jq .
      vk-cocoon simulate --from-log /var/lib/vk-cocoon/record --write incident.yaml
    """
    if (scenario is None) is (options["from_log"] is None):
        raise click.UsageError("say either SCENARIO or --from-log PATH")
    path = None if scenario is None else _scenario_file(scenario)
    import vkcocoon  # noqa: F401  first, see above
    import vkcocoon_logs
    from simulator import simulate as simulation

    vkcocoon_logs.configure("error", "text")  # what goes wrong in a scenario is its purpose, and in its event log
    sys.exit(simulation.main(path, **options))


def _scenario_file(text: str) -> str:
    if os.path.exists(text):
        return text
    spec = util.find_spec("simulator")
    folder = os.path.join(os.path.dirname(spec.origin), "scenarios") if spec and spec.origin else ""
    shipped = sorted(name.removesuffix(".yaml") for name in os.listdir(folder) if name.endswith(".yaml"))
    if text in shipped:
        return os.path.join(folder, f"{text}.yaml")
    near = difflib.get_close_matches(text, shipped, n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(shipped)}"
    raise click.BadParameter(f"there is no file {text!r}; {hint}", param_hint="SCENARIO")


@cli.command()
@click.argument("scenario", required=False)
@click.option("--for", "seconds", type=DURATION, metavar="TIME", help="Stop after this long instead of at Ctrl-C.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the API server; 0 is any free one.")
@click.option("--table/--no-table", default=True, help="Whether to show the pods as a live table.")
@click.option("--tour/--no-tour", default=True, help="Without SCENARIO: whether to start with pods and a story.")
@click.option("--stay", is_flag=True, help="Do not end with the scenario.")
@click.option("--loopback", is_flag=True, help="Do without network namespaces even where they are granted.")
@click.option("--kubeconfig", metavar="FILE", help="Play on the cluster behind this file, not on a fake API server.")
@click.option("--seed", type=click.IntRange(min=0), help="Draw what the scenario leaves open from this number.")
@click.option("--allowance", type=DURATION, metavar="TIME", default="6s", help="How early or late things may be; 6s.")
@click.option("--report", metavar="FILE", help="Write a page with a lane for everything, to be opened in a browser.")
def playground(scenario: str | None, **options: Any) -> None:
    """Run the same world live, with an API server for kubectl.

    SCENARIO is a file that `simulate` takes, or the name of one that is shipped; without it there is a tour. Exits with
    1 when an expectation is broken, with 2 when something of it cannot be live.

    \b
    Examples:
      vk-cocoon playground
      vk-cocoon playground three-guests
      vk-cocoon playground my-race.yaml --report live.html
      vk-cocoon playground my-race.yaml --kubeconfig ~/.kube/config
      vk-cocoon playground --for 30s --no-table
    """
    path = None if scenario is None else _scenario_file(scenario)
    from simulator import playground as live  # starts the daemon in a process of its own, which patches itself

    sys.exit(live.main(path, **options))


# completion, version ----------------------------------------------------------------------------------------------


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Examples:
      vk-cocoon completion bash > /etc/bash_completion.d/vk-cocoon
      vk-cocoon completion fish > ~/.config/fish/completions/vk-cocoon.fish
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None  # click knows these three
    click.echo(script(cli, {}, "vk-cocoon", "_VK_COCOON_COMPLETE").source())


@cli.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def version(output: str) -> None:
    """Show the version and what it runs on.

    \b
    Examples:
      vk-cocoon version
      vk-cocoon version -o json
    """
    build = _build()
    if output == "json":
        click.echo(json.dumps(build, indent=2))
        return
    width = max(map(len, build)) + 1
    for name, value in build.items():
        click.echo(f"{name + ':':<{width}} {value}")


def _build() -> dict[str, str]:
    from importlib import metadata

    import gevent

    loop = gevent.get_hub().loop
    return {
        "version": _version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gevent": gevent.__version__,
        "loop": f"{type(loop).__module__.split('.')[1]} {loop.backend}",
        "kubernetes": metadata.version("kubernetes"),
    }


def _version() -> str:
    """Read from the source: importing vkcocoon would load gevent, and what pip noted may be older than the code."""
    spec = util.find_spec("vkcocoon")
    source = getattr(spec and spec.loader, "get_source", lambda name: "")("vkcocoon") or ""
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    return found[1] if found else "unknown"


def main(arguments: Iterable[str] | None = None) -> NoReturn:
    """The program's entry; ends it with its exit code."""
    cli.main(args=None if arguments is None else list(arguments), prog_name="vk-cocoon")
    raise AssertionError("click ends the program")


if __name__ == "__main__":
    main()
