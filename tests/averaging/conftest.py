"""Compiled kernels for tests, and modules that run once with numpy and once with these."""

import os
from collections.abc import Iterator

import pytest

from dugnad.averaging import kernels
from dugnad.peer import kernelload


@pytest.fixture(scope="session")
def compiled() -> kernels.Kernels:
    """The kernels, as a daemon gets them; skips where numba is not installed, never in CI."""
    lacking = kernelload.missing()
    if lacking and os.environ.get("CI") != "true":
        pytest.skip(f"{lacking} is not installed")
    return kernelload.bring(kernelload.cache_folder()).kernels


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests of a module, with numpy and with compiled kernels."""
    kernels.use(request.getfixturevalue("compiled") if request.param == "compiled" else None)
    yield
    kernels.use(None)
