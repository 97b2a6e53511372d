"""Simulated guests and their network: they boot, ask, answer and fall silent at exact instants.

What the provider's probes see here is what vkcocoon_net shows of a real network: the same answers, the same errors, the
same waits.
"""

import pytest
from host_rig import Rig

from simulator.fake_vms import GuestSpec
from vkcocoon_net import LeaseFile, PingError, PingTimeout


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.clock.close()


# --- guests and their network --------------------------------------------------------------------------------------


def test_a_guest_boots_asks_and_answers_at_exact_instants(rig):
    rig.host.specs["web-0"] = GuestSpec(boot_s=2.0, lease_s=0.75, echo_after_s=0.5, ports=(80,), latency_s=0.001)
    vm = rig.clone_vm()
    guest = rig.host.guest("web-0")
    rig.clock.run(2.749999)
    assert (guest.ip, rig.leases.address(vm.mac)) == ("", "")
    rig.clock.run(0.000001)
    assert guest.ip == rig.leases.address(vm.mac) != ""
    assert LeaseFile(rig.lease_path).lookup(vm.mac, rig.clock.now()).ip == guest.ip
    assert rig.during(rig.host.tcp_accepts, guest.ip, 80, rig.deadline()) == (None, 0.001)
    assert rig.during(rig.host.pinger.ping, guest.ip, rig.deadline(0.2))[1] == 0.2
    rig.clock.run(0.5)
    assert rig.during(rig.host.pinger.ping, guest.ip, rig.deadline()) == (0.001, 0.001)


def test_a_static_guest_answers_after_its_boot_and_never_asks(rig):
    vm = rig.clone_vm(network="cocoon-static")
    rig.clock.run(1.0)
    assert rig.host.guest("web-0").ip == "10.22.0.2"
    assert rig.leases.address(vm.mac) == ""


def test_a_dead_address_is_silent_until_the_deadline(rig):
    error, took = rig.during(rig.host.pinger.ping, "10.88.0.9", rig.deadline(3))
    assert (type(error), str(error), took) == (PingTimeout, "no reply from 10.88.0.9", 3)
    error, took = rig.during(rig.host.tcp_accepts, "10.88.0.9", 80, rig.deadline(3))
    assert (type(error), took) == (TimeoutError, 3)
    error, took = rig.during(rig.host.ssh_banner, "10.88.0.9", rig.deadline(0.25))
    assert (type(error), took) == (TimeoutError, 0.25)


@pytest.mark.parametrize("seconds", [0, -1])
def test_no_time_is_a_failure_at_once(rig, seconds):
    rig.clone_vm()
    rig.clock.run(5)
    ip = rig.host.guest("web-0").ip
    for call in (
        (rig.host.pinger.ping, ip, rig.deadline(seconds)),
        (rig.host.tcp_accepts, ip, 22, rig.deadline(seconds)),
        (rig.host.ssh_banner, ip, rig.deadline(seconds)),
    ):
        error, took = rig.during(*call)
        assert isinstance(error, PingTimeout | TimeoutError) and took == 0


@pytest.mark.parametrize("ip", ["", "localhost", "10.88.0.256", "224.0.0.1", "0.0.0.0"])
def test_what_is_no_address_is_an_error_of_its_own(rig, ip):
    assert type(rig.during(rig.host.pinger.ping, ip, rig.deadline())[0]) is PingError
    assert type(rig.during(rig.host.tcp_accepts, ip, 80, rig.deadline())[0]) is OSError


def test_a_closed_port_refuses_at_once_and_a_hung_guest_does_not_even_refuse(rig):
    rig.host.specs["web-0"] = GuestSpec(ports=(80,), latency_s=0.002)
    rig.clone_vm()
    rig.clock.run(5)
    guest = rig.host.guest("web-0")
    error, took = rig.during(rig.host.tcp_accepts, guest.ip, 81, rig.deadline())
    assert (type(error), took) == (ConnectionRefusedError, 0.002)
    guest.open(81)
    assert rig.during(rig.host.tcp_accepts, guest.ip, 81, rig.deadline())[0] is None
    guest.close(80)
    assert type(rig.during(rig.host.tcp_accepts, guest.ip, 80, rig.deadline())[0]) is ConnectionRefusedError
    guest.silent()
    assert type(rig.during(rig.host.tcp_accepts, guest.ip, 81, rig.deadline())[0]) is TimeoutError
    assert type(rig.during(rig.host.pinger.ping, guest.ip, rig.deadline())[0]) is PingTimeout
    guest.silent(False)
    assert rig.during(rig.host.pinger.ping, guest.ip, rig.deadline())[0] == 0.002


def test_an_echo_slower_than_its_bound_is_no_answer(rig):
    rig.host.specs["web-0"] = GuestSpec(latency_s=0.3)
    rig.clone_vm()
    rig.clock.run(5)
    ip = rig.host.guest("web-0").ip
    assert rig.during(rig.host.pinger.ping, ip, rig.deadline(0.3)) == (0.3, 0.3)
    error, took = rig.during(rig.host.pinger.ping, ip, rig.deadline(0.25))
    assert (type(error), took) == (PingTimeout, 0.25)


