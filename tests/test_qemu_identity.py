"""M1: a QEMU process is alive when its pid exists, is no zombie, runs qemu-system-*, and names this VM's directory.

Everything else that could answer to a pid (another program, another guest, a dead process nobody collected) is not it,
and is never touched: asking only reads.
"""

import errno
import os
import resource
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from vkcocoon_vms import VM, CocoonMacosCLI, CommandError, Completed, Process, read_process

DIRECTORY = "/var/lib/cocoon-macos/vms/foo"
FOO = VM(id="qemu-foo", name="foo", hypervisor="qemu", pid=4711, disk=f"{DIRECTORY}/disk.qcow2")
NO_DISK = replace(FOO, disk="")


def qemu_argv(directory, program="qemu-system-x86_64"):
    return (
        program,
        "-m",
        "8192",
        "-drive",
        f"id=system,if=none,file={directory}/disk.qcow2",
        "-monitor",
        f"unix:{directory}/monitor.sock,server,nowait",
        "-pidfile",
        f"{directory}/qemu.pid",
    )


def alive(vm, process):
    table = {process.pid: process} if process else {}
    cli = CocoonMacosCLI("cocoon-macos", execute=lambda argv, limit: Completed(0, "", ""), processes=table.get)
    return cli.alive(vm)


# --- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vm", [FOO, NO_DISK])
@pytest.mark.parametrize("state", ["R", "S", "D", "T", "t", "I"])
def test_a_qemu_of_this_vm_is_alive_in_every_state_of_the_living(vm, state):
    assert alive(vm, Process(4711, state, qemu_argv(DIRECTORY)))


@pytest.mark.parametrize("program", ["/usr/bin/qemu-system-x86_64", "qemu-system-aarch64", "/opt/q/qemu-system-x86_64"])
def test_any_system_emulator_counts_wherever_it_lies(program):
    assert alive(FOO, Process(4711, "S", qemu_argv(DIRECTORY, program)))


def test_no_process_is_dead():
    assert not alive(FOO, None)


def test_who_cannot_look_says_neither_alive_nor_dead():
    def without_descriptors(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), f"/proc/{pid}/stat")

    cli = CocoonMacosCLI(
        "cocoon-macos", execute=lambda argv, limit: Completed(0, "", ""), processes=without_descriptors
    )
    with pytest.raises(CommandError, match="process 4711: cannot be read: Too many open files"):
        cli.alive(FOO)


@pytest.mark.process
def test_without_descriptors_a_living_process_is_not_called_dead():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_process(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert read_process(os.getpid()) is not None


@pytest.mark.parametrize("pid", [0, -1])
def test_a_record_without_a_pid_is_dead_and_no_process_is_asked_about(pid):
    def refuse(pid):
        raise AssertionError("asked")

    cli = CocoonMacosCLI("cocoon-macos", execute=lambda argv, limit: Completed(0, "", ""), processes=refuse)
    assert not cli.alive(replace(FOO, pid=pid))


@pytest.mark.parametrize("state", ["Z", "X", "x"])
def test_a_process_nobody_collected_is_dead_even_if_its_command_line_could_be_read(state):
    assert not alive(FOO, Process(4711, state, qemu_argv(DIRECTORY)))
    assert not alive(FOO, Process(4711, state))


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("",),
        ("sleep", "1000"),
        ("vim", f"{DIRECTORY}/vm.json"),
        ("qemu-img", "info", f"{DIRECTORY}/disk.qcow2"),
        ("qemu-nbd", f"{DIRECTORY}/disk.qcow2"),
        ("ip", "netns", "exec", "cm-x", *qemu_argv(DIRECTORY)),
        ("cocoon-macos", "_vnc-proxy", f"{DIRECTORY}/vnc.sock"),
        qemu_argv(DIRECTORY, "my-qemu-system-x86_64"),
        qemu_argv(DIRECTORY, "/qemu-system-x86_64/sleep"),
    ],
)
def test_a_pid_that_belongs_to_another_program_now_is_dead(argv):
    assert not alive(FOO, Process(4711, "S", argv))


@pytest.mark.parametrize(
    "directory",
    [
        f"{DIRECTORY}-clone",
        f"{DIRECTORY}2",
        f"{DIRECTORY}.old",
        "/var/lib/cocoon-macos/vms/bar",
        "/var/lib/cocoon-macos/vms/a-foo",
        "/var/lib/cocoon-macos/vms/fooo",
    ],
)
@pytest.mark.parametrize("vm", [FOO, NO_DISK])
def test_a_pid_that_belongs_to_another_guest_now_is_dead(vm, directory):
    assert not alive(vm, Process(4711, "S", qemu_argv(directory)))


