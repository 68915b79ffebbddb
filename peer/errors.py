"""What a person did, or met, that dugnad cannot go on with: numbered errors with the fix in the
text.

Everything the command line refuses is a `UserError`. The table `ERRORS` is complete: the
documentation and the exit codes come from it, and an error with a number that is not in it cannot
be made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_PAUSED: Final = 3
EXIT_NOT_RUNNING: Final = 4


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the table of errors: what it is called, and the exit code of a command that ends
    with it.
    """

    title: str
    exit_code: int


ERRORS: Final[Mapping[str, ErrorKind]] = MappingProxyType(
    {
        "E001": ErrorKind("a command line option is wrong", EXIT_BAD_INPUT),
        "E002": ErrorKind("the configuration is wrong", EXIT_BAD_INPUT),
        "E003": ErrorKind(
            "a question needs an answer, and nobody is there to give it", EXIT_BAD_INPUT
        ),
        "E004": ErrorKind("the answer was no", EXIT_FAILURE),
        "E005": ErrorKind("something went wrong inside dugnad", EXIT_FAILURE),
        "E010": ErrorKind("the run file cannot be read", 10),
        "E011": ErrorKind("the run file is not TOML", 11),
        "E012": ErrorKind("the run file asks for something impossible", 12),
        "E013": ErrorKind("the link is cut or mistyped", 13),
        "E014": ErrorKind("the peers serve another run", 14),
        "E015": ErrorKind("the run speaks another protocol version", 15),
        "E016": ErrorKind("no peer of the run can be reached", 16),
        "E017": ErrorKind("the disk is full", 17),
        "E018": ErrorKind("the port is in use", 18),
        "E019": ErrorKind("the identity key cannot be used", 19),
        "E020": ErrorKind("there is no text to train on", 20),
        "E021": ErrorKind("the model is too large for the memory of this machine", 21),
        "E022": ErrorKind("another daemon uses this data folder", 22),
        "E023": ErrorKind("the run does not admit this peer", 23),
        "E024": ErrorKind("the data folder is empty: there is no identity yet", 24),
        "E025": ErrorKind("the run's manifest is refused", 25),
        "E026": ErrorKind("the data folder cannot be used", 26),
        "E027": ErrorKind("the libp2p daemon does not start", 27),
        "E028": ErrorKind("the same identity is in use on another machine", 28),
        "E032": ErrorKind("these settings cannot be kept on this machine", 32),
        "E033": ErrorKind("the traffic that the owner allows is used up", 33),
        "E034": ErrorKind("a file is there already", 34),
        "E035": ErrorKind("the identity file cannot be opened", 35),
        "E036": ErrorKind("the service cannot be installed", 36),
        "E042": ErrorKind("no such run in the data folder", 42),
        "E043": ErrorKind("the export would replace something", 43),
        "E044": ErrorKind("the model cannot be exported or sampled", 44),
        "E045": ErrorKind("only the organiser of the run may do that", 45),
        "E046": ErrorKind("that cannot be ordered", 46),
        "E047": ErrorKind("an owner's offer cannot be accepted", 47),
        "E048": ErrorKind("there is no such owner or machine", 48),
        "E050": ErrorKind("the receipts in a file do not hold", 50),
        "E030": ErrorKind("no daemon is running", EXIT_NOT_RUNNING),
        "E031": ErrorKind("the daemon does not answer", EXIT_FAILURE),
    }
)
"""Every error a person can meet, by number. Numbers are never used again for something else."""


class UserError(Exception):
    """Something that a person can put right: `number` of `ERRORS`, one `sentence`, and the `fix`.

    Prints as two lines, `error E012: <sentence>` and `  fix: <fix>`.
    """

    ERRORS: ClassVar[Mapping[str, ErrorKind]] = ERRORS

    def __init__(self, number: str, sentence: str, fix: str) -> None:
        assert number in ERRORS, f"{number} is not in the table of errors"
        super().__init__(sentence)
        self.number = number
        self.sentence = sentence
        self.fix = fix

    @property
    def exit_code(self) -> int:
        """The exit code of the command that ends with this error."""
        return ERRORS[self.number].exit_code

    def __str__(self) -> str:
        return f"error {self.number}: {self.sentence}\n  fix: {self.fix}"
