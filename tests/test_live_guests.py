"""Live guests on a real kernel: echo switch, listeners, the banner, sshd, DHCP, and the probes that look at them.

Each test runs as a program of its own inside namespaces (see `inside`), with a bridge and a DHCP door; the guests are
processes, the probes are vkcocoon_net's.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from simulator import namespaces

LIMIT_S = 30


BODIES = {}


def inside(body, *, bridged=True):
    """Make a test of `body(station)`: it runs in new namespaces, in a process whose failure is the test's."""
    BODIES[body.__name__] = body

    @pytest.mark.kernel
    def test():
        kind = namespaces.available()[0] if bridged else "none"
        if not kind:
            pytest.skip("this kernel grants no namespaces")
        home = namespaces.free_directory() if bridged else namespaces.temporary_home()
        words = [sys.executable, __file__, body.__name__, home, "bridged" if bridged else "loopback"]
        done = subprocess.run(
            namespaces.watcher_command(kind, home, words),
            env=namespaces.environment(**{namespaces.MARK: f"test{os.getpid()}"}),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return test


def inside_without_namespaces(body):
    return inside(body, bridged=False)


class Station:
    """The host's side of a bridge with guests on it."""

    def __init__(self, home, *, bridged):
        from simulator.live_world import GuestNetwork, Place
        from vkcocoon_net import open_pinger
        from vkcocoon_probes import SystemClock

        self.home = home
        self.clock = SystemClock()
        self.network = GuestNetwork(Place(home, bridged), self.clock)
        self.network.start()
        self.pinger = open_pinger()
        self.processes = []

    def guest(self, name="vm-1", mac="0a:58:0a:58:00:21", os_name="linux", **spec):
        """Power a guest on and wait until it has its address."""
        from simulator.fake_guests import tell
        from simulator.fake_vms import GuestSpec

        fields = {"os": os_name, "boot_s": 0.0, "lease_s": 0.0, **spec}
        GuestSpec(**fields)
        (self.home / "guests" / f"{name}.json").write_text(json.dumps(fields))
        words = ["--home", str(self.home), "--vm", name, "--mac", mac, "--os", os_name, "--", "decoy", "-pidfile", "x"]
        process = subprocess.Popen([sys.executable, "-m", "simulator.fake_guests", *words])
        self.processes.append(process)
        guest = LiveGuest(name, process, lambda **order: tell(self.home, name, order))
        self.until(lambda: guest.answers() and guest.tell(status=True)["ip"])
        guest.ip = guest.tell(status=True)["ip"]
        return guest

    def power_on(self, name, mac, program="cloud-hypervisor", os_name="linux"):
        """As the fake command lines do it; the pid."""
        from simulator.fake_executables import LiveHost
        from simulator.fake_tools import Machine

        (self.home / "guests" / f"{name}.json").write_text(json.dumps({"boot_s": 0.0, "lease_s": 0.0}))
        argv = (program, "-pidfile", f"{self.home}/{program}.pid")
        return LiveHost(self.home).power_on(Machine(name=name, vm_id=name, mac=mac, os=os_name, argv=argv))

    def forked(self, name, mac):
        from simulator.fake_guests import tell

        self.power_on(name, mac)
        guest = LiveGuest(name, None, lambda **order: tell(self.home, name, order))
        self.until(lambda: guest.answers() and guest.tell(status=True)["ip"])
        guest.ip = guest.tell(status=True)["ip"]
        self.until(lambda: self.echoes(guest, 0.2))
        return guest

    def deadline(self, seconds=1.0):
        from vkcocoon_probes import Deadline

        return Deadline(self.clock, seconds)

    def echoes(self, guest, seconds=1.0):
        from vkcocoon_net import PingError

        try:
            return 0 <= self.pinger.ping(guest.ip, self.deadline(seconds)) < seconds
        except PingError:
            return False

    def accepts(self, guest, port):
        from vkcocoon_net import tcp_accepts

        try:
            tcp_accepts(guest.ip, port, self.deadline())
            return True
        except ConnectionRefusedError:
            return False

    def banner(self, guest, seconds=1.0):
        from vkcocoon_net import ssh_banner

        try:
            return ssh_banner(guest.ip, self.deadline(seconds))
        except OSError:
            return ""

    def until(self, holds, limit_s=10.0):
        end = self.clock.monotonic() + limit_s
        while not holds():
            assert self.clock.monotonic() < end, "never came true"
            self.clock.sleep(0.01)


class LiveGuest:
    def __init__(self, name, process, tell):
        self.name = name
        self.process = process
        self.tell = tell
        self.ip = ""

    def answers(self):
        with contextlib.suppress(OSError):
            return bool(self.tell(status=True))
        return False


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid):
    return Path(f"/proc/{pid}").exists()


