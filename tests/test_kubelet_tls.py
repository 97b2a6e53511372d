"""The TLS of the kubelet port: versions, names, whose clients are believed, and files that change under it (H15)."""

import contextlib
import shutil
import socket
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
import structlog.testing
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import Encoding
from kubelet_rig import DAY, NODE, NODE_IP, SERVER, Authority, KubeletRig

from simulator.clock import VirtualClock
from vkcocoon_certificates import Certificates
from vkcocoon_settings import SettingError


@pytest.fixture
def rig(tmp_path):
    rig = KubeletRig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def pair(rig):
    """Where certificate and key of the server are expected, and a function that puts a fresh pair there."""
    paths = (rig.directory / "server.crt", rig.directory / "server.key")

    def renew(name="server", *, halves=(0, 1), end=30 * DAY, **how):
        fresh = rig.authority.issue(name, usage=SERVER, alternative=[name, "127.0.0.1"], end=end, **how)
        for half in halves:
            shutil.copy(fresh[half], paths[half])
        return fresh

    renew.settings = {"tls_cert": str(paths[0]), "tls_key": str(paths[1])}
    renew.paths = paths
    return renew


def served(rig, context=None):
    """The certificate that a client is shown."""
    with rig.connect(context) as connection:
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True))


def name_of(certificate):
    return certificate.subject.rfc4514_string().partition("=")[2]


