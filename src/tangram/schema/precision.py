"""The precision of a job: in which numbers it is computed, kept, updated and added up."""

from typing import Annotated, Literal

from pydantic import Field

from tangram.schema.tables import Mistake, Positive, TomlTable

Type = Literal["float32", "bfloat16", "float16"]
"""Of numbers."""


class ScalePlan(TomlTable):
    """What the loss of a float16 computation is multiplied by, so that small gradients stay above zero."""

    initial: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 65536.0
    every: Positive = 2000
    """Steps without an overflow after which the scale grows."""
    growth: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What the scale is multiplied by after an overflow; it stays at 1 or more."""


class PrecisionPlan(TomlTable):
    """In which numbers: what is computed, kept, updated and added up, each by its own name."""

    compute: Type = "float32"
    """Of the forward and the backward."""
    parameters: Type = "float32"
    """As the parameters are kept between steps: float32, or as they are computed with."""
    masters: Literal["float32", "bfloat16"] = "float32"
    """What the optimiser updates, and its states. Where the parameters are kept in another type, it has a copy."""
    accumulate: Literal["float32", "bfloat16"] | None = None
    """In which the gradients of a step's micro-batches are added up, and lie until the update. The default is float32;
    where they are added before ranks reduce them, as in a pipeline, it is the type of `reduce`."""
    reduce: Type = "float32"
    """In which ranks add up their gradients."""
    scale: ScalePlan = ScalePlan()
    """Of a computation in float16; others have none."""

    def mistake(self) -> Mistake | None:
        """What makes no sense of the types together."""
        if self.reduce != "float32" and self.compute == "float32":
            return Mistake(
                "precision.reduce",
                "gradients of a float32 computation are summed in float32: leave precision.reduce out",
            )
        if self.reduce == "float16" and self.compute != "float16":
            return Mistake(
                "precision.reduce",
                f"gradients of a computation in {self.compute} leave the range of float16: reduce them in float32 or "
                "bfloat16",
            )
        if self.parameters not in ("float32", self.compute):
            return Mistake(
                "precision.parameters",
                f"parameters that are kept in {self.parameters} are computed with as they are, but precision.compute "
                f'is {self.compute}: make it "{self.parameters}", too, or keep the parameters in float32',
            )
        if self.masters != "float32" and self.parameters != self.masters:
            return Mistake(
                "precision.masters",
                f"{self.parameters} parameters need float32 masters: what an update adds is lost in {self.masters}",
            )
        return None

    def mistake_of_sums(self, reshard: str, reduce_every: str, pipeline: bool) -> Mistake | None:
        """What makes no sense of the way in which gradients are added up over micro-batches and ranks."""
        if pipeline and (reshard, reduce_every) != ("after forward", "micro-batch"):
            key = "reduce_every" if reshard == "after forward" else "reshard"
            return Mistake(
                f"run.{key}",
                "a pipeline's schedule says when parameters are gathered and gradients reduced, each once a step: "
                f"leave run.{key} out",
            )
        if pipeline or reduce_every == "step":
            before = "micro-batches' gradients are added here before ranks reduce them, in the type of precision.reduce"
            if self.reduce == "float16":
                return Mistake(
                    "precision.reduce", f'{before}, and sums leave the range of float16: make that "float32"'
                )
            if self.accumulate not in (None, self.reduce):
                return Mistake(
                    "precision.accumulate", f'{before}, which is "{self.reduce}": leave precision.accumulate out'
                )
        elif self.parameters == "float32" and self.accumulate == "bfloat16":
            return Mistake(
                "precision.accumulate",
                "gradients of float32 parameters add up in float32: leave precision.accumulate out, or keep the "
                'parameters in bfloat16 (precision.parameters = "bfloat16")',
            )
        return None
