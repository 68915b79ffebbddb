"""TLS certificates that carry a peer's identity key, as libp2p's TLS specification has them.

The certificate is self-signed by a throw-away key; an extension holds the identity key and its
signature of the throw-away public key. Whoever completes a TLS handshake with it has the
throw-away key, and so speaks for the identity. Specification: libp2p specs, tls/tls.md.
"""

from __future__ import annotations

import datetime as dt
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID

from dugnad.dht.identity import Identity
from dugnad.dht.ids import KEY_BYTES, PeerId

EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
"""libp2p's extension: SEQUENCE { publicKey OCTET STRING, signature OCTET STRING }."""
_PREFIX: Final = b"libp2p-tls-handshake:"
_PUBLIC_KEY: Final = bytes.fromhex("08011220")
"""libp2p PublicKey protobuf: field 1 KeyType = Ed25519 (08 01), field 2 Data = 32 bytes (12 20)."""
_SIGNATURE_BYTES: Final = 64
_OCTETS, _SEQUENCE = 0x04, 0x30
_CERTIFICATE_BYTES_MAX: Final = 4096
"""Ours have about 420; others may choose longer keys and names."""
_MALFORMED: Final = (
    ValueError,
    TypeError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises for bytes that are no proper certificate; most are no ValueError."""
_LIFE: Final = dt.timedelta(days=36500)
"""Clocks of volunteers are wrong: the certificate never expires, it is made anew at each start."""


class CertificateError(ValueError):
    """A certificate that proves no identity; the text says what is wrong with it."""


def make_certificate(identity: Identity) -> tuple[bytes, bytes]:
    """A fresh key and its certificate in the name of ``identity``: (certificate, key), both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dugnad")])
    spki = _spki(key.public_key())
    content = _octets(_PUBLIC_KEY + identity.peer) + _octets(identity.sign(_PREFIX + spki))
    start = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _LIFE)
        .add_extension(
            x509.UnrecognizedExtension(EXTENSION, bytes((_SEQUENCE, len(content))) + content),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def peer_of_certificate(der: bytes) -> PeerId:
    """Whose certificate this is. CertificateError unless all of its signatures hold.

    Dates are not looked at: an expired proof of who somebody is would prove the same.
    """
    if len(der) > _CERTIFICATE_BYTES_MAX:
        raise CertificateError(f"a certificate of {len(der)} bytes")
    try:
        certificate = x509.load_der_x509_certificate(der)
        certificate.verify_directly_issued_by(certificate)
        extension = certificate.extensions.get_extension_for_oid(EXTENSION).value
        key = certificate.public_key()
    except x509.ExtensionNotFound:
        raise CertificateError("the certificate carries no identity") from None
    except (*_MALFORMED, InvalidSignature, UnsupportedAlgorithm) as fault:
        raise CertificateError(f"the certificate does not hold: {fault}") from None
    if not isinstance(extension, x509.UnrecognizedExtension):
        raise CertificateError("the identity extension is malformed")
    public, signature = _identity_of(extension.value)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _PREFIX + _spki(key))
    except (ValueError, InvalidSignature):
        raise CertificateError("the identity did not sign this certificate's key") from None
    return PeerId(public)


def _spki(key: object) -> bytes:
    if not hasattr(key, "public_bytes"):
        raise CertificateError("the certificate's key has an unknown kind")
    found: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return found


def _octets(content: bytes) -> bytes:
    return bytes((_OCTETS, len(content))) + content


def _identity_of(value: bytes) -> tuple[bytes, bytes]:
    """The identity key and its signature; only the one DER form that Ed25519 keys have."""
    key_at = len(_octets(_PUBLIC_KEY)) + 2
    sign_at = key_at + KEY_BYTES + 2
    public, signature = value[key_at : key_at + KEY_BYTES], value[sign_at:]
    content = _octets(_PUBLIC_KEY + public) + _octets(signature)
    right = len(public) == KEY_BYTES and len(signature) == _SIGNATURE_BYTES
    if not right or value != bytes((_SEQUENCE, len(content))) + content:
        raise CertificateError("the identity extension is not that of an Ed25519 key")
    return public, signature
