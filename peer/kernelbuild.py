"""Compiling the kernels: ``python -m dugnad.peer.kernelbuild``.

In a process of its own, since numba holds the interpreter for seconds and 60 MB for good. What
comes out, on standard output, is an object file for this very processor that needs nothing of
Python or numba.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Final

import llvmlite.binding as llvm

from dugnad.averaging import kernelint8, kernelsource
from dugnad.averaging.kernelparts import KERNELS
from dugnad.peer.kernelload import machine

_LOOPS: Final = kernelint8, kernelsource
"""The modules that put their loops into KERNELS."""

_FOREIGN: Final = frozenset({"memcpy", "memset", "memmove"})
"""What a kernel may call: the compiler makes these of loops, and every C library has them."""


def compiled() -> tuple[bytes, str]:
    """Return the object file with all kernels, and its assembly for people and tests.

    Raises RuntimeError if a kernel would call anything that a process without numba has not.
    """
    target = machine()
    whole: Any = llvm.parse_assembly("")
    for name, kernel in KERNELS.items():
        module = llvm.parse_assembly(kernel.inspect_llvm())
        for function in module.functions:
            if function.is_declaration:
                continue
            if function.name == kernel.native_name:
                function.name = name
            else:
                function.linkage = "internal"
        whole.link_in(module)
    whole.triple = target.triple
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(whole, builder)
    asked = {one.name for one in whole.functions if one.is_declaration}
    asked = {name for name in asked if not name.startswith("llvm.")} - _FOREIGN
    if asked:
        raise RuntimeError(f"the kernels would call {', '.join(sorted(asked))}")
    return target.emit_object(whole), target.emit_assembly(whole)


def main() -> None:
    """Compile at low priority; end at once when whoever started this is gone.

    With `--assembly` the instructions are printed instead.
    """
    out = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is no object file
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(10)
    data, assembly = compiled()
    with os.fdopen(out, "wb") as file:
        file.write(assembly.encode() if "--assembly" in sys.argv else data)


def _end_with_input() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