@inside
def test_a_guest_gets_the_address_that_the_lease_file_names_for_its_mac(station):
    from vkcocoon_net import LeaseFile

    guest = station.guest(mac="0A:58:0a:58:00:AB")
    lease = LeaseFile(str(station.home / "leases.json")).lookup("0a:58:0a:58:00:ab", station.clock.now())
    assert lease.ip == guest.ip


@inside
def test_an_address_is_asked_for_after_the_boot_and_not_before(station):
    from simulator.fake_guests import tell

    begin = station.clock.monotonic()
    guest = station.guest(boot_s=0.6, lease_s=0.2)
    assert station.clock.monotonic() - begin >= 0.8
    assert tell(station.home, guest.name, {"status": True})["up_s"] >= 0.8


@inside
def test_a_guest_whose_dhcp_server_is_away_keeps_asking(station):
    network = station.network
    free = network.cocoon_net.request
    refused = []

    def refuse_twice(mac):
        refused.append(mac)
        return "" if len(refused) <= 2 else free(mac)

    network.cocoon_net.request = refuse_twice
    station.guest(mac="0a:58:0a:58:00:21")
    assert refused == ["0a:58:0a:58:00:21"] * 3


@inside
def test_the_echo_switch_silences_one_guest_and_lets_it_speak_again(station):
    silent, other = station.guest("vm-1"), station.guest("vm-2", "0a:58:0a:58:00:22")
    assert station.echoes(silent)
    silent.tell(echo=False)
    assert not station.echoes(silent, 0.3)
    assert station.echoes(other)
    silent.tell(echo=True)
    assert station.echoes(silent)


@inside
def test_an_echo_that_starts_late_is_silent_until_then(station):
    guest = station.guest(echo_after_s=0.7)
    assert not station.echoes(guest, 0.2)
    station.until(lambda: station.echoes(guest, 0.2))
    assert guest.tell(status=True)["up_s"] >= 0.7


@inside
def test_a_guest_that_hangs_answers_nothing_and_refuses_nothing(station):
    guest, other = station.guest("vm-1", ports=[3389]), station.guest("vm-2", "0a:58:0a:58:00:22")
    assert station.echoes(guest)
    guest.tell(mute=True)
    assert not station.echoes(guest, 0.3)
    for port in (3389, 5986):
        try:
            socket.create_connection((guest.ip, port), timeout=0.3)
            raise AssertionError("it answers")
        except TimeoutError:
            pass
    assert station.echoes(other)
    guest.tell(mute=False)
    assert station.echoes(guest)
    assert station.accepts(guest, 3389)


@inside
def test_echoes_can_be_slow_and_be_lost(station):
    guest = station.guest(latency_s=0.3)
    assert not station.echoes(guest, 0.2)
    assert station.echoes(guest, 2.0)
    guest.tell(latency=0)
    assert station.echoes(guest, 0.25)
    guest.tell(loss=1)
    assert not station.echoes(guest, 0.3)
    guest.tell(loss=0)
    assert station.echoes(guest)


@inside
def test_a_reboot_from_inside_is_a_new_beginning_in_the_same_process(station):
    guest = station.guest(boot_s=0.3, ports=[3389])
    pid = guest.tell(echo=False, open=5986)["pid"]
    guest.tell(reboot=True)
    assert guest.tell(status=True)["ip"] == ""
    assert not station.echoes(guest, 0.2)
    station.until(lambda: guest.tell(status=True)["ip"] == guest.ip)
    status = guest.tell(status=True)
    assert (status["pid"], status["ports"], status["echo"]) == (pid, [3389], True)
    assert station.echoes(guest)


@inside
def test_a_guest_takes_another_address_without_asking_and_goes_on(station):
    guest = station.guest(ports=[3389])
    guest.tell(mute=True)
    assert guest.tell(address="10.88.0.77")["mute"]
    guest.tell(mute=False)
    guest.ip = "10.88.0.77"
    assert station.echoes(guest)
    assert station.accepts(guest, 3389)


@inside
def test_a_guest_that_is_still_booting_takes_the_address_it_was_told_once_it_is_up(station):
    from simulator.fake_guests import tell

    (station.home / "guests" / "vm-2.json").write_text(json.dumps({"os": "linux", "boot_s": 1.0, "lease_s": 0.0}))
    words = ["--home", str(station.home), "--vm", "vm-2", "--mac", "0a:58:0a:58:00:22", "--os", "linux"]
    process = subprocess.Popen([sys.executable, "-m", "simulator.fake_guests", *words])
    guest = LiveGuest("vm-2", process, lambda **order: tell(station.home, "vm-2", order))
    station.until(guest.answers)
    assert guest.tell(address="10.88.0.78")["ip"] == ""
    station.until(lambda: guest.tell(status=True)["ip"])
    assert guest.tell(status=True)["ip"] == "10.88.0.78"
    process.kill()


