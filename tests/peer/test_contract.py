"""Contracts of units."""

from dataclasses import dataclass, field, replace

from dugnad.peer.contract import Contract, can_take

CONTRACT = Contract(
    memory_bytes=500_000_000,
    dtypes=("float32", "bfloat16"),
    flops=2e12,
    splittable=False,
    attempts=3,
)


@dataclass
class Machine:
    memory_bytes: int | None = 2_000_000_000
    flops: dict[str, float] = field(default_factory=lambda: {"float32": 1e11})
    kinds: tuple[str, ...] = ("cpu",)


def test_a_machine_that_has_what_it_needs_takes_the_unit() -> None:
    assert can_take(CONTRACT, Machine()) == (True, "about 20 s a unit in float32")


def test_the_fastest_measured_dtype_counts_not_the_first() -> None:
    both = Machine(flops={"float32": 1e9, "bfloat16": 1e12})
    assert can_take(CONTRACT, both) == (True, "about 2 s a unit in bfloat16")


def test_each_refusal_has_its_reason() -> None:
    small = Machine(memory_bytes=100_000_000)
    assert can_take(CONTRACT, small) == (False, "needs 500 MB of memory, has 100 MB")
    nearly = Machine(memory_bytes=499_960_000)
    assert can_take(CONTRACT, nearly) == (False, "needs 500.00 MB of memory, has 499.96 MB")
    assert can_take(CONTRACT, Machine(memory_bytes=None)) == (False, "its memory is unknown")
    other = Machine(flops={"int8": 1e12, "float32": 0.0})
    assert can_take(CONTRACT, other) == (False, "none of float32, bfloat16 was measured on it")
    slow = Machine(flops={"float32": 1e9})
    assert can_take(CONTRACT, slow) == (False, "a unit would take 2000 s, more than 600 s")


def test_a_machine_without_the_device_is_refused_and_one_never_measured_may_try() -> None:
    gpu = replace(CONTRACT, devices=("cuda", "rocm"))
    assert can_take(gpu, Machine()) == (False, "needs cuda or rocm, has cpu")
    assert can_take(gpu, Machine(kinds=("cpu", "rocm")))[0]
    assert can_take(gpu, Machine(kinds=()))[0]
    assert can_take(CONTRACT, Machine(flops={})) == (
        True,
        "it was never measured, so trying will tell",
    )


def test_a_slow_machine_takes_part_of_a_unit_that_may_be_split() -> None:
    splittable = Contract(500_000_000, ("float32",), 2e12, splittable=True, attempts=3)
    assert can_take(splittable, Machine(flops={"float32": 1e9}))[0]
