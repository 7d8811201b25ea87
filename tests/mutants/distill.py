"""Mistakes planted in what a student learns from its teacher, by file."""

from tests.mutants.mutant import Mutant

_RUNS = "tests/training/test_distill.py::test_losses_and_gradients_are_those_of_formulas_on_any_mesh"
_FORMULAS = "tests/kernels/test_divergence.py"
_KEPT = "tests/training/test_distill.py::test_a_pipeline_keeps_logits_of_a_teacher_of_one_micro_batch"
_OTHER = "tests/training/test_cached_teacher.py::test_a_folder_of_another_teacher_is_refused"
_DAMAGED = "tests/training/test_cached_teacher.py::test_a_damaged_folder_is_refused"
_REFUSED = "tests/training/test_distill.py::test_teachers_that_are_refused"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "kl-turned-round", "kernels/divergence.py",
        "    return Summands(p * (logp - logq), -p)", "    return Summands(p * (logq - logp), -p)",
        "the loss falls where it should rise", (_FORMULAS,),
    ),
    Mutant(
        "mixture-turned-round", "kernels/divergence.py",
        "logp + math.log(beta), logq + math.log1p(-beta)", "logp + math.log1p(-beta), logq + math.log(beta)",
        "beta is the student's share", (_FORMULAS,),
    ),
    Mutant(
        "slope-not-centred", "kernels/divergence.py",
        "each.slope - logq_NV.exp_().mul_(slope_N[some, None])", "each.slope",
        "logits drift together", (_FORMULAS,),
    ),
    Mutant(
        "parts-not-summed", "kernels/divergence.py",
        "        sums_2N = sums_2N if classes is None else classes.summed(sums_2N)\n", "",
        "each rank of a cut vocabulary has a loss of its own", (_FORMULAS,),
    ),
    Mutant(
        "padding-counted", "training/objective/loss.py",
        "    return x, min(count, theirs)", "    return x, count",
        "classes that a teacher has not are learnt as if it knew them", (_RUNS,),
    ),
    Mutant(
        "temperature-not-squared", "training/step/objectives.py",
        "(1 - alpha) * temperature**2 * far", "(1 - alpha) * temperature * far",
        "what is learnt from the teacher fades as it is heated", (_RUNS,),
    ),
    Mutant(
        "logits-of-all-micro-batches", "training/step/objectives.py",
        "return _OnDemand(_teacher_logits(model.teacher, batches), len(batches))",
        "return [*map(_teacher_logits(model.teacher, batches), range(len(batches)))]",
        "small micro-batches spare nothing of a teacher's logits", (_KEPT,),
    ),
    Mutant(
        "other-tokenizer-taken", "training/state/teacher.py",
        "        if other.get(text) != number:", "        if text not in own:",
        "a student learns what is said of other tokens", (_REFUSED,),
    ),
    Mutant(
        "any-teachers-folder", "training/objective/cached_teacher.py",
        "now not in (\"auto\", None)", "now not in (\"auto\", None, teacher)",
        "a student learns from another teacher than its job names", (_OTHER,),
    ),
    Mutant(
        "ends-not-looked-at", "training/state/teacher.py",
        "        for begin in (0, len(data) // 2, max(0, len(data) - _LOOKED_AT)):", "        for begin in (0,):",
        "a teacher that differs far behind in a tensor is the same", (_OTHER,),
    ),
    Mutant(
        "damaged-rows-learnt", "training/objective/cached_teacher.py",
        "            if _sum_of(rows) != wanted:", "            if wanted is None:",
        "numbers that nobody wrote are learnt", (_DAMAGED,),
    ),
)
