"""Certificates for one run of the control plane: an authority of its own, and what it signs."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=1)
SKEW = timedelta(minutes=5)


class Authority:
    """Signs certificates into a directory: NAME.crt and NAME.key, with `ca.crt` beside them."""

    def __init__(self, directory: Path, name: str = "vk-cocoon e2e") -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = self._builder(self._name, self._key.public_key(), VALID)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.path = directory / "ca.crt"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def client(self, name: str, *, groups: tuple[str, ...] = (), valid: timedelta = VALID) -> tuple[Path, Path]:
        """Certificate and key of a user as Kubernetes reads them: common name and organizations."""
        return self._issue(name, _name(name, groups), ExtendedKeyUsageOID.CLIENT_AUTH, [], valid)

    def server(self, name: str, addresses: list[str], names: list[str]) -> tuple[Path, Path]:
        alternatives = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        subject = [*alternatives, *(x509.DNSName(each) for each in names)]
        return self._issue(name, _name(name), ExtendedKeyUsageOID.SERVER_AUTH, subject, VALID)

    def _issue(self, stem: str, name: x509.Name, usage, alternatives: list, valid: timedelta) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(name, key.public_key(), valid)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        stem = f"{stem.replace(':', '-')}-{os.getpid()}"  # two processes may want the same at once
        paths = self.directory / f"{stem}.crt", self.directory / f"{stem}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(paths[1], key)
        return paths

    def _builder(self, subject: x509.Name, key, valid: timedelta) -> x509.CertificateBuilder:
        now = datetime.now(UTC)  # noqa: TID251  real servers judge these certificates by real time
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - SKEW).not_valid_after(now + valid)


def signing_key(directory: Path, name: str) -> tuple[Path, Path]:
    """A key pair that signs service account tokens: public and private half."""
    key = ec.generate_private_key(ec.SECP256R1())
    public, private = directory / f"{name}.pub", directory / f"{name}.key"
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    _write_key(private, key)
    return public, private


def _name(common: str, organizations: tuple[str, ...] = ()) -> x509.Name:
    organization = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, each) for each in organizations]
    return x509.Name([*organization, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _write_key(path: Path, key) -> None:
    form = serialization.PrivateFormat.PKCS8
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
