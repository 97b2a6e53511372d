"""Logs over the kubelet API, from a real TLS socket to the simulated `cocoon vm logs` and back.

H1 plain, followed, with every option, and for containers nobody knows. H2 a client that hangs up ends the source. H3 a
log that is followed ends with its pod. A pod that was made again is the new one.
"""

import os
import re

import pytest
from kubelet_rig import KubeletRig

import vkcocoon_kubelet
import vkcocoon_vms
from vkcocoon_server import LOOK_S
from vkcocoon_vms import CommandError

BOOTED = "booted vk-default-web-0 in process 4001"
LOG = "/containerLogs/default/web-0/agent"
VM = "vk-default-web-0"


@pytest.fixture
def rig(tmp_path):
    rig = KubeletRig(tmp_path)
    rig.pod = rig.vm_pod()
    yield rig.start()
    rig.close()


def texts(printed):
    """What the lines say, without their times."""
    return re.findall(r" -- (.*)$", printed if isinstance(printed, str) else printed.decode(), re.MULTILINE)


class TestPlain:
    def test_h1_without_options_it_is_the_whole_log(self, rig):
        rig.cocoon.add_log(VM, "one", "two")
        status, text = rig.ask(LOG)
        assert (status, texts(text)) == (200, [BOOTED, "one", "two"])

    @pytest.mark.parametrize(
        ("tail", "left"), [(0, []), (1, ["two"]), (2, ["one", "two"]), (99, [BOOTED, "one", "two"])]
    )
    def test_h1_the_last_lines(self, rig, tail, left):
        rig.cocoon.add_log(VM, "one", "two")
        assert texts(rig.ask(f"{LOG}?tailLines={tail}")[1]) == left

    def test_h1_a_limit_in_bytes(self, rig):
        assert rig.ask(f"{LOG}?limitBytes=17") == (200, "cloud-hypervisor:")

    def test_h1_since(self, rig):
        rig.host.clock.run(60)
        rig.cocoon.add_log(VM, "a minute later")
        # No process of that VM is on this host: its lines have the time at which they are read.
        assert texts(rig.ask(f"{LOG}?sinceSeconds=10")[1]) == [BOOTED, "a minute later"]
        assert rig.ask(f"{LOG}?sinceTime=2400-01-01T00:00:00Z") == (200, "")

    def test_h1_with_times(self, rig):
        text = rig.ask(f"{LOG}?timestamps=true")[1]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z cloud-hypervisor: .*\n", text)

    def test_h1_times_count_from_the_start_of_the_hypervisor(self, rig):
        rig.files.process(rig.pod.vm.pid, rig.pod.vm.id, start=50 * os.sysconf("SC_CLK_TCK"))
        rig.host.clock.run(60)
        rig.cocoon.add_log(VM, "a minute later")
        lines = rig.ask(f"{LOG}?timestamps=true")[1].splitlines()
        assert [line.split()[0] for line in lines] == [
            "2023-11-14T22:14:10.000000000Z",
            "2023-11-14T22:15:10.000000000Z",
        ]
        assert texts(rig.ask(f"{LOG}?sinceTime=2023-11-14T22:15:00Z")[1]) == ["a minute later"]
        assert rig.ask(f"{LOG}?sinceSeconds=60") == (200, "")

    def test_h1_the_log_before_the_last_start_is_gone(self, rig):
        status, text = rig.ask(f"{LOG}?previous=true")
        assert status == 400
        assert text.startswith('previous terminated container "agent" in pod "default/web-0" not found')

    def test_h1_options_that_make_no_sense(self, rig):
        assert rig.ask(f"{LOG}?tailLines=-1")[0] == 422
        assert rig.ask(f"{LOG}?tailLines=all")[0] == 400

    @pytest.mark.parametrize(
        ("path", "says"),
        [
            ("default/web-9/agent", 'pod "default/web-9" not found'),
            ("other/web-0/agent", 'pod "other/web-0" not found'),
            ("default/web-0/sidecar", 'container "sidecar" not found in pod "default/web-0"'),
            ("default/web-0/uid-2/agent", 'pod "default/web-0" not found'),
            ("default/web-0", "404 page not found"),
            ("default", "404 page not found"),
            ("", "404 page not found"),
            ("default/web-0/uid-1/agent/more", "404 page not found"),
            ("default//agent", "404 page not found"),
        ],
    )
    def test_h1_what_nobody_knows_is_not_found_before_a_byte_of_log(self, rig, path, says):
        before = rig.cocoon.count("vm logs")
        assert rig.ask(f"/containerLogs/{path}?follow=true") == (404, f"{says}\n")
        assert rig.cocoon.count("vm logs") == before

    def test_a_path_may_name_the_incarnation(self, rig):
        assert texts(rig.ask("/containerLogs/default/web-0/uid-1/agent")[1]) == [BOOTED]

    def test_a_pod_made_again_is_the_new_one(self, rig):
        rig.vm_pod("web-1", uid="uid-old")
        old = rig.held.pods["default/web-1"]
        rig.held.add("default/web-1", "uid-new", vm=rig.pod.vm)
        assert texts(rig.ask("/containerLogs/default/web-1/agent")[1]) == [BOOTED]
        assert rig.ask(f"/containerLogs/default/web-1/{old.uid}/agent")[0] == 404

    def test_a_pod_without_a_vm_says_what_it_waits_for(self, rig):
        rig.held.add("default/new-0", "uid-3", reason="LifecycleCreating")
        assert rig.ask("/containerLogs/default/new-0/agent") == (
            400,
            'container "agent" in pod "default/new-0" is waiting to start: LifecycleCreating\n',
        )

    def test_a_pod_only_the_api_server_knows_has_no_vm_yet(self, rig):
        rig.assigned = [{"metadata": {"namespace": "default", "name": "ds-0", "uid": "u"}, "spec": {}}]
        assert rig.ask("/containerLogs/default/ds-0/agent") == (400, 'pod "default/ds-0" has no VM yet\n')
        assert rig.ask("/containerLogs/default/ds-0/other/agent")[0] == 404

    def test_a_vm_that_is_gone_says_so(self, rig):
        rig.host.cli.remove(rig.pod.vm.id)
        for options in ("", "?follow=1", "?follow=1&tailLines=0"):
            assert rig.ask(LOG + options) == (400, 'the VM of pod "default/web-0" is gone\n')

    def test_a_pod_that_names_a_vm_itself_gets_the_log_of_that_vm(self, rig):
        stray = rig.host.clone_vm("stray")
        rig.held.add("default/tool-0", "uid-2", vm=stray, managed=False)
        assert texts(rig.ask("/containerLogs/default/tool-0/agent")[1]) == ["booted stray in process 4002"]

    def test_but_not_the_log_of_another_pods(self, rig):
        rig.held.add("evil/pod", "uid-2", vm=rig.pod.vm, managed=False)
        status, text = rig.ask("/containerLogs/evil/pod/agent")
        assert (status, text) == (403, 'the VM that pod "evil/pod" names is that of another pod\n')
        assert texts(rig.ask(LOG)[1]) == [BOOTED]

    def test_a_failure_of_the_tool_is_ours_with_its_words(self, rig):
        rig.cocoon.fail("vm logs", stderr="Error: logs: store is locked")
        status, text = rig.ask(LOG)
        assert status == 500
        assert "store is locked" in text

    def test_an_id_that_is_no_name_is_refused_in_words(self, rig):
        rig.held.add(
            "default/odd-0", "uid-2", vm=vkcocoon_vms.VM("--config=/tmp/evil", "odd", "running"), managed=False
        )
        status, text = rig.ask("/containerLogs/default/odd-0/agent")
        assert (status, "is not a name" in text) == (500, True)

    def test_a_mac_has_no_log_and_says_so(self, rig):
        rig.held.add("default/mac-0", "uid-9", vm=rig.host.run_mac("vk-default-mac-0"))
        status, text = rig.ask("/containerLogs/default/mac-0/agent")
        assert (status, "macOS" in text) == (501, True)

    def test_bytes_that_are_no_text_pass_unchanged(self, rig):
        rig.logs = lambda ref, **options: iter([bytes(range(256)), b"\xff" * 100_000])
        with rig.asking(LOG) as answer:
            assert answer.status == 200
            assert answer.body() == bytes(range(256)) + b"\xff" * 100_000

    def test_a_long_log_comes_whole(self, rig):
        line = b"x" * 99 + b"\n"
        rig.logs = lambda ref, **options: (line * 655 for _ in range(160))
        with rig.asking(LOG) as answer:
            assert len(answer.body()) == 100 * 655 * 160

    def test_a_log_that_breaks_off_has_no_end(self, rig):
        def source(ref, **options):
            yield b"first\n"
            raise CommandError(["cocoon"], 1, "Error: read log: input/output error")

        rig.logs = source
        with rig.asking(LOG) as answer:
            assert answer.piece() == b"first\n"
            with pytest.raises(EOFError):
                answer.piece()


