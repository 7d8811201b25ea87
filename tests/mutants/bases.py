"""Mistakes planted in how frozen weights are kept beside adapters, by file."""

from tests.mutants.mutant import Mutant

_FORMULA = "tests/training/test_byte_bases.py::test_a_weight_is_what_a_plain_formula_makes"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "scales-of-other-rows", "models/lora/bases.py",
        'kept["weight_rows"][rows] / INT8_MOST', 'kept["weight_rows"][: len(rows)] / INT8_MOST',
        "a part of a weight has the scales of the first rows", (_FORMULA,),
    ),
    Mutant(
        "squares-of-other-columns", "models/lora/bases.py",
        "own = scales[rows[some] // SQUARE][:, columns // SQUARE]",
        "own = scales[rows[some] // SQUARE][:, (columns - columns[0]) // SQUARE]",
        "a part of a weight has the scales of the first columns", (_FORMULA,),
    ),
    Mutant(
        "squares-of-zeros", "models/lora/bases.py",
        "    scales = torch.where(scales > 0, scales, 1.0)\n", "",
        "a square of zeros is no number", (_FORMULA,),
    ),
)