def test_an_unreachable_address_and_a_pinger_without_rights(rig):
    rig.host.pinger.fail("10.88.0.9", times=2)
    for _ in range(2):
        error, took = rig.during(rig.host.pinger.ping, "10.88.0.9", rig.deadline())
        assert (type(error), str(error), took) == (PingError, "destination host unreachable: 10.88.0.9", 0)
    rig.host.pinger.degraded = True
    assert rig.during(rig.host.pinger.ping, "10.88.0.9", rig.deadline()) == (0.0, 0)
    rig.host.pinger.close()
    assert str(rig.during(rig.host.pinger.ping, "10.88.0.9", rig.deadline())[0]) == "the pinger was closed"


def test_sshd_accepts_before_it_speaks_and_can_say_other_things(rig):
    rig.host.specs["mac-0"] = GuestSpec(os="macos", boot_s=60, ssh_after_s=30)
    rig.run_mac()
    rig.clock.run(60.5)
    guest = rig.host.guest("mac-0")
    assert rig.during(rig.host.tcp_accepts, guest.ip, 22, rig.deadline()) == (None, 0)
    error, took = rig.during(rig.host.ssh_banner, guest.ip, rig.deadline())
    assert (type(error), took) == (TimeoutError, 3)
    rig.clock.run(27)
    assert rig.during(rig.host.ssh_banner, guest.ip, rig.deadline()) == ("SSH-2.0-OpenSSH_9.9", 0)
    guest.banner("go away\nSSH-2.0-x")
    assert rig.during(rig.host.ssh_banner, guest.ip, rig.deadline())[0] == "SSH-2.0-x"
    for text, said in (("HTTP/1.1 400\n", "said 'HTTP/1.1 400'"), ("", "hung up without a word")):
        guest.banner(text)
        error, _ = rig.during(rig.host.ssh_banner, guest.ip, rig.deadline())
        assert isinstance(error, ConnectionError) and said in str(error)
    guest.close(22)
    assert type(rig.during(rig.host.ssh_banner, guest.ip, rig.deadline())[0]) is ConnectionRefusedError


def test_a_reboot_takes_the_guest_off_the_network_and_keeps_process_and_address(rig):
    vm = rig.cli.inspect(rig.clone_vm().id)
    rig.clock.run(5)
    guest = rig.host.guest("web-0")
    ip = guest.ip
    guest.reboot()
    assert (guest.ip, guest.echo) == ("", False)
    rig.clock.run(1.5)
    assert (guest.ip, guest.echo, rig.cli.inspect(vm.id).pid) == (ip, True, vm.pid)


def test_a_guest_powered_off_in_the_middle_of_its_boot_never_asks(rig):
    vm = rig.clone_vm()
    rig.clock.run(1.2)
    rig.cli.remove(vm.id)
    rig.clock.run(60)
    assert rig.leases.address(vm.mac) == ""


def test_a_guest_nobody_offers_an_address_keeps_asking(rig):
    vm = rig.clone_vm()
    answers = iter(["", "", "10.88.0.77"])
    real, asked = rig.leases.request, []
    rig.leases.request = lambda mac: asked.append(rig.clock.elapsed()) or (next(answers) and real(mac))
    rig.clock.run(30)
    assert asked == [1.5, 5.5, 9.5]
    assert rig.host.guest("web-0").ip == rig.leases.address(vm.mac) != ""


def test_a_renewal_that_brings_another_address_moves_the_guest(rig):
    vm = rig.clone_vm()
    rig.clock.run(10)
    guest = rig.host.guest("web-0")
    old = guest.ip
    rig.leases.lease(vm.mac, "10.88.0.200")
    assert guest.ip == old
    rig.clock.run(43_200)
    assert guest.ip == "10.88.0.200"
    assert type(rig.during(rig.host.pinger.ping, old, rig.deadline())[0]) is PingTimeout
    assert rig.during(rig.host.pinger.ping, guest.ip, rig.deadline())[0] == 0.0


def test_a_clone_may_resume_faster_than_it_boots(rig):
    rig.host.specs["web-0"] = GuestSpec(boot_s=30.0, resume_s=0.1)
    vm = rig.clone_vm()
    rig.clock.run(0.6)
    guest = rig.host.guest("web-0")
    assert guest.ip
    rig.cli.stop(vm.id)
    rig.cli.start(vm.id)
    rig.clock.run(30.4)
    assert not guest.ip, "a restart is a boot"
    rig.clock.run(0.1)
    assert guest.ip


def test_the_newest_guest_of_a_name_is_the_one_that_is_found(rig):
    with pytest.raises(KeyError, match="was ever powered on"):
        rig.host.guest("web-0")
    first = rig.clone_vm()
    rig.cli.remove(first.id)
    second = rig.clone_vm()
    assert rig.host.guest("web-0").mac == second.mac != first.mac


@pytest.mark.parametrize("os_name", ["linux", "windows", "macos", "plan9"])
def test_every_system_has_a_default(os_name):
    spec = GuestSpec.for_os(os_name)
    assert spec.os == os_name and spec.boot_s > 0
    assert (spec.ssh_after_s is not None) == (os_name == "macos")
