"""Text that people write and others read."""

from dugnad.dht.plaintext import text_fault


def test_a_manifest_may_not_hold_such_text_at_all() -> None:
    assert text_fault("plain", 5) == ""
    assert "6 characters" in text_fault("longer", 5)
    assert "invisible" in text_fault("a\u202eb", 80)