class TestFollowed:
    def test_h1_what_is_there_comes_first_and_what_is_added_as_it_is(self, rig):
        with rig.asking(f"{LOG}?follow=true&tailLines=1") as answer:
            assert texts(answer.piece()) == [BOOTED]
            rig.let_time_pass()
            rig.cocoon.add_log(VM, "one")
            assert texts(answer.piece()) == ["one"]
            rig.cocoon.add_log(VM, "two")
            assert texts(answer.piece()) == ["two"]

    def test_h1_nothing_of_the_past_but_the_head_of_the_answer_at_once(self, rig):
        rig.let_time_pass()
        with rig.asking(f"{LOG}?follow=true&tailLines=0") as answer:
            assert answer.status == 200
            rig.cocoon.add_log(VM, "new")
            assert texts(answer.piece()) == ["new"]

    def test_h1_a_limit_ends_what_is_followed(self, rig):
        with rig.asking(f"{LOG}?follow=true&limitBytes=5") as answer:
            assert answer.body() == b"cloud"

    def test_h2_a_client_that_hangs_up_ends_the_source_though_nothing_is_sent(self, rig):
        ended = watched(rig)
        with rig.asking(f"{LOG}?follow=true") as answer:
            assert texts(answer.piece()) == [BOOTED]
            assert ended == []
        rig.until(lambda: ended == ["ended"])

    def test_h2_a_client_that_is_killed_ends_the_source(self, rig):
        ended = watched(rig)
        with rig.asking(f"{LOG}?follow=true") as answer:
            answer.piece()
            answer.abort()
        rig.until(lambda: ended == ["ended"])

    def test_h2_a_client_that_talks_instead_of_listening_is_cut_off(self, rig):
        ended = watched(rig)
        with rig.asking(f"{LOG}?follow=true") as answer:
            answer.piece()
            with pytest.raises(OSError):
                for _ in range(1000):
                    answer.connection.sendall(b"x" * 4096)
                    rig.clock.sleep(0)
            rig.until(lambda: ended == ["ended"])

    @pytest.mark.parametrize("how", ["forgotten", "made again", "VM gone", "VM replaced", "no VM"])
    def test_h3_it_ends_with_the_pod(self, rig, how):
        ended = watched(rig)
        with rig.asking(f"{LOG}?follow=true") as answer:
            answer.piece()
            began = rig.clock.monotonic()
            if how == "forgotten":
                del rig.held.pods["default/web-0"]
            elif how == "made again":
                rig.held.add("default/web-0", "uid-2", vm=rig.pod.vm)
            elif how == "VM gone":
                rig.pod.gone = True
            else:
                rig.pod.vm = rig.host.clone_vm("another") if how == "VM replaced" else None
            assert answer.piece() == b""  # the proper end of the body
            assert rig.clock.monotonic() - began < 5 * LOOK_S
        rig.until(lambda: ended == ["ended"])

    def test_h3_a_tool_that_fails_because_its_vm_is_gone_is_a_proper_end(self, rig):
        def source(ref, **options):
            yield b"first\n"
            rig.pod.gone = True
            raise CommandError(["cocoon"], 1, "Error: logs: vm x: VM not found")

        rig.logs = source
        with rig.asking(f"{LOG}?follow=true") as answer:
            assert answer.body() == b"first\n"

    def test_a_restart_of_the_vm_does_not_end_it(self, rig):
        rig.let_time_pass()
        with rig.asking(f"{LOG}?follow=true&tailLines=0") as answer:
            assert answer.status == 200
            rig.until(lambda: rig.cocoon.count("vm logs") == 2)
            rig.cocoon.set_record(VM, pid=0, state="stopped")
            rig.cocoon.execute(["cocoon", "vm", "start", rig.pod.vm.id], 30)
            assert texts(answer.piece()) == ["booted vk-default-web-0 in process 4002"]

    def test_a_source_that_cannot_begin_is_an_error_and_not_an_empty_log(self, rig):
        rig.cocoon.old = True
        status, text = rig.ask(f"{LOG}?follow=true")
        assert (status, "unknown command" in text) == (500, True)

    def test_only_so_many_are_followed_at_once_and_a_place_is_free_again(self, rig, monkeypatch):
        monkeypatch.setattr(vkcocoon_kubelet, "MOST_STREAMS", 2)
        with rig.asking(f"{LOG}?follow=true") as first, rig.asking(f"{LOG}?follow=true") as second:
            assert first.piece() and second.piece()
            with rig.asking(LOG) as third:
                assert (third.status, third.headers["retry-after"]) == (429, "10")
        rig.until(lambda: rig.ask(LOG)[0] == 200)

    def test_closing_the_api_cuts_who_follows_and_ends_the_source(self, rig):
        ended = watched(rig)
        with rig.asking(f"{LOG}?follow=true") as answer:
            answer.piece()
            rig.kubelet.close()
            with pytest.raises((EOFError, OSError)):
                answer.piece()
        rig.until(lambda: ended == ["ended"])


def watched(rig):
    """From now on, the ends of sources."""
    ended, read = [], rig.cli.logs

    def source(ref, **options):
        try:
            yield from read(ref, **options)
        finally:
            ended.append("ended")

    rig.logs = source
    return ended
