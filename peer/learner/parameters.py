"""A model whose parameters lie in one flat tensor, so that fragments are a few slices to copy and
to add.

Storage order is ours alone (matrices first, since weight decay applies to them only). `slices` says
where each piece of the fragment table lies in it; the shared regions have the table's order.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dugnad.averaging.fragments import FragmentTable
from dugnad.peer.learner.model import Transformer
from dugnad.peer.modelconfig import ModelConfig


@dataclass(frozen=True, slots=True)
class _Piece:
    storage: slice  # where the piece lies in our storage
    region: slice  # and in the flat vector of the fragment table


class FlatModel:
    """A Transformer over one float32 tensor `flat` on `device`; `flat[:decayed]` are the matrices.

    ValueError when the table does not hold each parameter of the model exactly once.
    """

    def __init__(self, config: ModelConfig, table: FragmentTable, device: torch.device) -> None:
        table.validate()
        specs = config.tensor_specs()
        if list(table.tensors) != specs:
            raise ValueError("the fragment table lists other tensors than the model has")
        self.config = config
        self.device = device
        with torch.device(device):
            self.network = Transformer(config)
        order = sorted(range(len(specs)), key=lambda number: specs[number].group != "matrix")
        starts: dict[int, int] = {}
        count = 0
        self.decayed = 0
        for number in order:
            starts[number] = count
            count += specs[number].size
            if specs[number].group == "matrix":
                self.decayed = count
        self.flat = torch.zeros(count, device=device)
        parameters = dict(self.network.named_parameters())
        for number, spec in enumerate(specs):
            start = starts[number]
            view = self.flat[start : start + spec.size]
            parameters.pop(spec.name).data = view.view(spec.shape)
        assert not parameters, f"tensor_specs lacks {sorted(parameters)}"
        self._pieces = _pieces(table, starts)

    def load(self, vector: npt.NDArray[np.float32]) -> None:
        """Take all parameters from a vector in the table's order."""
        self.read(self.flat, vector)

    def read(self, stored: Tensor, vector: npt.NDArray[np.float32]) -> None:
        """Fill a tensor that is ordered like `flat` from a vector in the table's order."""
        source = torch.from_numpy(vector)
        for pieces in self._pieces:
            for piece in pieces:
                stored[piece.storage].copy_(source[piece.region])

    def write(self, stored: Tensor, vector: npt.NDArray[np.float32]) -> None:
        """Write a tensor that is ordered like `flat` to a vector in the table's order."""
        target = torch.from_numpy(vector)
        for pieces in self._pieces:
            for piece in pieces:
                target[piece.region].copy_(stored[piece.storage])

    def copy_out(self, fragment: int, vector: npt.NDArray[np.float32]) -> None:
        """Write a fragment's parameters to their place in a vector in the table's order."""
        target = torch.from_numpy(vector)
        for piece in self._pieces[fragment]:
            target[piece.region].copy_(self.flat[piece.storage])

    def add_in(self, fragment: int, vector: npt.NDArray[np.float32]) -> None:
        """Add the fragment's part of a vector in the table's order to the parameters."""
        source = torch.from_numpy(vector)
        for piece in self._pieces[fragment]:
            self.flat[piece.storage].add_(source[piece.region].to(self.device))

    def flat_gradient(self) -> Tensor:
        """One zeroed tensor that all gradients accumulate in from now on, ordered like `flat`."""
        gradient = torch.zeros_like(self.flat)
        for parameter in self.network.parameters():
            start = parameter.storage_offset()  # a view of flat, which begins its storage
            view = gradient[start : start + parameter.numel()]
            parameter.grad = view.view(parameter.shape)
        return gradient


def _pieces(table: FragmentTable, starts: dict[int, int]) -> tuple[tuple[_Piece, ...], ...]:
    fragments: list[tuple[_Piece, ...]] = []
    for offset, fragment in zip(table.offsets, table.fragments, strict=True):
        at = offset
        pieces: list[_Piece] = []
        for part in fragment.slices:
            start = starts[part.tensor] + part.start
            pieces.append(_Piece(slice(start, start + part.size), slice(at, at + part.size)))
            at += part.size
        fragments.append(tuple(pieces))
    return tuple(fragments)
