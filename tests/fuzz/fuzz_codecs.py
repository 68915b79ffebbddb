"""Feed the decoders whatever a fuzzer thinks of: python tests/fuzz/fuzz_codecs.py --inputs 1000000

Guided by coverage where the package `atheris` can be imported, else (or with `--plain`) a loop of
random changes. Ends with an error at the first input that makes a decoder do anything else than
return finite numbers or raise CodecError; the input is then printed as hexadecimal text. Each is
decoded twice: by numpy, and by the compiled kernels where these can be had, which must say the
same.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Final

import numpy as np

INPUT_BYTES_MAX: Final = 4096
"""Length of an input: what a longer payload lacks is 0 or, in a changed one, left as it was."""

LENGTHS: Final = (1, 2, 3, 63, 64, 65, 130, 700, 1025, 4095, 4096, 4097, 9000)
"""Numbers of parameters to decode: around blocks and chunks; small, so that many inputs are run."""

RAW, CHANGED, ANY_LENGTH = range(3)
"""What the third byte of an input picks: a payload of the right size made of the rest; a valid
payload with the changes (position, position, xor) that the rest names; the rest as it is."""

PLAIN_SEED: Final = 5
"""The plain loop repeats itself exactly."""

Codecs = ModuleType


def load(atheris: ModuleType | None) -> Codecs:
    """Import the codecs, with counters in their branches where ``atheris`` is there."""
    if atheris is None:
        return importlib.import_module("dugnad.averaging.codecs")
    with atheris.instrument_imports(include=["dugnad.averaging"]):
        return importlib.import_module("dugnad.averaging.codecs")


class Target:
    """One call for each input, with a count of what came of them."""

    def __init__(self, codecs: Codecs) -> None:
        self.kernels = importlib.import_module("dugnad.averaging.kernels")
        self.native = self.kernels.current()
        self.codecs = list((codecs.COMMIT_CODECS | codecs.HAND_IN_ONLY).values())
        self.fault = codecs.CodecError
        self.smallest = codecs.SMALLEST
        self.outcomes: Counter[str] = Counter()
        self.valid = cache(self._valid)

    def __call__(self, data: bytes) -> None:
        """Decode what ``data`` stands for; raises AssertionError or whatever the decoder raised."""
        if len(data) < 3:
            return
        codec = self.codecs[data[0] % len(self.codecs)]
        n = LENGTHS[data[1] % len(LENGTHS)]
        payload = self.payload(codec, n, data[2] % 3, data[3:])
        self.kernels.use(None)
        found = self.decoded(codec, payload, n)
        self.kernels.use(self.native)
        again = self.decoded(codec, payload, n)
        if found is None or again is None:
            assert found is again, "refused once of two times"
            self.outcomes[f"{codec.name} refused"] += 1
            return
        self.outcomes[f"{codec.name} decoded"] += 1
        size = np.abs(found)
        assert found.dtype == np.float32, "another type"
        assert found.shape == (n,), "another shape"
        assert np.isfinite(found).all(), "a number that is not finite"
        assert not ((size > 0.0) & (size < self.smallest)).any(), "a number too small"
        assert again.tobytes() == found.tobytes(), "other numbers the second time"

    def decoded(self, codec, payload: bytes, n: int):  # type: ignore[no-untyped-def]
        """Return the parameters, or None for what is refused."""
        try:
            return codec.decode(payload, n)
        except self.fault:
            return None

    def payload(self, codec, n: int, way: int, rest: bytes) -> bytes:  # type: ignore[no-untyped-def]
        """Return the bytes to decode as ``n`` parameters."""
        size = codec.encoded_size(n)
        if way == ANY_LENGTH:
            return rest
        if way == RAW:
            return rest[:size].ljust(size, b"\0")
        changed = bytearray(self.valid(codec.name, n, len(rest) % 4))
        for i in range(0, len(rest) - 2, 3):
            changed[int.from_bytes(rest[i : i + 2], "big") % size] ^= rest[i + 2]
        return bytes(changed)

    def _valid(self, name: str, n: int, seed: int) -> bytes:
        x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
        encoded: bytes = next(one for one in self.codecs if one.name == name).encode(x)
        return encoded


class Watch:
    """Calls the target, prints the input that it fails on, and a report after the last one."""

    def __init__(self, target: Target, inputs: int, guide: str) -> None:
        self.target, self.inputs, self.guide = target, inputs, guide
        self.ran = 0
        self.started = time.monotonic()

    def __call__(self, data: bytes) -> None:
        """Run one input; raises what the target raises."""
        try:
            self.target(data)
        except BaseException:
            print(f"input: {data.hex()}", file=sys.stderr, flush=True)
            raise
        self.ran += 1
        if self.ran == self.inputs:  # not at exit: atheris ends the process without one
            self.report()

    def report(self) -> None:
        """Print how many inputs ran and what came of them."""
        outcomes = self.target.outcomes
        took = time.monotonic() - self.started
        print(
            f"{self.ran} inputs in {took:.0f} s ({self.guide}), {sum(outcomes.values())} payloads"
        )
        for outcome, count in sorted(outcomes.items()):
            print(f"{count:9} {outcome}")
        sys.stdout.flush()


def plain(target: Callable[[bytes], None], inputs: int) -> None:
    """Run inputs that are random, or changes of those before."""
    rng = random.Random(PLAIN_SEED)
    known = [bytes(8)]
    for _ in range(inputs):
        data = bytearray(rng.choice(known) if rng.random() < 0.7 else rng.randbytes(3))
        for _ in range(rng.randrange(6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data += rng.randbytes(rng.randrange(200))
        target(bytes(data[:INPUT_BYTES_MAX]))
        if rng.random() < 0.01:
            known = [*known[-63:], bytes(data[:INPUT_BYTES_MAX])]


def main() -> None:
    """Run the fuzzer and print what came of the inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--plain", action="store_true", help="no atheris even where it is there")
    options = parser.parse_args()
    there = importlib.util.find_spec("atheris") is not None and not options.plain
    atheris = importlib.import_module("atheris") if there else None
    codecs = load(atheris)
    print(importlib.import_module("dugnad.peer.kernelload").serve(), flush=True)
    watch = Watch(Target(codecs), options.inputs, "atheris" if atheris else "plain loop")
    if atheris is None:
        plain(watch, options.inputs)
        return
    limits = [f"-runs={options.inputs}", f"-max_len={INPUT_BYTES_MAX}", "-len_control=0"]
    atheris.Setup([sys.argv[0], *limits], watch)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
