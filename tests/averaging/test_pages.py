"""Memory that is used again: only when nobody holds a view of it, and only so much waits."""

import gc
import weakref

import numpy as np

from dugnad.averaging.pages import IDLE_PER_USED, POOLED_BYTES_MIN, Pages

SIZE = POOLED_BYTES_MIN + 4


def test_memory_is_used_again_once_the_last_view_is_gone() -> None:
    pages = Pages()
    held = [pages.octets(SIZE) for _ in range(4)]
    array = pages.octets(SIZE)
    place, part = array.ctypes.data, array.view(np.float32)[1:].view()
    del array
    assert pages.octets(SIZE).ctypes.data != place, "a view still holds it"
    part[:] = 3.0
    del part
    again = pages.octets(SIZE)
    assert again.ctypes.data == place
    assert len(held) == 4


def test_a_memoryview_holds_the_memory_too() -> None:
    pages = Pages()
    held = [pages.octets(SIZE) for _ in range(4)]
    array = pages.vector(SIZE // 4)
    view = array.view(np.uint8).data[8:]
    del array
    other = pages.octets(SIZE)
    other[:] = 7
    view[:2] = b"ab"
    assert bytes(view[:2]) == b"ab"
    assert set(other.tolist()) == {7}
    assert len(held) == 4


def test_a_small_array_is_an_ordinary_one() -> None:
    pages = Pages()
    array = pages.vector(100)
    assert array.dtype == np.float32
    assert (array.size, pages.used) == (100, 0)


def test_what_waits_is_bounded_by_what_is_in_use() -> None:
    pages = Pages()
    held = [pages.octets(SIZE) for _ in range(12)]
    assert pages.used == 12 * SIZE
    del held[4:]
    assert (pages.used, pages.idle) == (4 * SIZE, 4 * SIZE * IDLE_PER_USED)
    held.clear()
    assert pages.used == 0
    assert pages.idle == 0
    assert pages.octets(SIZE).size == SIZE


def test_an_array_in_a_cycle_gives_its_memory_back_too() -> None:
    pages = Pages()
    held = pages.octets(4 * SIZE)
    cycle: list[object] = [pages.octets(SIZE)]
    cycle.append(cycle)
    word = weakref.ref(cycle[0])
    del cycle
    gc.collect()
    assert word() is None
    assert (pages.used, pages.idle) == (4 * SIZE, SIZE)
    assert held.size == 4 * SIZE
