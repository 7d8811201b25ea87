"""What one case is: a row that says what is wrong, and the function that shows it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

FOUND_WITH = "2.13.0"
"""The torch with which each row's `found` was seen."""

Verdict = Literal["right", "wrong", "raises", "hangs", "not run"]
"""right: DTensor gives what plain torch gives; wrong: it gives something else and says nothing; raises: it refuses
what plain torch does, or falls over; hangs: a rank waits for ever; not run: no verdict, for a reason that is told."""

Direction = Literal["forward", "backward"]

Place = Callable[[Tensor, Placement], Tensor]
"""Takes a tensor that every rank has whole and its placement on the one mesh axis; gives the DTensor, or, for the
oracle, the tensor as it is."""

Body = Callable[..., Tensor]
"""Takes a `Place` and the row's settings, and computes with what it placed: the same lines serve DTensor and oracle."""


@dataclass(frozen=True, slots=True)
class CompareCase:
    """One thing that DTensor is, or was, wrong about."""

    name: str
    """Letters, digits and hyphens: the name of its script, too."""
    wrong: str
    """What goes wrong, in one sentence for somebody who uses the operator."""
    operator: str
    inputs: tuple[Placement, ...]
    """The placements of the inputs, in the order in which the body places them."""
    body: Body
    settings: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    direction: Direction = "forward"
    """Whether the wrong value is a result or a gradient."""
    expected: Verdict = "wrong"
    """With torch FOUND_WITH; `right` for something reported upstream that did not show there any more."""
    ranks: int = 2
    issue: str = ""
    """Where upstream it is reported ("owner/repository#number"); empty where no report is known."""
    limit: float = 60.0
    """Seconds after which a rank that is not done is said to hang."""
