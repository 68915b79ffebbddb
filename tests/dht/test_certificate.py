"""Certificates that carry an identity: whose they are, and what proves nothing."""

import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dugnad.dht.certificate import (
    EXTENSION,
    CertificateError,
    make_certificate,
    peer_of_certificate,
)
from dugnad.dht.identity import Identity

ME = Identity.ephemeral(b"m" * 32)
OTHER = Identity.ephemeral(b"o" * 32)


def der_of(identity: Identity) -> bytes:
    return ssl.PEM_cert_to_DER_cert(make_certificate(identity)[0].decode())


def test_a_certificate_names_the_peer_that_made_it() -> None:
    assert peer_of_certificate(der_of(ME)) == ME.peer


def test_each_certificate_has_a_key_of_its_own() -> None:
    assert make_certificate(ME)[1] != make_certificate(ME)[1]


def with_extension(value: bytes | None) -> bytes:
    """A certificate by a fresh key with that content of the extension, or without it."""
    key = ec.generate_private_key(ec.SECP256R1())
    mine = x509.load_der_x509_certificate(der_of(ME))
    builder = (
        x509.CertificateBuilder()
        .subject_name(mine.subject)
        .issuer_name(mine.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(mine.not_valid_before_utc)
        .not_valid_after(mine.not_valid_after_utc)
    )
    if value is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(EXTENSION, value), False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_a_stolen_extension_on_another_key_proves_nothing() -> None:
    mine = x509.load_der_x509_certificate(der_of(ME))
    extension = mine.extensions.get_extension_for_oid(EXTENSION).value
    assert isinstance(extension, x509.UnrecognizedExtension)
    with pytest.raises(CertificateError, match="did not sign this certificate's key"):
        peer_of_certificate(with_extension(extension.value))


def test_a_certificate_without_an_identity_is_refused() -> None:
    with pytest.raises(CertificateError, match="carries no identity"):
        peer_of_certificate(with_extension(None))


@pytest.mark.parametrize("value", [b"", b"\x30\x00", bytes(200), b"\x30\x6c" + bytes(108)])
def test_a_malformed_identity_is_refused(value: bytes) -> None:
    with pytest.raises(CertificateError, match="identity extension"):
        peer_of_certificate(with_extension(value))


def test_bytes_that_are_no_certificate_or_too_many_are_refused() -> None:
    for der in (b"", b"nonsense", bytes(5000)):
        with pytest.raises(CertificateError):
            peer_of_certificate(der)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@pytest.mark.slow
def test_no_flipped_bit_makes_it_somebody_elses() -> None:
    """All but the count of unused bits of its own signature, which says nothing, is refused."""
    right = der_of(OTHER)
    taken = set()
    for at in range(len(right)):
        for bit in range(8):
            der = bytearray(right)
            der[at] ^= 1 << bit
            try:
                assert peer_of_certificate(bytes(der)) == OTHER.peer
                taken.add(at)
            except CertificateError:
                pass
    assert len(taken) <= 1
