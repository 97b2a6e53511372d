"""The fake cocoon-net writes what the daemon writes, when it writes it, and answers its control socket the same way.

Everybody's scenarios stand on it, so it is held to the daemon's observable contract here, in virtual time.
"""

import http.client
import json
import os
import random
import re
import stat
from datetime import UTC, datetime, timedelta, timezone

import pytest
from gevent import socket

from simulator.clock import VirtualClock
from simulator.fake_leases import FakeCocoonNet
from vkcocoon_net import LeaseReleaseError

A, B, C = "02:00:00:00:00:0a", "02:00:00:00:00:0b", "02:00:00:00:00:0c"


@pytest.fixture
def clock():
    clock = VirtualClock(start=datetime(2026, 8, 21, 1, 12, 50, tzinfo=UTC))
    yield clock
    clock.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "leases.json"


@pytest.fixture
def daemon(path, clock):
    daemon = FakeCocoonNet(path, clock, rng=random.Random(1))
    yield daemon
    daemon.close()


def rows(path):
    """The file as {mac: (ip, expiry)}."""
    return {row["mac"]: (row["ip"], row["expiry"]) for row in json.loads(path.read_bytes()) or []}


# The file -------------------------------------------------------------------------------------------------------------


def test_one_lease_is_written_byte_for_byte_as_the_daemon_does(daemon, path):
    daemon.lease("0A-58-AC-16-00-15", "172.22.0.21")
    assert path.read_text() == (
        "[\n"
        "  {\n"
        '    "mac": "0a:58:ac:16:00:15",\n'
        '    "ip": "172.22.0.21",\n'
        '    "expiry": "2026-08-22T01:12:50Z"\n'
        "  }\n"
        "]"
    )


def test_no_lease_is_the_word_null_and_never_having_saved_is_no_file(daemon, path):
    assert not path.exists()
    daemon.lease(A, "10.88.0.7")
    daemon.release(A)
    assert path.read_bytes() == b"null"


def test_a_host_in_another_zone_writes_its_offset_and_old_rows_keep_theirs(daemon, path):
    daemon.lease(A, "10.88.0.7")
    daemon.zone = timezone(timedelta(hours=8))
    daemon.lease(B, "10.88.0.8")
    assert rows(path) == {
        A: ("10.88.0.7", "2026-08-22T01:12:50Z"),
        B: ("10.88.0.8", "2026-08-22T09:12:50+08:00"),
    }


def test_an_end_that_is_given_is_written_as_given(daemon, path):
    daemon.lease(A, "10.88.0.7", datetime(1, 1, 1, tzinfo=UTC))
    daemon.lease(B, "10.88.0.8", datetime(2026, 8, 21, 1, 13, 0, 999_999, tzinfo=UTC))
    assert rows(path) == {A: ("10.88.0.7", "0001-01-01T00:00:00Z"), B: ("10.88.0.8", "2026-08-21T01:13:00Z")}


def test_the_order_of_rows_changes_and_the_rows_stay(daemon, path):
    for number in range(8):
        daemon.lease(f"02:00:00:00:00:{number:02x}", f"10.88.0.{10 + number}")
    orders = set()
    for _ in range(5):
        daemon.write()
        orders.add(tuple(rows(path)))
    assert len(orders) == 5
    assert len({frozenset(order) for order in orders}) == 1


def test_each_save_is_a_new_file_under_the_old_name_and_leaves_no_draft(daemon, path):
    for number in range(1, 20):
        daemon.lease(A, f"10.88.0.{number}")
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o644
    assert os.listdir(path.parent) == ["leases.json"]


def test_a_reader_that_holds_the_old_file_keeps_seeing_all_of_it(daemon, path):
    daemon.lease(A, "10.88.0.7")
    with open(path, "rb") as held:
        daemon.lease(A, "10.88.0.8")
        assert json.loads(held.read())[0]["ip"] == "10.88.0.7"
    assert rows(path)[A][0] == "10.88.0.8"


def test_while_it_is_written_the_draft_lies_beside_it_under_a_name_of_its_own(daemon, path, monkeypatch):
    drafts = []

    def rename(draft, target, real=os.rename):
        drafts.append((os.path.basename(draft), os.stat(draft).st_mode & 0o777, os.path.dirname(draft)))
        real(draft, target)

    monkeypatch.setattr(os, "rename", rename)
    daemon.lease(A, "10.88.0.7")
    daemon.lease(B, "10.88.0.8")
    assert all(re.fullmatch(r"leases-[0-9]+\.json", name) for name, _, _ in drafts)
    assert {mode for _, mode, _ in drafts} == {0o644}
    assert {place for _, _, place in drafts} == {str(path.parent)}
    assert len({name for name, _, _ in drafts}) == 2


# Guests ---------------------------------------------------------------------------------------------------------------


def test_a_first_request_gets_an_address_of_the_pool_that_is_neither_network_gateway_nor_broadcast(daemon):
    given = {daemon.request(f"02:00:00:00:01:{number:02x}") for number in range(253)}
    assert given == {f"10.88.0.{number}" for number in range(2, 255)}


