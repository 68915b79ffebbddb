"""Identities, signed records, streams and the substrate that carries them."""
