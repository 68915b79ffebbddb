"""A step learns what a plain torch loop learns, in whatever micro-batches memory allows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dugnad.averaging.fragments import build_table
from dugnad.peer.corpus import TokenFile
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.device import Wishes, candidates, choose, micro_batches
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.learner.stepper import OutOfMemory, Stepper
from dugnad.peer.modelconfig import ModelConfig

CONFIG = ModelConfig(dim=32, layers=2, heads=2, hidden=48, context=16)
TABLE = build_table(CONFIG.tensor_specs(), 3)
THETA = initial_parameters(TABLE, CONFIG, 1)
SETTINGS = OptimiserSettings(total_tokens=1, learning_rate=3e-3, batch_sequences=4, clip_norm=0.5)
TEXT = np.random.default_rng(0).integers(97, 105, 2000).astype(np.uint8)
CPU = torch.device("cpu")


class Cramped(Stepper):
    """A stepper on a machine where only `fits` sequences fit at once."""

    fits = 1

    def _backward(self, windows: Tensor, scale: float) -> Tensor:
        loss = super()._backward(windows, scale)  # as in life, some gradient may be there already
        if windows.shape[0] > self.fits:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return loss


def stepper(kind: type[Stepper] = Stepper) -> Stepper:
    model = FlatModel(CONFIG, TABLE, CPU)
    model.load(THETA)
    return kind(model, SETTINGS, TokenFile(TEXT), torch.float32)


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
@pytest.mark.slow  # torch's own optimiser takes seconds to load
def test_losses_are_those_of_a_plain_loop(
    micro_batch: int, plain_loop: Callable[..., Callable[[list[list[int]]], list[float]]]
) -> None:
    chance = np.random.default_rng(1)
    batches = [chance.permutation(100)[: 4 if n % 3 else 3].tolist() for n in range(12)]
    ours = stepper()
    ours.micro_batch = micro_batch
    losses = [ours.step(batch, SETTINGS.learning_rate).loss for batch in batches]
    plain = plain_loop(CONFIG, TABLE, THETA, SETTINGS, TEXT)(batches)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_a_lack_of_memory_halves_the_micro_batch_and_changes_nothing_else() -> None:
    roomy, cramped = stepper(), stepper(Cramped)
    batch = [0, 1, 2, 3]
    assert cramped.step(batch, 1e-3).loss == pytest.approx(roomy.step(batch, 1e-3).loss, rel=1e-6)
    assert cramped.micro_batch == 1
    torch.testing.assert_close(cramped.model.flat, roomy.model.flat)


def test_not_even_one_sequence_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cramped, "fits", 0)
    with pytest.raises(OutOfMemory, match="one sequence"):
        stepper(Cramped).step([0, 1], 1e-3)


def test_other_errors_of_torch_are_not_taken_for_a_lack_of_memory() -> None:
    ours = stepper()
    ours.model.network.model.cos = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="size"):
        ours.step([0], 1e-3)


def test_a_step_without_a_finite_gradient_changes_nothing() -> None:
    ours = stepper()
    ours.step([0, 1], 1e-3)
    ours.model.flat[5] = torch.nan
    before = ours.model.flat.clone()
    result = ours.step([0, 1], 1e-3)
    assert (result.skipped, result.tokens) == (True, 0)
    torch.testing.assert_close(ours.model.flat, before, equal_nan=True)
    ours.model.flat[5] = 0.0
    assert not ours.step([0, 1], 1e-3).skipped


@pytest.mark.slow
def test_the_probe_chooses_what_fits_and_leaves_no_trace() -> None:
    choice = choose(Wishes("auto", "float32", 0), 4, lambda device, dtype: stepper(Cramped))
    assert choice.stepper.micro_batch == 1
    assert choice.tokens_per_s > 0
    fresh = stepper()
    probed_loss, fresh_loss = (one.step([1, 2], 1e-3).loss for one in (choice.stepper, fresh))
    assert probed_loss == pytest.approx(fresh_loss, rel=1e-6)
    torch.testing.assert_close(choice.stepper.model.flat, fresh.model.flat)


def test_the_sizes_that_are_probed_end_with_the_whole_batch() -> None:
    assert micro_batches(1) == [1]
    assert micro_batches(8) == [1, 2, 4, 8]
    assert micro_batches(12) == [1, 2, 4, 8, 12]


def test_the_owners_memory_ends_the_sizes_on_a_cpu_only() -> None:
    wishes = Wishes("auto", "auto", 0, micro_batch_max=3)
    assert wishes.sizes(CPU, 8) == [1, 2]
    assert wishes.sizes(torch.device("cuda"), 8) == [1, 2, 4, 8]
    assert Wishes("auto", "auto", 0).sizes(CPU, 8) == [1, 2, 4, 8]
    assert Wishes("auto", "auto", 5, micro_batch_max=3).sizes(CPU, 8) == [5]


def test_a_device_that_is_not_there_is_refused() -> None:
    assert candidates("cpu") == [CPU]
    assert CPU in candidates("auto")
    with pytest.raises(ValueError, match="unknown device"):
        candidates("abacus")
    with pytest.raises(ValueError, match="not available"):
        candidates("meta")