def test_when_the_pool_is_used_up_no_offer_comes_and_the_file_stays_as_it_is(path, clock):
    daemon = FakeCocoonNet(path, clock, rng=random.Random(1), network="10.88.0.0/30")
    assert daemon.request(A) == "10.88.0.2"
    before = path.stat()
    assert daemon.request(B) == ""
    assert os.path.samestat(path.stat(), before)
    daemon.release(A)
    assert daemon.request(B) == "10.88.0.2"


def test_a_renewal_moves_the_end_only_and_the_document_keeps_its_length(daemon, path, clock):
    ip = daemon.request(A)
    before = path.read_bytes()
    clock.run(12 * 3600)
    assert daemon.request(A) == ip
    assert rows(path) == {A: (ip, "2026-08-22T13:12:50Z")}
    assert len(path.read_bytes()) == len(before)


def test_who_sleeps_past_the_end_gets_another_address(daemon, clock):
    ip = daemon.request(A)
    clock.run(86400)
    assert daemon.request(A) not in ("", ip)


def test_addresses_are_drawn_from_the_seed_and_from_nothing_else(tmp_path, clock):
    drawn = []
    for seed in (1, 1, 2):
        daemon = FakeCocoonNet(tmp_path / "leases.json", clock, rng=random.Random(seed))
        drawn.append([daemon.request(mac) for mac in (A, B, C)] + [(tmp_path / "leases.json").read_bytes()])
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_test_may_give_one_address_to_two_macs(daemon, path):
    daemon.lease(A, "10.88.0.7")
    daemon.lease(B, "10.88.0.7")
    assert {ip for ip, _ in rows(path).values()} == {"10.88.0.7"}


@pytest.mark.parametrize(("mac", "ip"), [("eth0", "10.88.0.7"), (A, "guest.local"), (A, "")])
def test_a_scenario_that_names_no_mac_or_address_is_told(daemon, mac, ip):
    with pytest.raises(ValueError, match="is not a"):
        daemon.lease(mac, ip)


# The daemon itself ----------------------------------------------------------------------------------------------------


def test_an_expired_row_stays_until_the_sweep_of_the_minute(daemon, path, clock):
    daemon.start()
    daemon.lease(A, "10.88.0.7", clock.now() + timedelta(seconds=61))
    daemon.lease(B, "10.88.0.8")
    clock.run(119)
    assert set(rows(path)) == {A, B}
    clock.run(1)
    assert set(rows(path)) == {B}


def test_a_sweep_that_finds_nothing_does_not_write(daemon, path, clock):
    daemon.start()
    daemon.lease(A, "10.88.0.7")
    before = path.stat()
    clock.run(600)
    assert os.path.samestat(path.stat(), before)


def test_a_lease_ends_at_its_end_not_after_it(daemon, path, clock):
    daemon.lease(A, "10.88.0.7", clock.now())
    daemon.sweep()
    assert path.read_bytes() == b"null"


def test_after_losing_its_file_the_daemon_knows_nobody(daemon, path):
    daemon.lease(A, "10.88.0.7")
    daemon.forget_file()
    assert not path.exists()
    assert daemon.address(A) == ""
    daemon.lease(B, "10.88.0.8")
    assert set(rows(path)) == {B}


def test_a_restart_reads_the_file_back_and_drops_what_is_odd_or_over_without_writing(daemon, path, clock):
    rows_before = [
        {"mac": A, "ip": "10.88.0.7", "expiry": "2026-08-22T09:12:50+08:00"},
        {"mac": B, "ip": "10.88.0.8", "expiry": "2026-08-21T01:12:50Z"},
        {"mac": "eth0", "ip": "10.88.0.9", "expiry": "2026-08-22T01:12:50Z"},
        {"mac": C, "ip": "fd00::1", "expiry": "2026-08-22T01:12:50Z"},
        {"mac": C, "ip": "10.88.0.9", "expiry": "tomorrow"},
        {"mac": C},
        None,
    ]
    path.write_text(json.dumps(rows_before))
    daemon.restart()
    assert [daemon.address(mac) for mac in (A, B, C)] == ["10.88.0.7", "", ""]
    assert json.loads(path.read_bytes()) == rows_before
    daemon.write()
    assert rows(path) == {A: ("10.88.0.7", "2026-08-22T09:12:50+08:00")}


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b"null"])
def test_a_restart_with_a_file_that_cannot_be_read_starts_empty(daemon, path, content):
    daemon.lease(A, "10.88.0.7")
    path.write_bytes(content)
    daemon.restart()
    assert daemon.address(A) == ""
    assert path.read_bytes() == content