@inside
def test_a_port_may_say_something_to_who_connects(station):
    guest = station.guest()
    guest.tell(open=7000, says="hello")
    with socket.create_connection((guest.ip, 7000), timeout=5) as visitor:
        assert visitor.recv(100) == b"hello\r\n"


@inside
def test_a_guest_tells_when_it_has_power_and_an_address(station):
    from simulator.telling import SOCKET

    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.bind(str(station.home / SOCKET))
    ear.settimeout(5)
    guest = station.guest()
    told = [json.loads(ear.recv(65536)) for _ in range(2)]
    assert [(actor, kind, vm) for actor, kind, vm, _ in told] == [
        ("host", "power on", "vm-1"),
        ("guest", "address", "vm-1"),
    ]
    assert told[1][3] == {"ip": guest.ip}


@inside
def test_ports_refuse_until_they_are_opened_and_after_they_are_closed(station):
    guest = station.guest(os_name="windows", ports=[3389])
    assert station.accepts(guest, 3389)
    assert not station.accepts(guest, 5986)
    assert guest.tell(open=5986)["ports"] == [3389, 5986]
    assert station.accepts(guest, 5986)
    with socket.create_connection((guest.ip, 5986), timeout=5) as visitor:
        guest.tell(close=5986)
        assert visitor.recv(1) == b""
    assert not station.accepts(guest, 5986)
    assert station.accepts(guest, 3389)


@inside
def test_port_22_accepts_before_anybody_speaks(station):
    guest = station.guest(os_name="macos", ssh_after_s=1.0)
    assert station.accepts(guest, 22)
    assert station.banner(guest, 0.2) == ""
    station.until(lambda: station.banner(guest) == "SSH-2.0-OpenSSH_9.9")
    assert guest.tell(status=True)["up_s"] >= 1.0


@inside
def test_a_dial_that_waits_for_the_banner_gets_it_when_sshd_comes_up(station):
    guest = station.guest(os_name="macos", ssh_after_s=0.8)
    assert station.banner(guest, 3.0) == "SSH-2.0-OpenSSH_9.9"


@inside
def test_the_banner_can_be_changed_and_withheld(station):
    guest = station.guest(ports=[22])
    guest.tell(banner="SSH-2.0-Other_1")
    assert station.banner(guest) == "SSH-2.0-Other_1"
    guest.tell(banner=None)
    assert station.banner(guest, 0.2) == ""
    guest.tell(banner="220 this is a mail server")
    assert station.banner(guest, 0.2) == ""
    guest.tell(banner="SSH-2.0-Back_1")
    assert station.banner(guest) == "SSH-2.0-Back_1"


@inside
def test_a_real_ssh_client_gets_in_and_is_told_where_it_is(station):
    import paramiko

    guest = station.guest(os_name="macos", ssh_after_s=0.0)
    station.until(lambda: station.banner(guest))
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
    with client:
        client.connect(guest.ip, username="admin", password="admin", look_for_keys=False, allow_agent=False)
        _, out, _ = client.exec_command("uname")
        assert out.read().startswith(b"vm-1: macos guest of the vk-cocoon playground, up ")
        assert out.channel.recv_exit_status() == 0


@inside
def test_a_crash_takes_the_machine_off_the_bridge_and_the_next_one_keeps_its_address(station):
    first = station.guest(ports=[22])
    with contextlib.suppress(OSError, ValueError):
        first.tell(crash=True)
    assert first.process.wait(timeout=5) == -signal.SIGKILL
    # The kernel takes a namespace apart some time after its last process is gone.
    station.until(lambda: not station.echoes(first, 0.2))
    second = station.guest(ports=[22])
    assert second.ip == first.ip
    assert station.echoes(second)
    assert second.tell(status=True)["pid"] != first.process.pid


@inside
def test_an_address_taken_over_by_another_machine_is_reached_at_once(station):
    old = station.guest("vm-1", "0a:58:0a:58:00:21")
    assert station.echoes(old)
    old.process.terminate()
    old.process.wait(timeout=5)
    station.network.cocoon_net.release("0a:58:0a:58:00:21")
    station.network.cocoon_net.lease("0a:58:0a:58:00:22", old.ip)
    new = station.guest("vm-2", "0a:58:0a:58:00:22")
    assert new.ip == old.ip
    assert station.echoes(new)