def test_the_same_name_below_another_state_directory_is_another_guest():
    elsewhere = Process(4711, "S", qemu_argv(f"/mnt{DIRECTORY}"))
    assert not alive(FOO, elsewhere)
    assert alive(NO_DISK, elsewhere), "a record that does not say where it lives is found by its name"


def test_the_directory_alone_without_a_path_inside_does_not_count():
    assert not alive(FOO, Process(4711, "S", ("qemu-system-x86_64", "-chardev", DIRECTORY)))


def test_a_directory_in_the_programs_own_name_does_not_count():
    assert not alive(FOO, Process(4711, "S", (f"{DIRECTORY}/qemu-system-x86_64", "-m", "8192")))


@pytest.mark.parametrize("name", ["a.b", "a+b", "(x)", "a[0]"])
def test_a_name_is_taken_literally(name):
    vm = replace(NO_DISK, name=name)
    assert alive(vm, Process(4711, "S", qemu_argv(f"/m/vms/{name}")))
    assert not alive(vm, Process(4711, "S", qemu_argv("/m/vms/axb")))
    assert not alive(vm, Process(4711, "S", qemu_argv("/m/vms/aab")))


# --- real processes ------------------------------------------------------------------------------------------------


@contextmanager
def process(*argv):
    """A real process that calls itself `argv[0]`, and waits."""
    script = 'exec -a "$0" sh -c "read line" "$@"'
    child = subprocess.Popen(["bash", "-c", script, *argv], stdin=subprocess.PIPE)
    try:
        wait_for(lambda: (found := read_process(child.pid)) and (found.argv[:1], found.state) == (argv[:1], "S"))
        yield child
    finally:
        child.kill()
        child.wait()


def wait_for(holds):
    for _ in range(500):
        if holds():
            return
        time.sleep(0.01)  # noqa: TID251  a real process needs real time
    raise AssertionError("never came true")


@pytest.fixture
def cli():
    return CocoonMacosCLI("cocoon-macos", execute=lambda argv, limit: Completed(0, "", ""))


@pytest.mark.process
def test_a_real_process_that_looks_like_it_is_alive_until_it_is_gone(cli):
    with process(*qemu_argv(DIRECTORY)) as child:
        vm = replace(FOO, pid=child.pid)
        assert cli.alive(vm)
        assert not cli.alive(replace(vm, name="fo", disk="/var/lib/cocoon-macos/vms/fo/disk.qcow2"))
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: read_process(child.pid).state == "T")
        assert cli.alive(vm), "a stopped QEMU still owns its disk"
    assert not cli.alive(vm)


@pytest.mark.process
def test_a_real_stranger_at_the_recorded_pid_is_dead_and_lives_on(cli):
    with process("sleep-like", "1000") as stranger:
        assert not cli.alive(replace(FOO, pid=stranger.pid))
        assert read_process(stranger.pid).state == "S"


@pytest.mark.process
def test_a_real_zombie_is_dead(cli):
    """Its parent is another program that never collects it, so that nobody in this process can."""
    # It ends only once its parent has turned into a program that does not even know of it.
    script = '( until [ "$(cat /proc/$$/comm)" = sleep ]; do :; done ) & echo $!; exec sleep 1000'
    parent = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        wait_for(lambda: (found := read_process(pid)) and found.state == "Z")
        assert read_process(pid) == Process(pid, "Z", ())
        os.kill(pid, 0)  # the test that is fooled by it
        assert not cli.alive(replace(FOO, pid=pid))
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.process
def test_a_process_is_read_as_it_is_even_with_a_name_made_to_confuse():
    with process("qemu) R (x", "a b", "", "c\nd") as child:
        found = read_process(child.pid)
        assert (found.pid, found.state) == (child.pid, "S")
        assert found.argv[0] == "qemu) R (x"
        assert found.argv[-3:] == ("a b", "", "c\nd")


@pytest.mark.process
def test_a_comm_with_parentheses_and_blanks_does_not_shift_the_state(tmp_path):
    program = tmp_path / "a) Z (b c"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "1000"])
    try:
        wait_for(lambda: b"a) Z" in Path(f"/proc/{child.pid}/stat").read_bytes())
        wait_for(lambda: read_process(child.pid).state == "S")
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**31])
def test_a_pid_that_cannot_be_is_nobody(pid):
    assert read_process(pid) is None