def test_a_clean_shutdown_saves_once_more_and_ends_the_sweep(daemon, path, clock):
    daemon.start()
    daemon.lease(A, "10.88.0.7", clock.now() + timedelta(seconds=30))
    path.unlink()
    daemon.close()
    clock.run(600)
    assert set(rows(path)) == {A}


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "content"),
    [
        ("torn", lambda whole: whole[: len(whole) // 2]),
        ("empty", lambda whole: b""),
        ("two_documents", lambda whole: whole + b"\n" + whole),
        ("object", lambda whole: b'{"leases": ' + whole + b"}"),
        ("in_place", lambda whole: whole),
        ("same_stamp", lambda whole: whole),
    ],
)
def test_a_fault_spoils_the_file_in_place_and_the_next_save_heals_it(daemon, path, how, content):
    daemon.lease(A, "10.88.0.7")
    whole, before = path.read_bytes(), path.stat()
    daemon.write(how)
    assert path.read_bytes() == content(whole)
    assert path.stat().st_ino == before.st_ino
    assert (path.stat().st_mtime_ns == before.st_mtime_ns) == (how == "same_stamp")
    daemon.write()
    assert path.read_bytes() == whole
    assert path.stat().st_ino != before.st_ino


@pytest.mark.parametrize("how", ["missing", "unreadable"])
def test_a_file_that_is_gone_or_cannot_be_read_comes_back_with_the_next_save(daemon, path, how):
    for _ in range(2):
        daemon.lease(A, "10.88.0.7")
        daemon.write(how)
        with pytest.raises(OSError):
            path.read_bytes()
        daemon.write(how)
    daemon.lease(A, "10.88.0.8")
    assert rows(path)[A][0] == "10.88.0.8"


def test_a_frozen_daemon_gives_addresses_that_reach_the_file_only_when_it_is_told(daemon, path):
    daemon.frozen = True
    daemon.lease(A, "10.88.0.7")
    assert daemon.address(A) == "10.88.0.7"
    assert not path.exists()
    daemon.write()
    assert set(rows(path)) == {A}


def test_a_fault_nobody_knows_is_refused(daemon, path):
    with pytest.raises(ValueError, match="known: rename, in_place, torn"):
        daemon.write("tron")
    assert not path.exists()


# The control socket ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ask(daemon, tmp_path):
    control = tmp_path / "run" / "control.sock"
    control.parent.mkdir()
    daemon.serve(control)

    def ask(method, path):
        connection = http.client.HTTPConnection("cocoon-net")
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.connect(str(control))
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body, answer.getheader("Allow")

    return ask


@pytest.mark.parametrize("spelling", [A, A.upper(), A.replace(":", "-"), A.replace(":", "%3A"), "0200.0000.000a"])
def test_a_release_empties_memory_and_file_and_answers_204(daemon, ask, path, spelling):
    daemon.lease(A, "10.88.0.7")
    assert ask("DELETE", f"/v1/leases/{spelling}") == (204, "", None)
    assert (daemon.address(A), path.read_bytes()) == ("", b"null")
    assert ask("DELETE", f"/v1/leases/{spelling}") == (204, "", None)


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("DELETE", "/v1/leases/", (400, "invalid MAC address\n", None)),
        ("DELETE", "/v1/leases/eth0", (400, "invalid MAC address\n", None)),
        ("GET", f"/v1/leases/{A}", (405, "method not allowed\n", "DELETE")),
        ("POST", f"/v1/leases/{A}", (405, "method not allowed\n", "DELETE")),
        ("DELETE", "/v1/leases", (404, "404 page not found\n", None)),
        ("GET", "/", (404, "404 page not found\n", None)),
    ],
)
def test_every_other_request_is_answered_as_the_daemon_does(daemon, ask, method, target, expected):
    daemon.lease(A, "10.88.0.7")
    assert ask(method, target) == expected
    assert daemon.address(A) == "10.88.0.7"


def test_when_the_file_cannot_be_saved_the_lease_stays_and_the_next_try_works(daemon, ask, path):
    daemon.lease(A, "10.88.0.7")
    daemon.failing_releases = 1
    assert ask("DELETE", f"/v1/leases/{A}") == (500, "lease release failed\n", None)
    assert set(rows(path)) == {A}
    assert ask("DELETE", f"/v1/leases/{A}")[0] == 204


def test_the_socket_belongs_to_this_user_replaces_an_old_one_and_goes_with_the_daemon(daemon, tmp_path):
    control = tmp_path / "control.sock"
    left_over = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left_over.bind(str(control))
    left_over.close()
    daemon.serve(control)
    assert stat.S_IMODE(control.stat().st_mode) == 0o600
    daemon.close()
    assert not control.exists()


def test_a_file_that_is_no_socket_is_not_replaced(daemon, tmp_path):
    control = tmp_path / "control.sock"
    control.write_text("somebody's notes")
    with pytest.raises(FileExistsError):
        daemon.serve(control)
    assert control.read_text() == "somebody's notes"


def test_in_process_a_release_behaves_as_the_real_one_does_over_the_socket(daemon, path):
    daemon.lease(A, "10.88.0.7")
    daemon.failing_releases = 1
    daemon.release(A.upper(), "/run/cocoon-net/control.sock")
    assert path.read_bytes() == b"null"
    daemon.failing_releases = 2
    with pytest.raises(LeaseReleaseError, match=r"answered 500 .*: lease release failed$"):
        daemon.release(A)
    assert daemon.failing_releases == 0
    with pytest.raises(LeaseReleaseError, match="'eth0' is not a MAC address"):
        daemon.release("eth0")