@inside
def test_a_renewal_that_brings_another_address_moves_the_guest_and_its_ports(station):
    guest = station.guest(ports=[8080])
    before = guest.ip
    after = "10.88.0.200" if before != "10.88.0.200" else "10.88.0.201"
    station.network.cocoon_net.lease("0a:58:0a:58:00:21", after)
    guest.ip = guest.tell(renew=True)["ip"]
    assert guest.ip == after
    assert station.echoes(guest)
    assert station.accepts(guest, 8080)
    guest.ip = before
    assert not station.echoes(guest, 0.3)


@inside
def test_another_network_card_has_another_address_and_everything_is_as_after_a_boot(station):
    guest = station.guest(ports=[3389])
    before = guest.ip
    assert guest.tell(mute=True, open=5986)["mute"]
    assert guest.tell(plug="0a:58:0a:58:00:99")["mac"] == "0a:58:0a:58:00:99"
    station.until(lambda: guest.tell(status=True)["ip"])
    status = guest.tell(status=True)
    guest.ip = status["ip"]
    assert guest.ip == station.network.cocoon_net.address("0a:58:0a:58:00:99") != before
    assert (status["mute"], status["ports"]) == (False, [3389])
    station.until(lambda: station.echoes(guest, 0.2))
    assert station.accepts(guest, 3389)
    neighbors = Path("/proc/net/arp").read_text().split()
    assert neighbors[neighbors.index(guest.ip) + 3] == "0a:58:0a:58:00:99"
    guest.ip = before
    assert not station.echoes(guest, 0.3)


@inside
def test_a_guest_without_a_network_card_is_out_of_reach_until_it_gets_one(station):
    from simulator.fake_guests import GuestError

    guest = station.guest()
    links = len(socket.if_nameindex())
    assert guest.tell(plug="")["ip"] == ""
    assert len(socket.if_nameindex()) == links - 1, "the cable is gone"
    assert not station.echoes(guest, 0.3)
    with pytest.raises(GuestError, match="no network card"):
        guest.tell(renew=True)
    guest.tell(plug="0a:58:0a:58:00:98")
    station.until(lambda: guest.tell(status=True)["ip"])
    guest.ip = guest.tell(status=True)["ip"]
    station.until(lambda: station.echoes(guest, 0.2))


@inside
def test_cocoon_changes_the_network_card_of_a_running_guest(station):
    from simulator.fake_executables import LiveHost
    from simulator.fake_guests import tell

    host = LiveHost(station.home)
    (station.home / "guests" / "web-0.json").write_text(json.dumps({"boot_s": 0.0, "lease_s": 0.0}))
    assert host.cocoon.run(["vm", "clone", "base", "--name", "web-0"]).returncode == 0
    guest = LiveGuest("web-0", None, lambda **order: tell(station.home, "web-0", order))

    def mac():
        return [card["mac"] for card in host.cocoon.record("web-0")["network_configs"]]

    def comes_up():
        return guest.answers() and guest.tell(status=True)["ip"] == station.network.cocoon_net.address(mac()[0])

    station.until(comes_up)
    first, pid = mac(), guest.tell(status=True)["pid"]
    assert host.cocoon.run(["vm", "net", "--nics", "0", "web-0"]).returncode == 0
    assert mac() == [] and guest.tell(status=True)["ip"] == ""
    assert host.cocoon.run(["vm", "net", "--nics", "1", "web-0"]).returncode == 0
    assert mac() != first
    station.until(comes_up)
    guest.ip = guest.tell(status=True)["ip"]
    station.until(lambda: station.echoes(guest, 0.2))
    assert guest.tell(status=True)["pid"] == pid


@inside
def test_a_wrong_command_is_answered_and_does_no_harm(station):
    from simulator.fake_guests import GuestError, tell

    guest = station.guest()
    with pytest.raises(GuestError, match="no name of a VM"):
        tell(station.home, "../../somebody-else", {"status": True})
    for order in ({"open": 0}, {"open": True}, {"open": "ssh"}, {"dance": True}):
        with pytest.raises(GuestError):
            guest.tell(**order)
    assert guest.tell(status=True)["ports"] == []


@inside
def test_a_guest_dies_with_the_power(station):
    guest = station.guest()
    forked = station.power_on("vm-2", "0a:58:0a:58:00:22")
    station.network.close()
    assert guest.process.wait(timeout=5) == 0
    station.until(lambda: not alive(forked))


