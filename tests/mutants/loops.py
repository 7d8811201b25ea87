"""Mistakes planted in what a loop of one's own may ask of a derived model: hooks, checkpoints, layers of any kind."""

from tests.mutants.mutant import Mutant

_HOOKED = "tests/public/test_parallelize.py::test_a_parameter_with_a_hook_is_refused"
_SHARED = "tests/models/test_capture.py::test_layers_are_of_one_kind_that_share_an_activation_and_make_equal_constants"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "hooks-within-their-module", "models/capturing/capture.py",
        "always_call=True, prepend=True)", "always_call=True)",
        "what a hook behind a layer does is looked for in the layer, where it does not run",
        ("tests/public/test_parallelize.py::test_hooks_that_change_what_modules_take_and_give",),
    ),
    Mutant(
        "no-gradients-in-what-runs-again", "models/capturing/capture.py",
        "following(again, self._values, self._differentiable)", "self._differentiable",
        "what a reentrant checkpoint runs has no gradients at first, so ranks do not sum them when it runs again",
        ("tests/public/test_parallelize.py::test_layers_that_run_without_gradients_at_first",),
    ),
    Mutant(
        "lost-hooks-of-parameters", "training/mesh/local_parts.py",
        "                refuse_lost_hooks(names[whole], whole)\n", "",
        "a parameter's own hook is gone with it, and its gradient is another", (_HOOKED,),
    ),
    Mutant(
        "lost-hooks-under-fsdp", "training/parallel/fsdp.py",
        "        refuse_lost_hooks(name, parameter)\n", "        pass\n",
        "FSDP puts another parameter in its place, which has no hook",
        ("tests/public/test_parallelize.py::test_a_parameter_with_a_hook_is_refused_by_fsdp_too",),
    ),
    Mutant(
        "lost-attributes-of-parameters", "training/mesh/local_parts.py",
        "                vars(made[whole]).update(vars(whole))", "                vars(made[whole])",
        "code that tells parameters apart by an attribute finds none",
        ("tests/house/test_front_door.py::test_fsdp_dtensors_and_a_parallel_model_on_two_ranks",),
    ),
    Mutant(
        "constants-by-their-number", "models/capturing/fold.py",
        "if value.name in graph.constants:", "if False:",
        "each layer makes a constant, so each is a kind of its own", (_SHARED,),
    ),
    Mutant(
        "shared-modules-of-the-first-layer", "models/capturing/fold.py",
        "[outermost[-1] or one for one in found[run.first : run.stop]]", "found[run.first : run.stop]",
        "an activation that all layers call is the first one's, and no layer is in one run", (_SHARED,),
    ),
    Mutant(
        "views-for-hooks-in-a-run", "sharding/runtime/install.py",
        'if name == "view_as" and of_hooks(', 'if name == "" and of_hooks(',
        "what torch makes for hooks of backwards counts as the model's own calls on its line",
        ("tests/public/test_parallelize.py::test_hooks_behind_backwards_of_layers",),
    ),
    Mutant(
        "a-handle-for-the-model", "training/mesh/local_parts.py",
        "if hasattr(nn.Module, name) else", "if not hasattr(nn.Module, name) else",
        "who goes on with what parallelize returns hears that it has no parameters, and not where they are",
        ("tests/house/test_front_door.py::test_fsdp_dtensors_and_a_parallel_model_on_two_ranks",),
    ),
)
