"""Forward passes with the anchors: the agreed parameters, beside the ones in training."""

import numpy as np
import numpy.typing as npt
import torch

from dugnad.averaging.fragments import FragmentTable
from dugnad.peer.corpus import TokenFile
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.stepper import OutOfMemory, is_out_of_memory, release_memory
from dugnad.peer.modelconfig import BYTE_VALUES, ModelConfig

TEMPERATURE = 0.8  # of sampled text: below 1, small models write more words that exist


class Anchors:
    """A second model for evaluation and sampling, made when it is first asked for."""

    def __init__(self, config: ModelConfig, table: FragmentTable, device: torch.device) -> None:
        self._config = config
        self._table = table
        self.device = device
        self._model: FlatModel | None = None

    @property
    def context(self) -> int:
        """Tokens of one sequence."""
        return self._config.context

    def load(self, vector: npt.NDArray[np.float32]) -> None:
        """Make the model now, with the parameters `vector`."""
        self._loaded(vector)

    @torch.no_grad()
    def time_micro_batch(self, size: int) -> None:
        """Score `size` sequences of zeros with what is loaded: for the probe's stopwatch."""
        assert self._model is not None, "nothing is loaded"
        windows = torch.zeros((size, self.context + 1), dtype=torch.int64, device=self.device)
        self._model.network.loss_sum(windows).item()

    @torch.no_grad()
    def evaluate(
        self,
        vector: npt.NDArray[np.float32],
        tokens: TokenFile,
        sequences: list[int],
        micro_batch: int,
    ) -> float:
        """Mean loss in nats a token of the parameters `vector` over `sequences`, in float32.

        A lack of memory halves the micro-batch; OutOfMemory when one at a time is too many.
        """
        model = self._loaded(vector)
        while True:
            try:
                total = self._score(model, tokens, sequences, micro_batch)
                return total / (len(sequences) * self.context)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            release_memory(self.device)
            if micro_batch == 1:
                raise OutOfMemory(f"one sequence does not fit into the memory of {self.device}")
            micro_batch //= 2

    def _score(
        self, model: FlatModel, tokens: TokenFile, sequences: list[int], micro_batch: int
    ) -> float:
        total = 0.0
        for start in range(0, len(sequences), micro_batch):
            windows = tokens.sequences(sequences[start : start + micro_batch], self.context)
            batch = torch.from_numpy(windows.astype(np.int64)).to(self.device)
            total += model.network.loss_sum(batch).item()
        return total

    @torch.no_grad()
    def sample(
        self, vector: npt.NDArray[np.float32], prompt: bytes, length: int, seed: int
    ) -> bytes:
        """`length` bytes that follow `prompt` (a newline if empty); the same for the same seed."""
        model = self._loaded(vector)
        chance = torch.Generator().manual_seed(seed & (1 << 63) - 1)
        text = list(prompt or b"\n")
        for _ in range(length):
            window = torch.tensor([text[-self._config.context :]], device=self.device)
            logits = model.network(window)[0, -1, :BYTE_VALUES].float().cpu()
            shares = torch.softmax(logits / TEMPERATURE, dim=-1)
            text.append(int(torch.multinomial(shares, 1, generator=chance)))
        return bytes(text[-length:])

    def _loaded(self, vector: npt.NDArray[np.float32]) -> FlatModel:
        if self._model is None:
            self._model = FlatModel(self._config, self._table, self.device)
        self._model.load(vector)
        return self._model
