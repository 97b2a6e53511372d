"""The certificates of the kubelet port: who we say we are, and whose clients we believe.

Files change under a running process: a mounted secret is replaced, a tool renews a pair and writes its two halves one
after the other. So the files are read at each connection and compared by content; nothing else is certain to notice,
and next to a handshake it costs nothing. What cannot be used (half a pair, garbage) changes nothing: the last good
context stays, with one warning per content.

Without files there is a certificate of our own making, for the node's name and addresses. It lives in memory only and
is renewed long before its end, as everything else here: at a connection.

Only here the `cryptography` library is known. Used by vkcocoon_kubelet; nothing here waits.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vkcocoon_probes import Clock
from vkcocoon_settings import SettingError

__all__ = ["Certificates", "end_of_certificate"]

LARGEST_FILE = 1024 * 1024
OWN_LIFE = timedelta(days=365)
OWN_RENEWAL = timedelta(days=30)  # before its end
SKEW = timedelta(hours=1)  # by which a client's clock may be behind ours
EXPIRY_WARNING = timedelta(days=7)
CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files contain; empty where there is none."""

    certificate: bytes
    key: bytes
    client_ca: bytes


class _Unusable(Exception):
    """A file that cannot be used: which setting names it, its path, and why not."""

    def __init__(self, setting: str, path: str, why: str) -> None:
        super().__init__(f"{setting} ({path}): {why}")
        self.setting = setting
        self.path = path
        self.why = why


class Certificates:
    """The TLS context of the kubelet port, always of the newest usable files.

    `certificate` and `key` are paths; when neither file exists, a certificate for `names` (host names and IP addresses)
    is made. `client_ca` is the path of the authorities that clients' certificates are from, "" for none. Raises
    SettingError when there are files that cannot be used at the start.
    """

    def __init__(self, certificate: str, key: str, client_ca: str, *, names: Sequence[str], clock: Clock) -> None:
        self._paths = (certificate, key, client_ca)
        self._names = names
        self._clock = clock
        self._own_span = (datetime.min.replace(tzinfo=UTC),) * 2  # of the certificate we made: valid from, until
        self._complaint = ""
        self._warned_of: bytes = b""
        try:
            self._files = self._read()
            self._context = self._build(self._files)
        except _Unusable as error:
            raise SettingError(error.setting, error.path, error.why) from error

    @property
    def own(self) -> bool:
        """Whether the certificate is one we made."""
        return not self._files.certificate

    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        try:
            files = self._read()
            if self._files.certificate and not files.certificate:
                raise _Unusable("VK_TLS_CERT", self._paths[0], "the file is gone")
            if files != self._files or self._is_over():
                self._context = self._build(files)
                if files != self._files:
                    log.info("certificates were read again", own=not files.certificate)
                self._files = files
            self._complain("")
        except _Unusable as error:
            self._complain(str(error))
        return self._context

    def _is_over(self) -> bool:
        """Whether it is time for another certificate of our own; also when the clock went back behind its beginning."""
        begin, end = self._own_span
        return self.own and not begin <= self._clock.now() <= end - OWN_RENEWAL

    def _complain(self, why: str) -> None:
        if why and why != self._complaint:
            log.warning("certificates cannot be used; those from before stay in use", error=why)
        self._complaint = why

    # Reading

    def _read(self) -> _Files:
        certificate, key, client_ca = self._paths
        found = _Files(
            _content("VK_TLS_CERT", certificate),
            _content("VK_TLS_KEY", key),
            _content("VK_KUBELET_CLIENT_CA", client_ca),
        )
        if bool(found.certificate) != bool(found.key):
            missing = ("VK_TLS_KEY", key) if found.certificate else ("VK_TLS_CERT", certificate)
            raise _Unusable(*missing, "a file that exists, since the other half of the pair does")
        if client_ca and not found.client_ca:
            raise _Unusable("VK_KUBELET_CLIENT_CA", client_ca, "a file that exists and can be read")
        return found

    def _build(self, files: _Files) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        # Each connection proves anew who it is: there is one request in it, and nothing to resume.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])  # no HTTP/2: connections can be upgraded to other protocols
        if files.certificate:
            self._load(context, files)
        else:
            now = self._clock.now()
            self._own_span = (now - SKEW, now + OWN_LIFE)
            own = _made(self._names, *self._own_span)
            with _in_memory(own) as path:
                context.load_cert_chain(path)
        if files.client_ca:
            self._believe(context, files.client_ca)
        return context

    def _load(self, context: ssl.SSLContext, files: _Files) -> None:
        certificate, key, _ = self._paths
        try:
            with _in_memory(files.certificate + b"\n" + files.key) as path:
                context.load_cert_chain(path, password=_no_password)
            leaf = x509.load_pem_x509_certificate(files.certificate)
        except (ssl.SSLError, ValueError) as error:
            mismatch = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
            why = f"the key of the certificate in {certificate}" if mismatch else "a certificate and its key in PEM"
            raise _Unusable("VK_TLS_KEY", key, f"{why}, without a password") from error
        left = leaf.not_valid_after_utc - self._clock.now()
        if left < EXPIRY_WARNING and files.certificate != self._warned_of:
            self._warned_of = files.certificate
            log.warning("the certificate of the kubelet port expires", file=certificate, days=left.days)

    def _believe(self, context: ssl.SSLContext, client_ca: bytes) -> None:
        blocks = CERTIFICATE.findall(client_ca)
        try:
            if not blocks:
                raise ValueError("no certificate")
            context.load_verify_locations(cadata=b"\n".join(blocks).decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise _Unusable("VK_KUBELET_CLIENT_CA", self._paths[2], "certificates in PEM") from error
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an authority need not be a root to be believed


def _content(setting: str, path: str) -> bytes:
    """What a file contains, b"" when there is none. Raises _Unusable when it is there and cannot be read."""
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _Unusable(setting, path, f"a file that can be read ({error.strerror})") from error
    if not content or len(content) > LARGEST_FILE:
        raise _Unusable(setting, path, f"a file that is not empty and has at most {LARGEST_FILE} bytes")
    return content


def end_of_certificate(path: str) -> datetime:
    """When the first certificate in a file ends. Raises OSError, and ValueError for a file without one."""
    with open(path, "rb") as file:
        return x509.load_pem_x509_certificate(file.read(LARGEST_FILE)).not_valid_after_utc


def _no_password() -> str:
    raise ValueError("the key has a password")


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path under which the library finds `content`: it reads nothing but files, and these need no disk."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _made(names: Sequence[str], begin: datetime, end: datetime) -> bytes:
    """A certificate for `names` and its key, both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + private


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
