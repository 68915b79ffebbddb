"""Bounds of what a run may be, the same for the organiser's file and for a stranger's manifest."""

from typing import Final

NAME_CHARS_MAX: Final = 80
PURPOSE_CHARS_MAX: Final = 500
LICENCE_CHARS_MAX: Final = 80
ADMITTED_MAX: Final = 1024
"""Keys in an admission list: they travel in the manifest, 32 bytes each."""
TOKENS_MAX: Final = 1 << 60
SEED_MAX: Final = (1 << 63) - 1
BATCH_MAX: Final = 4096
STEPS_MAX: Final = 100_000
