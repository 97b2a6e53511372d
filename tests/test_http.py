"""What is served: metrics, health, and the bounds that keep a client from hurting the probes (I3, D4)."""

import gzip
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import structlog.testing
from prometheus_client.parser import text_string_to_metric_families

from vkcocoon_http import CannotListen, Check, HubMonitor, Metrics, MetricsServer
from vkcocoon_server import Limits


@dataclass
class Pod:
    os: str
    ready: bool
    reason: str = ""
    vm: object = "a VM"


@dataclass
class Outcome:
    ready: bool
    reason: str


@pytest.fixture
def metrics():
    return Metrics("1.2.3")


@pytest.fixture
def serve():
    servers = []

    def start(metrics=None, checks=(), **options):
        server = MetricsServer(("127.0.0.1", 0), metrics or Metrics("1.2.3"), checks, **options)
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def exchange(server, request: bytes) -> bytes:
    """Sends bytes as they are and reads until the server closes."""
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(request)
        return read_all(connection)


def read_all(connection) -> bytes:
    answer = b""
    try:
        while piece := connection.recv(65536):
            answer += piece
    except ConnectionResetError:
        pass  # closed with our bytes unread
    return answer


def get(server, path, *headers: str) -> tuple[int, str]:
    head, _, body = exchange(
        server, "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()
    ).partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def samples(server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    status, text = get(server, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class TestMetrics:
    def test_build_info_names_the_version(self, serve, metrics):
        infos = [labels for (name, labels), value in samples(serve(metrics)).items() if name == "cocoon_vk_build_info"]
        assert [dict(labels)["version"] for labels in infos] == ["1.2.3"]

    def test_a_degraded_pinger_shows_as_a_gauge(self, serve, metrics):
        server = serve(metrics)
        assert samples(server)["cocoon_vk_pinger_degraded", ()] == 0
        metrics.degraded(True)
        assert samples(server)["cocoon_vk_pinger_degraded", ()] == 1

    def test_pods_are_counted_when_scraped_by_os_and_readiness(self, serve, metrics):
        pods = [
            Pod("linux", True),
            Pod("linux", True),
            Pod("macos", False, "NoSSHBanner"),
            Pod("linux", False, "VMGone"),
        ]
        metrics.pods_from(lambda: pods)
        found = samples(serve(metrics))
        assert found["cocoon_vk_pods", (("os", "linux"), ("ready", "true"))] == 2
        assert found["cocoon_vk_pods", (("os", "linux"), ("ready", "false"))] == 1
        assert found["cocoon_vk_pods", (("os", "macos"), ("ready", "false"))] == 1

    def test_pods_that_wait_are_counted_by_reason_and_ready_ones_are_not(self, serve, metrics):
        pods = [Pod("linux", True, "ProbeSucceeded"), Pod("linux", False, "PingTimeout")]
        metrics.pods_from(lambda: pods)
        found = {key: value for key, value in samples(serve(metrics)).items() if key[0] == "cocoon_vk_pods_waiting"}
        assert found == {("cocoon_vk_pods_waiting", (("reason", "PingTimeout"),)): 1}

    @pytest.mark.parametrize(
        ("ready", "line"),
        [([], "0 pods, 0 ready"), ([True], "1 pod, 1 ready"), ([True, False, True], "3 pods, 2 ready")],
    )
    def test_a_status_line_counts_pods(self, metrics, ready, line):
        metrics.pods_from(lambda: [Pod("linux", one) for one in ready])
        assert metrics.describe_pods() == line

    def test_a_pod_that_is_gone_is_gone_from_the_next_scrape(self, serve, metrics):
        pods = [Pod("windows", True)]
        metrics.pods_from(lambda: pods)
        server = serve(metrics)
        assert samples(server)["cocoon_vk_pods", (("os", "windows"), ("ready", "true"))] == 1
        pods.clear()
        assert ("cocoon_vk_pods", (("os", "windows"), ("ready", "true"))) not in samples(server)

    def test_a_probe_is_counted_with_its_reason_duration_and_lateness(self, serve, metrics):
        metrics.observe_probe("icmp", Outcome(True, "ProbeSucceeded"), 0.002, 0.03)
        metrics.observe_probe("icmp", Outcome(False, "PingTimeout"), -0.001, 3.0)
        found = samples(serve(metrics))
        assert found["cocoon_vk_probes_total", (("reason", "PingTimeout"),)] == 1
        assert found["cocoon_vk_probes_total", (("reason", "ProbeSucceeded"),)] == 1
        assert found["cocoon_vk_probe_duration_seconds_sum", (("kind", "icmp"), ("result", "ready"))] == 0.03
        assert (
            found["cocoon_vk_probe_duration_seconds_bucket", (("kind", "icmp"), ("le", "5.0"), ("result", "not_ready"))]
            == 1
        )
        assert (
            found["cocoon_vk_probe_duration_seconds_bucket", (("kind", "icmp"), ("le", "1.0"), ("result", "not_ready"))]
            == 0
        )
        assert found["cocoon_vk_probe_lateness_seconds_sum", ()] == 0.002
        assert found["cocoon_vk_probe_lateness_seconds_count", ()] == 2

    @pytest.mark.parametrize(
        ("act", "key"),
        [
            (lambda m: m.flip(True), ("probe_flips_total", (("to", "ready"),))),
            (lambda m: m.flip(False), ("probe_flips_total", (("to", "not_ready"),))),
            (lambda m: m.became_ready("macos", 200.0), ("time_to_ready_seconds_count", (("os", "macos"),))),
            (lambda m: m.lease_lookup("missing"), ("lease_lookups_total", (("result", "missing"),))),
            (lambda m: m.lease_release("ok"), ("lease_release_total", (("result", "ok"),))),
            (lambda m: m.status_write("failed"), ("status_writes_total", (("result", "failed"),))),
            (lambda m: m.qemu_restart("ok"), ("qemu_restarts_total", (("result", "ok"),))),
            (lambda m: m.watch_reconnect("expired"), ("watch_reconnects_total", (("reason", "expired"),))),
            (lambda m: m.orphan(), ("orphan_vm_total", ())),
            (lambda m: m.delivery("delivered", 0.2), ("notify_total", (("result", "delivered"),))),
            (lambda m: m.delivery("delivered", 0.2), ("notify_duration_seconds_count", ())),
            (lambda m: m.hub_lag(0.3), ("hub_lag_seconds_count", ())),
            (
                lambda m: m.pod_operation("create", "failed", "CommandError"),
                ("pod_lifecycle_total", (("op", "create"), ("reason", "CommandError"), ("result", "failed"))),
            ),
        ],
    )
    def test_each_method_counts_under_its_name(self, serve, metrics, act, key):
        server = serve(metrics)
        full_key = (f"cocoon_vk_{key[0]}", key[1])
        assert samples(server).get(full_key, 0) == 0
        act(metrics)
        assert samples(server)[full_key] == 1

    def test_two_sets_of_metrics_share_nothing(self, serve, metrics):
        other = Metrics("9")
        metrics.orphan()
        assert samples(serve(other))["cocoon_vk_orphan_vm_total", ()] == 0

    def test_a_source_that_raises_costs_the_scrape_and_nothing_else(self, serve, metrics):
        def broken():
            raise RuntimeError("no pods today")

        metrics.pods_from(broken)
        server = serve(metrics)
        assert get(server, "/metrics")[0] == 500
        assert get(server, "/healthz") == (200, "ok\n")

    def test_a_scraper_may_ask_for_compression(self, serve, metrics):
        answer = exchange(serve(metrics), b"GET /metrics HTTP/1.1\r\nHost: t\r\nAccept-Encoding: gzip\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"gzip" in head
        assert b"cocoon_vk_build_info" in gzip.decompress(body)


class TestHealth:
    def test_without_checks_both_answers_are_ok(self, serve):
        server = serve()
        assert get(server, "/healthz") == (200, "ok\n")
        assert get(server, "/readyz") == (200, "ok\n")

    def test_a_failing_check_makes_the_process_not_ready_and_says_why(self, serve):
        checks = [Check("api", lambda: ""), Check("leases", lambda: "the lease file cannot be read")]
        assert get(serve(checks=checks), "/readyz") == (
            503,
            "failed\n[+] api ok\n[-] leases the lease file cannot be read\n",
        )

    def test_only_live_checks_decide_whether_to_restart(self, serve):
        states = {"api": "unreachable", "probes": ""}
        checks = [
            Check("api", lambda: states["api"]),
            Check("probes", lambda: states["probes"], live=True),
        ]
        server = serve(checks=checks)
        assert get(server, "/healthz?verbose") == (200, "ok\n[+] probes ok\n")
        states["probes"] = "default/web-0 is 60 s overdue"
        assert get(server, "/healthz") == (503, "failed\n[-] probes default/web-0 is 60 s overdue\n")

    def test_verbose_lists_each_check_also_when_all_is_well(self, serve):
        checks = [Check("api", lambda: ""), Check("node", lambda: "")]
        assert get(serve(checks=checks), "/readyz?verbose") == (200, "ok\n[+] api ok\n[+] node ok\n")

    def test_a_check_that_raises_has_failed(self, serve):
        def broken():
            raise KeyError("gone")

        status, text = get(serve(checks=[Check("odd", broken), Check("api", lambda: "")]), "/readyz")
        assert (status, text) == (503, "failed\n[-] odd cannot tell: KeyError: 'gone'\n[+] api ok\n")


class TestRequests:
    def test_an_unknown_path_is_told_what_there_is(self, serve):
        status, text = get(serve(), "/metrics/../etc/passwd")
        assert status == 404
        assert "/readyz?verbose" in text

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
    def test_only_reading_is_allowed(self, serve, method):
        answer = exchange(serve(), f"{method} /metrics HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 405 ")

    def test_head_answers_without_a_body(self, serve):
        head, _, body = exchange(serve(), b"HEAD /healthz HTTP/1.1\r\nHost: t\r\n\r\n").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"Content-Length: 3" in head
        assert body == b""

    def test_a_connection_carries_one_request(self, serve):
        answer = exchange(serve(), b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n" * 2)
        assert answer.count(b"HTTP/1.1 200 OK") == 1

    @pytest.mark.parametrize(
        ("request_bytes", "status"),
        [
            (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"414"),
            (b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 20000 + b"\r\n\r\n", b"431"),
            (b"GET / HTTP/1.1\r\n" + b"X-Many: a\r\n" * 3000 + b"\r\n", b"431"),
            (b"GET / HTTP/1.1\r\n" + b"X-Many: a\r\n" * 101 + b"\r\n", b"431"),
            (b"what is this\r\n\r\n", b"400"),
            (b"GET / HTTP/1\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n", b"400"),
            (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\r\n", b"405"),
        ],
    )
    def test_an_oversized_or_garbled_request_is_refused_quietly_and_the_next_client_served(
        self, serve, request_bytes, status, capfd
    ):
        server = serve()
        with structlog.testing.capture_logs() as logged:
            answer = exchange(server, request_bytes)
        # A client that is still sending when the answer comes may see the connection reset instead.
        assert answer == b"" or answer.split()[1] == status
        assert get(server, "/healthz") == (200, "ok\n")
        assert [line for line in logged if line["log_level"] != "debug"] == []
        assert len(logged) <= 1
        assert capfd.readouterr().err == ""

    def test_a_client_that_resets_within_its_head_leaves_one_quiet_line(self, serve, capfd):
        server = serve()
        with structlog.testing.capture_logs() as logged:
            with socket.create_connection(server.address, timeout=10) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
                assert get(server, "/healthz") == (200, "ok\n")  # by now it reads the head of the first one
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert get(server, "/healthz") == (200, "ok\n")
        assert [line for line in logged if line["log_level"] != "debug"] == []
        assert capfd.readouterr().err == ""

    def test_a_body_without_end_is_cut_off(self, serve):
        server = serve()
        with socket.create_connection(server.address, timeout=10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999\r\n\r\n")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while True:
                    connection.sendall(b"x" * 65536)
        assert get(server, "/healthz") == (200, "ok\n")

    def test_a_client_that_never_finishes_its_request_is_cut_off(self, serve):
        server = serve(limits=Limits(request_s=0.2))
        assert exchange(server, b"GET /healthz HTTP/1.1\r\nHost: ") == b""

    def test_a_client_that_says_nothing_is_cut_off(self, serve):
        assert exchange(serve(limits=Limits(request_s=0.2)), b"") == b""

    @pytest.mark.parametrize(
        "said", [b"", b"GET /healthz HTTP/1.1\r\nHost: ", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
    )
    def test_clients_that_keep_it_waiting_in_all_places_do_not_lock_the_others_out(self, serve, said):
        server = serve(limits=Limits(request_s=600.0))  # nobody's time is up while this runs
        with ExitStack() as stack:
            for _ in range(3 * Limits().at_once):
                stack.enter_context(socket.create_connection(server.address, timeout=10)).sendall(said)
            assert get(server, "/healthz") == (200, "ok\n")
            assert get(server, "/healthz") == (200, "ok\n")

    def test_clients_that_do_not_take_their_answer_make_room_for_others(self, serve, metrics):
        metrics.pods_from(lambda: [Pod("x" * 30_000_000, True)])
        server = serve(metrics, limits=Limits(request_s=600.0, at_once=3))
        with ExitStack() as stack:
            for _ in range(6):
                lazy = stack.enter_context(socket.create_connection(server.address, timeout=10))
                lazy.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert get(server, "/healthz") == (200, "ok\n")

    def test_the_one_to_go_is_the_oldest_of_the_address_that_has_most(self, serve):
        server = serve(limits=Limits(request_s=600.0, at_once=4))

        def connection(host):
            return stack.enter_context(socket.create_connection(server.address, 10, source_address=(host, 0)))

        with ExitStack() as stack:
            patient, *greedy = [connection(host) for host in ("127.0.0.2", "127.0.0.3", "127.0.0.3")]
            assert get(server, "/healthz") == (200, "ok\n")
            assert read_all(greedy[0]) == b""
            for one in (patient, greedy[1]):
                one.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert read_all(one).endswith(b"ok\n")

    def test_a_client_that_hangs_up_at_once_leaves_no_trace(self, serve, capfd):
        server = serve()
        with structlog.testing.capture_logs() as logged:
            for _ in range(20):
                socket.create_connection(server.address, timeout=10).close()
            assert get(server, "/healthz") == (200, "ok\n")
        assert logged == []
        assert capfd.readouterr().err == ""


class TestListening:
    def test_a_port_that_is_taken_is_one_clear_line(self, serve):
        host, port = serve().address
        with pytest.raises(CannotListen) as caught:
            MetricsServer((host, port), Metrics("1")).start()
        assert str(caught.value) == (
            f"VK_METRICS_ADDR: cannot listen on 127.0.0.1:{port}: Address already in use;"
            f" who has it: ss -ltnp 'sport = :{port}'"
        )

    def test_an_address_of_another_host_is_one_clear_line(self):
        with pytest.raises(CannotListen) as caught:
            MetricsServer(("192.0.2.1", 0), Metrics("1")).start()
        assert str(caught.value) == "VK_METRICS_ADDR: cannot listen on 192.0.2.1:0: Cannot assign requested address"

    def test_without_a_host_every_interface_answers(self):
        server = MetricsServer(("", 0), Metrics("1"))
        server.start()
        try:
            with socket.create_connection(("127.0.0.1", server.address[1]), timeout=10) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert read_all(connection).endswith(b"ok\n")
        finally:
            server.close()

    def test_a_port_taken_on_ipv4_alone_is_noticed_without_a_host_too(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(CannotListen, match=f"cannot listen on :{port}: Address already in use"):
                MetricsServer(("", port), Metrics("1")).start()

    def test_after_close_nobody_listens_and_the_address_is_free_again(self):
        first = MetricsServer(("127.0.0.1", 0), Metrics("1"))
        first.start()
        assert get(first, "/healthz") == (200, "ok\n")
        first.close()
        first.close()
        second = MetricsServer(first.address, Metrics("1"))
        second.start()
        second.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first.address, timeout=10)


class LateClock:
    """A clock on which each wait takes as long as it should, plus the next of some delays."""

    def __init__(self, delays):
        self.time = 100.0
        self.delays = list(delays)

    def monotonic(self):
        return self.time

    def wait(self, event, timeout):
        if event.is_set() or not self.delays:
            return True
        self.time += timeout + self.delays.pop(0)
        return False


class TestHubMonitor:
    def test_each_delay_is_measured_by_itself(self):
        metrics = Metrics("1")
        monitor = HubMonitor(LateClock([0.0, 0.5, 0.125]), metrics)
        monitor._run()
        assert metrics.registry.get_sample_value("cocoon_vk_hub_lag_seconds_count") == 3
        assert metrics.registry.get_sample_value("cocoon_vk_hub_lag_seconds_sum") == 0.625
        assert monitor.lag == 0.125

    @pytest.mark.parametrize(
        ("delays", "warnings"), [([0.125] * 5, 0), ([0.25], 1), ([0.25] * 48, 1), ([0.25] * 50, 2)]
    )
    def test_a_late_hub_is_a_warning_at_most_once_a_minute(self, delays, warnings):
        with structlog.testing.capture_logs() as logged:
            HubMonitor(LateClock(delays), Metrics("1"))._run()
        assert [line["log_level"] for line in logged] == ["warning"] * warnings

    def test_it_stops_when_closed(self):
        class Waiting:
            def monotonic(self):
                return 0.0

            def wait(self, event, timeout):
                return event.wait()

        monitor = HubMonitor(Waiting(), Metrics("1"))
        monitor.start()
        monitor.close()
        assert len(monitor._group) == 0