@inside
def test_guests_are_forked_by_one_process_that_stays_without_threads(station):
    linux = station.power_on("vm-1", "0a:58:0a:58:00:21", "cloud-hypervisor", "linux")
    mac = station.power_on("vm-2", "0a:58:0a:58:00:22", "qemu-system-x86_64", "macos")
    starter = station.network.starter
    assert parent(linux) == parent(mac) == starter.pid
    assert os.listdir(f"/proc/{starter.pid}/task") == [str(starter.pid)]
    for pid, program, os_name in ((linux, "cloud-hypervisor", "linux"), (mac, "qemu-system-x86_64", "macos")):
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert argv[0] == program and argv[-3:] == ["-pidfile", f"{station.home}/{program}.pid", ""]
        assert argv[argv.index("--os") + 1] == os_name
        assert Path(f"/proc/{pid}/exe").readlink() == Path(f"/proc/{starter.pid}/exe").readlink()
        assert os.getsid(pid) == pid != starter.pid
        station.until(lambda pid=pid: os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        opened = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
        assert opened[0] == os.devnull and opened[1] == opened[2] and opened[1].endswith(".log")


@inside
def test_a_forked_guest_answers_and_when_it_dies_it_is_gone_at_once(station):
    guest = station.forked("vm-1", "0a:58:0a:58:00:21")
    pid = guest.tell(status=True)["pid"]
    assert station.echoes(guest)
    os.kill(pid, signal.SIGKILL)
    station.until(lambda: not alive(pid))  # nor a zombie, which would look alive


@inside
def test_guests_outlive_the_process_that_forked_them_and_go_on_being_started_without_it(station):
    guest = station.forked("vm-1", "0a:58:0a:58:00:21")
    station.network.starter.kill()
    station.network.starter.wait()
    assert station.echoes(guest)
    other = station.forked("vm-2", "0a:58:0a:58:00:22")
    assert station.echoes(other)
    mine = [Path(f"/proc/{each.tell(status=True)['pid']}/cmdline").read_text().split("\0") for each in (guest, other)]
    same = [[word for word in argv if not word.startswith(("vm-", "0a:"))] for argv in mine]
    assert same[0] == same[1], "nobody can tell how a guest was started"


@inside
def test_a_guest_that_cannot_show_its_command_line_is_not_there(station):
    """As on a kernel without CONFIG_CHECKPOINT_RESTORE: then each guest is a Python of its own."""
    from simulator.telling import ask

    answer = ask(station.home / "power-on.sock", {"argv": ["x"], "log": str(station.home / "no" / "directory")})
    assert "No such file" in answer["error"]
    starter = station.network.starter.pid
    station.until(lambda: Path(f"/proc/{starter}/task/{starter}/children").read_text() == "")


@inside
def test_a_guest_that_is_started_after_its_world_went_away_does_not_stay(station):
    station.network.close()
    (station.home / "power.sock").unlink()
    words = ["--home", str(station.home), "--vm", "late", "--mac", "0a:58:0a:58:00:29", "--os", "linux"]
    late = subprocess.Popen([sys.executable, "-m", "simulator.fake_guests", *words])
    assert late.wait(timeout=5) == 0


@inside_without_namespaces
def test_on_loopback_a_guest_listens_on_its_own_address_and_has_no_echo_switch(station):
    from simulator.fake_guests import GuestError

    guest, other = station.guest("vm-1"), station.guest("vm-2", "0a:58:0a:58:00:22")
    assert guest.ip.startswith("127.88.0.")
    guest.tell(open=28022)
    assert station.accepts(guest, 28022)
    assert not station.accepts(other, 28022)
    with pytest.raises(GuestError, match="close a port instead"):
        guest.tell(echo=False)


@inside_without_namespaces
def test_on_loopback_too_a_guest_reboots_and_gets_another_network_card(station):
    guest = station.guest(ports=[28022])
    before = guest.ip
    for order in ({"reboot": True}, {"plug": "0a:58:0a:58:00:97"}):
        assert guest.tell(open=28023, **order)["ip"] == ""
        assert not station.accepts(guest, 28022)
        station.until(lambda: guest.tell(status=True)["ip"])
        guest.ip = guest.tell(status=True)["ip"]
        assert station.accepts(guest, 28022) and not station.accepts(guest, 28023)
    assert guest.ip == station.network.cocoon_net.address("0a:58:0a:58:00:97") != before


def main(body, home, where):
    station = Station(Path(home), bridged=where == "bridged")
    try:
        BODIES[body](station)
    except BaseException:  # noqa: BLE001  the root of a program that ends here either way
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the guests die with the power


if __name__ == "__main__":
    from gevent import monkey

    monkey.patch_all()
    main(*sys.argv[1:])