class TestConversation:
    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_both_present_versions_are_spoken(self, rig, version):
        rig.start()
        context = rig.context()
        context.minimum_version = context.maximum_version = version
        with rig.connect(context) as connection:
            assert connection.version() == version.name.replace("_", ".")

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_older_ones_are_not(self, rig):
        rig.start()
        context = rig.context()
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            rig.connect(context)
        # Some builds of the library have no older ones anyway; others would.
        assert rig.kubelet._certificates.context().minimum_version == ssl.TLSVersion.TLSv1_2

    @pytest.mark.parametrize(
        ("offered", "chosen"),
        [(["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1"), (["h2"], None), ([], None)],
    )
    def test_no_second_version_of_http_is_offered(self, rig, offered, chosen):
        rig.start()
        context = rig.context()
        if offered:
            context.set_alpn_protocols(offered)
        with rig.connect(context) as connection:
            assert connection.selected_alpn_protocol() == chosen

    def test_a_client_that_speaks_plain_http_gets_nothing(self, rig):
        rig.start()
        with socket.create_connection(rig.address, timeout=10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n")
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(4096):
                    answer += piece
        assert b"HTTP" not in answer


class TestOwnCertificate:
    @pytest.mark.parametrize("name", [NODE, "localhost", NODE_IP, "127.0.0.1"])
    def test_it_is_for_the_node_by_name_and_by_address(self, rig, name):
        rig.start()
        trust = rig.directory / "own.crt"
        trust.write_text(served(rig).public_bytes(Encoding.PEM).decode())
        with rig.connect(rig.context(trust=str(trust)), server_hostname=name) as connection:
            assert connection.getpeercert()

    def test_it_is_for_nobody_else(self, rig):
        rig.start()
        trust = rig.directory / "own.crt"
        trust.write_text(served(rig).public_bytes(Encoding.PEM).decode())
        with pytest.raises(ssl.SSLCertVerificationError):
            rig.connect(rig.context(trust=str(trust)), server_hostname="another-node")

    def test_it_can_sign_nothing_and_is_for_servers_only(self, rig):
        rig.start()
        extensions = served(rig).extensions
        assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [SERVER]

    def test_it_stays_the_same_from_one_connection_to_the_next(self, rig):
        rig.start()
        assert served(rig) == served(rig)

    def test_it_is_renewed_before_it_ends_and_when_the_clock_went_back(self, rig):
        clock = VirtualClock()
        certificates = Certificates("", "", "", names=[NODE, NODE_IP], clock=clock)
        first = certificates.context()
        clock.run(334 * 86_400)
        assert certificates.context() is first
        clock.run(2 * 86_400)
        second = certificates.context()
        assert second is not first
        clock.step_wall(-10 * 86_400)
        assert certificates.context() is not second

    def test_its_key_is_never_on_a_disk(self, rig):
        before = set(rig.directory.iterdir())
        rig.start()
        served(rig)
        assert set(rig.directory.iterdir()) == before


class TestFiles:
    def test_the_certificate_of_the_files_is_served(self, rig, pair):
        pair("first")
        rig.start(**pair.settings)
        with rig.connect(rig.context(trust=rig.authority.path), server_hostname="first") as connection:
            assert connection.getpeercert()

    def test_h15_a_renewed_pair_is_served_from_the_next_connection_on(self, rig, pair):
        pair("first")
        rig.start(**pair.settings)
        rig.vm_pod()
        with rig.asking("/containerLogs/default/web-0/agent?follow=true") as answer:
            assert answer.piece()
            pair("second")
            assert name_of(served(rig)) == "second"
            rig.let_time_pass()
            rig.cocoon.add_log("vk-default-web-0", "still there")
            assert b"still there" in answer.piece()

    def test_h15_half_a_renewal_changes_nothing_until_the_other_half_comes(self, rig, pair):
        pair("first")
        rig.start(**pair.settings)
        with structlog.testing.capture_logs() as logged:
            second = pair("second", halves=(0,))
            assert [name_of(served(rig)) for _ in range(3)] == ["first"] * 3
            shutil.copy(second[1], pair.paths[1])
            assert name_of(served(rig)) == "second"
        warnings = [line for line in logged if line["log_level"] == "warning"]
        assert len(warnings) == 1
        assert "VK_TLS_KEY" in warnings[0]["error"]

    @pytest.mark.parametrize("how", ["garbage", "empty", "gone", "both gone", "a directory", "enormous"])
    def test_h15_files_that_cannot_be_used_change_nothing(self, rig, pair, how):
        pair("first")
        rig.start(**pair.settings)
        certificate, key = pair.paths
        if how == "garbage":
            certificate.write_bytes(b"\x00\xff not a certificate")
        elif how == "empty":
            key.write_bytes(b"")
        elif how == "enormous":
            key.write_bytes(b"x" * 2_000_000)
        else:
            key.unlink()
            if how == "both gone":
                certificate.unlink()
            elif how == "a directory":
                key.mkdir()
        with structlog.testing.capture_logs() as logged:
            assert [name_of(served(rig)) for _ in range(3)] == ["first"] * 3
        assert [line["log_level"] for line in logged if line["log_level"] != "debug"] == ["warning"]
        with contextlib.suppress(OSError):
            key.rmdir()
        pair("second")
        assert name_of(served(rig)) == "second"

    def test_files_that_appear_later_replace_our_own(self, rig, pair):
        rig.start(**pair.settings)
        assert name_of(served(rig)) == NODE
        pair("first")
        assert name_of(served(rig)) == "first"

    def test_h15_another_authority_is_believed_from_the_next_connection_on(self, rig, tmp_path):
        other = Authority(tmp_path, "other")
        believed = tmp_path / "believed.crt"
        shutil.copy(rig.authority.path, believed)
        rig.start(kubelet_client_ca=str(believed))
        old, new = (rig.context(each.issue("client")) for each in (rig.authority, other))
        assert rig.ask("/healthz", token="", context=old)[0] == 200
        believed.write_text("\n# two of them\n".join(Path(each.path).read_text() for each in (rig.authority, other)))
        assert [rig.ask("/healthz", token="", context=each)[0] for each in (old, new)] == [200, 200]
        shutil.copy(other.path, believed)
        assert rig.ask("/healthz", token="", context=new)[0] == 200
        with pytest.raises(OSError):
            rig.ask("/healthz", token="", context=old)

    def test_an_authority_need_not_be_a_root(self, rig, tmp_path):
        below = Authority(tmp_path, "below", above=rig.authority)
        rig.start(kubelet_client_ca=below.path)
        assert rig.ask("/healthz", token="", context=rig.context(below.issue("client")))[0] == 200
        with pytest.raises(OSError):
            rig.ask("/healthz", token="", context=rig.context(rig.authority.issue("client")))

    def test_a_certificate_that_expires_is_served_with_one_warning(self, rig, pair):
        pair("late", start=-3 * DAY, end=-DAY)
        with structlog.testing.capture_logs() as logged:
            rig.start(**pair.settings)
            assert [name_of(served(rig)) for _ in range(3)] == ["late"] * 3
        warnings = [line for line in logged if "expires" in line["event"]]
        assert [line["days"] for line in warnings] == [-2]
        with structlog.testing.capture_logs() as logged:
            pair("soon", end=timedelta(days=6, hours=1))
            served(rig)
        assert [line["days"] for line in logged if "expires" in line["event"]] == [6]


class TestStart:
    def check(self, rig, pair, setting, allowed, **settings):
        with pytest.raises(SettingError) as caught:
            rig.start(**{**pair.settings, **settings})
        assert caught.value.setting == setting
        assert allowed in caught.value.allowed

    def test_one_half_alone(self, rig, pair):
        pair(halves=(0,))
        self.check(rig, pair, "VK_TLS_KEY", "a file that exists, since the other half")

    def test_the_other_half_alone(self, rig, pair):
        pair(halves=(1,))
        self.check(rig, pair, "VK_TLS_CERT", "a file that exists, since the other half")

    def test_a_key_of_another_certificate(self, rig, pair):
        pair()
        pair("second", halves=(1,))
        self.check(rig, pair, "VK_TLS_KEY", f"the key of the certificate in {pair.paths[0]}")

    def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(self, rig, pair):
        pair()
        key = serialization.load_pem_private_key(pair.paths[1].read_bytes(), None)
        secret = serialization.BestAvailableEncryption(b"secret")
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
        pair.paths[1].write_bytes(pem)
        self.check(rig, pair, "VK_TLS_KEY", "without a password")

    def test_garbage(self, rig, pair):
        pair()
        pair.paths[0].write_text("garbage")
        self.check(rig, pair, "VK_TLS_KEY", "a certificate and its key in PEM")

    def test_an_authority_that_is_none(self, rig, pair):
        (rig.directory / "ca").write_text("garbage")
        self.check(
            rig, pair, "VK_KUBELET_CLIENT_CA", "certificates in PEM", kubelet_client_ca=str(rig.directory / "ca")
        )

    def test_an_authority_that_is_missing(self, rig, pair):
        self.check(rig, pair, "VK_KUBELET_CLIENT_CA", "a file that exists", kubelet_client_ca=str(rig.directory / "ca"))

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"kubelet_auth": "off"}, "VK_KUBELET_AUTH is off"),
            ({"kubelet_client_ca": ""}, "kubectl logs will be refused"),
        ],
    )
    def test_what_an_operator_may_not_have_meant_is_a_warning(self, rig, settings, says):
        with structlog.testing.capture_logs() as logged:
            rig.start(**settings)
        assert [says in line["event"] for line in logged if line["log_level"] == "warning"] == [True]

    def test_what_is_as_it_should_be_is_none(self, rig):
        with structlog.testing.capture_logs() as logged:
            rig.start()
        assert [line for line in logged if line["log_level"] != "info"] == []
