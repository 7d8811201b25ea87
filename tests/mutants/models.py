"""Mistakes planted in how models begin, are captured and keep what they write, by file."""

from tests.mutants.mutant import Mutant

_FIRST = "tests/training/test_models.py::test_first_values_are_those_of_transformers"
_REASONS = "tests/models/test_reasons.py::test_layers_that_are_left_out_at_random"
_COMPILED = "tests/sharding/derive/test_typed.py::test_a_model_that_was_compiled_before"
_CODE = "tests/training/test_code_models.py"
_BUFFERS = "tests/training/test_buffers.py::test_what_a_forward_writes_into_parameters_is_kept_under_fsdp"
_SEVERAL = "tests/training/test_buffers.py::test_several_programs_in_a_step_have_the_gradients_of_one_process"
_IN_BACKWARD = "tests/house/test_front_door.py::test_fsdp_dtensors_and_a_parallel_model_on_two_ranks"
_LATE = "tests/training/test_buffers.py::test_what_a_backward_reads_outside_of_its_module_has_the_gradient_of_all"
_STAGES = "tests/models/test_stages.py::test_stages_one_after_the_other_are_the_model"
_HISTOGRAM = "tests/sharding/test_proof.py::test_a_histogram_is_cut_unless_its_values_say_the_range"
_OWN_BLOCKS = "tests/sharding/test_own_rules.py::test_blocks_of_a_dim_are_a_number_in_a_product"
_CODE = "tests/training/test_code_models.py::test_tensors_that_attributes_give_are_moved_as_others_are"
_OWN_PROPOSED = "tests/sharding/test_own_rules.py::test_what_is_proposed_is_taken"
_OWN_BROADCAST = "tests/sharding/test_own_rules.py::test_dims_by_position_are_equal_or_of_one_element"
_OWN_DIMS = "tests/sharding/test_own_rules.py::test_calls_that_a_rule_is_not_for_say_nothing_against_it"
_DETACHED = "tests/training/test_buffers.py::test_what_no_program_could_stand_for_is_refused"
_WRITTEN = "tests/training/test_incode.py::test_mistakes_are_said_in_one_sentence"
_NEITHER = "tests/training/test_export_beside.py::test_where_neither_can_generate_only_settings_are_compared"
_DATES = "tests/training/data/test_dates.py"
_INSTRUCTIONS = "tests/training/data/test_instructions.py"
_MESSAGES = "tests/training/data/test_messages.py"
_LEFT_OUT = f"{_MESSAGES}::test_what_would_be_left_out_without_a_word_is_refused"
_SHORTENED = f"{_MESSAGES}::test_only_answers_are_learnt_where_a_template_shortens_those_before_them"
_BRACES = "tests/training/data/test_files.py::test_braces_choose_as_those_of_a_shell"

_CHANGES = "tests/training/test_modes.py::test_a_change_is_another_mode_which_a_copy_follows"
_HOLDS = "tests/sharding/derive/test_published_marks.py::test_what_holds_a_model_has_the_marks_of_it"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "first-values-of-the-module-alone", "models/building/initial.py",
        "[path, *outer.get(path, ())]", "[path]",
        "what a module around sets is not: Mamba's steps begin at a bias of 0", (_FIRST,),
    ),
    Mutant(
        "first-values-outermost-first", "models/building/initial.py",
        "while not isinstance(part := model.get_submodule(around), PreTrainedModel):",
        "while not isinstance(part := model.get_submodule(around := \"\"), PreTrainedModel):",
        "a tower of images begins as the model around it says", (_FIRST,),
    ),
    Mutant(
        "layers-left-out-unsaid", "models/capturing/reasons.py",
        "if key.endswith(\"layerdrop\") and chance]", "if key == \"layerdrop\" and chance]",
        "of an encoder and a decoder nobody says what leaves layers out", (_REASONS,),
    ),
    Mutant(
        "aliases-unseen", "training/mesh/groups.py",
        "    refuse_aliases(model)\n", "",
        "a list of a parameter goes on with the values of before",
        ("tests/training/test_references.py",),
    ),
    Mutant(
        "functions-of-the-original", "models/building/twin.py",
        "        new.cell_contents = rebound(kept, copies, depth)", "        new.cell_contents = kept",
        "a function in a copy calls the modules of the model",
        ("tests/training/test_references.py",),
    ),
    Mutant(
        "results-named-as-others", "sharding/derive/marking/marks.py",
        '            name = f"result.{name}"', "            break",
        "a result with the name of an input comes in parts",
        ("tests/training/test_references.py",),
    ),
    Mutant(
        "compiled-forward-unseen", "models/building/twin.py",
        " or hasattr(vars(module).get(\"forward\"), \"_torchdynamo_orig_callable\")", "",
        "a compiled forward is said to be replaced", (_COMPILED,),
    ),
    Mutant(
        "data-is-another-tensor", "models/capturing/opened.py",
        "    aten.detach.default: _same,  # also what `.data` gives\n", "",
        "what is written through .data is refused", (_CODE,),
    ),
    Mutant(
        "written-and-thrown-away", "training/mesh/written_parameters.py",
        "prepend=True", "prepend=False",
        "parameters are taken over after FSDP2 has let them go", (_BUFFERS,),
    ),
    Mutant(
        "written-part-of-the-first", "training/mesh/written_parameters.py",
        "int(one.mesh_info.shard_mesh_rank)", "0",
        "each rank takes over the first rank's part", (_BUFFERS,),
    ),
    Mutant(
        "stages-of-the-model-itself", "models/capturing/stages.py",
        "return model.base_model if model.base_model is not model else next(inside)", "return model.base_model",
        "a stage of Llama 4 calls itself", (_STAGES,),
    ),
    Mutant(
        "gradients-summed-once-more", "training/mesh/gradient_sums.py",
        "        if self.in_backward or self.over is None:\n            return\n", "        self.over = self.now\n",
        "who asks for the sums of a step doubles those of the backward", (_IN_BACKWARD,),
    ),
    Mutant(
        "gradients-not-added-in-the-backward", "training/mesh/gradient_sums.py",
        "for axis in self.now.get(name, NONE))", "for axis in self.now.get(name, NONE)[1:])",
        "a part is taken for the gradient", (_SEVERAL,),
    ),
    Mutant(
        "late-gradients-not-added", "training/mesh/gradient_sums.py",
        "            self._follow(left)\n", "            pass\n",
        "a parameter that is read outside of its module has a part of its gradient", (_LATE,),
    ),
    Mutant(
        "copies-of-a-parallel-model", "sharding/runtime/install.py",
        "    return MethodType(run, _ONE_MODEL)", "    return MethodType(run, object())",
        "a copy of a parallel model runs the first one's parameters", (_IN_BACKWARD,),
    ),
    Mutant(
        "computed-again-by-the-last", "training/mesh/tensor_parallel.py",
        "self._runtime.now is not now:", "False:",
        "what is computed again runs by the program of the last forward", (_SEVERAL,),
    ),
    Mutant(
        "histogram-cut-whatever-its-ends", "sharding/ops/computed_rules.py",
        "if bins == 1 or least != most:", "if bins == 1 or most:",
        "of two equal ends each rank counts by its own range", (_HISTOGRAM,),
    ),
    Mutant(
        "number-in-a-product-dropped", "sharding/ops/dim_positions.py",
        "tuple(leaf.name or str(leaf.n) for leaf in dim.leaves)",
        "tuple(leaf.name for leaf in dim.leaves if leaf.name)",
        "gate and up side by side are taken for one block", (_OWN_BLOCKS,),
    ),
    Mutant(
        "samples-of-other-dims-refute", "sharding/discover/sample_calls.py",
        "return [*(own or calls), *fitting_calls(", "return [*calls, *fitting_calls(",
        "what discovery wrote is refuted by calls that it is not for", (_OWN_DIMS,),
    ),
    Mutant(
        "forward-as-a-method-unseen", "sharding/runtime/install.py",
        "if self._modes and slot.runs:", "if self._modes:",
        "what a forward does that code calls as a method is not looked at", (_CODE,),
    ),
    Mutant(
        "clamped-weight-without-a-sum", "models/capturing/capture.py",
        "self._differentiable.update([] if view is None else [view])", "self._differentiable.update([])",
        "each rank has the gradient of its own rows of a weight that is clamped", (_CODE,),
    ),
    Mutant(
        "restarts-of-a-whole-run", "resilience/policy.py",
        "sum(last.at - one.at < DAY for one in failures)", "len(failures)",
        "a run of months stops at its 101st failure",
        ("tests/resilience/test_policy.py::test_a_run_of_months_goes_on",),
    ),
    Mutant(
        "teacher-as-wide-as-its-student", "planner/cost/memory.py",
        "g.micros * setting.beside.teacher", "g.micros * outline.hidden",
        "hidden states that wait for a teacher are counted as the student's",
        ("tests/planner/test_tasks.py::test_a_teacher_of_any_size_is_held_in_16_bits_and_asked_once",),
    ),
    Mutant(
        "stages-as-modules-are-named", "planner/local/stage_shares.py",
        "sorted((part.name for part in costs.blocks), key=first.__getitem__)", "[part.name for part in costs.blocks]",
        "a list of modules that runs before the layers is cut behind them",
        ("tests/planner/test_staged.py::test_lists_of_modules_are_cut_in_the_order_in_which_they_run",),
    ),
    Mutant(
        "proposed-without-drawn-calls", "sharding/discover/propose.py",
        "if drawn else []", "if not drawn else []",
        "what discovery has written is refuted before it is used", (_OWN_PROPOSED,),
    ),
    Mutant(
        "drawn-calls-of-any-sizes", "sharding/discover/sample_calls.py",
        "if any(one in sizes", "if False and any(one in sizes",
        "a kernel that looks at nothing refutes its rule with fewer values than keys", (_OWN_PROPOSED,),
    ),
    Mutant(
        "unequal-dims-by-position", "sharding/discover/draft.py",
        "        if not self._broadcasts():", "        if self.slot and not self._broadcasts():",
        "dims of 8 and 4 elements are drafted as such that broadcast", (_OWN_PROPOSED,),
    ),
    Mutant(
        "unequal-dims-broadcast", "sharding/ops/rule_table.py",
        "if other != n and of != name:", "if other == n and of != name and False:",
        "a rule cuts 2 beside 1 where it is for 8 beside 4", (_OWN_BROADCAST,),
    ),
    Mutant(
        "write-through-detach-unseen", "training/mesh/local_parts.py",
        "return detached and not any(", "return detached or not any(",
        "a write into a trained parameter ends in torch's own message", (_DETACHED,),
    ),
    Mutant(
        "write-under-eager-unseen", "sharding/eager/sharded_tensor.py",
        "elif trained and x.standing in written", "elif not x.standing and x.standing in written",
        "a parameter that a forward has written into gets no gradient", (_WRITTEN,),
    ),
    Mutant(
        "written-texts-said-though-none", "training/run/end_proofs.py",
        "return difference, isinstance(written[0], list)", "return difference, True",
        "a model that cannot generate is said to generate the same", (_NEITHER,),
    ),
    Mutant(
        "braces-of-a-name-taken-away", "training/data/files.py",
        "alternatives(source.pattern) if _CHOICE.search(source.pattern) else (source.pattern,)",
        "alternatives(source.pattern)",
        "a file with braces in its name is not matched", (_BRACES,),
    ),
    Mutant(
        "untrained-rows-unsaid", "training/state/new_embedding_rows.py",
        "if name in names and not own[name].requires_grad]", "if name in names and own[name].requires_grad]",
        "rows of added tokens stay alike beside adapters, unsaid",
        ("tests/training/test_new_rows.py::test_rows_that_adapters_leave_as_they_begin_are_told",),
    ),
    Mutant(
        "hidden-states-in-parts", "training/mesh/tensor_parallel.py",
        "derived.whole_results = not own and not noted(graph)", "derived.whole_results = False",
        "who sets no marks gets half of each hidden state",
        ("tests/public/test_parallelize.py::test_who_sets_no_marks_gets_results_whole",),
    ),
    Mutant(
        "results-of-a-type-s-marks", "sharding/derive/of_model.py",
        "if not results & {*names.values()}:", "if results or not results:",
        "a bare BERT gives each rank a part of its last hidden state",
        ("tests/public/test_parallelize.py::test_who_sets_no_marks_gets_results_whole",),
    ),
    Mutant(
        "one-name-of-a-tied-weight", "training/mesh/local_parts.py",
        "for name in taken.get(path, ()) for place in self._places[name]]",
        "for name in taken.get(path, ()) for place in self._places[name][:1]]",
        "code that reads a tied weight by its second name meets a DTensor",
        ("tests/public/test_parallelize.py::test_a_tied_weight_that_code_reads_outside_of_its_module",),
    ),
    Mutant(
        "cut-at-who-gives-it-back", "sharding/runtime/lower.py",
        "                and v not in run.gives\n", "",
        "a module that gives back what it has taken gives a part; the rehearsal has it derived once more",
        ("tests/public/test_parallelize.py::test_what_a_module_gives_back_is_not_cut_for_what_works_inside_of_it",),
    ),
    Mutant(
        "shapes-of-parts-seen", "sharding/runtime/lower.py", "if seen or v in self.takers", "if v in self.takers",
        "code that asks for the shape of what no operator takes sees a part",
        ("tests/sharding/runtime/test_rehearse.py::test_what_no_operator_takes_is_whole_where_code_asks_for_its_shape",),
    ),
    Mutant(
        "marks-of-half-a-type", "sharding/derive/marking/published.py",
        "if all(fits) and (count", "if any(fits) and (count",
        "a model has the marks of a type of which a line names nothing",
        ("tests/sharding/derive/test_published_marks.py::test_marks_of_which_a_line_names_nothing_are_no_type_s",),
    ),
    Mutant(
        "bare-names-with-a-prefix", "sharding/derive/marking/published.py",
        "    if not prefix:\n        return mark\n", "    if prefix or not prefix:\n        return mark\n",
        "a bare model's layers and words are not named by the marks of its type",
        ("tests/sharding/derive/test_published_marks.py::test_a_bare_model_has_the_marks_of_its_type",),
    ),
    Mutant(
        "measured-on-a-share-too", "schema/job.py",
        "return 0.0 if self.evaluation else self.held_out", "return self.held_out",
        "documents are held out, and measured on by nobody",
        ("tests/training/data/test_evaluation.py::test_all_that_is_apart_is_measured_on_and_all_else_is_trained_on",),
    ),
    Mutant(
        "asked-where-thoughts-were", "training/data/answers.py",
        "    return head.rfind(before[-least:]) + least\n", "    return alike(before, head)\n",
        "what tools and users said behind thoughts that were dropped is learnt", (_SHORTENED,),
    ),
    Mutant(
        "calls-without-a-mark", "training/data/answers.py",
        "[_changed(calls[0], one), *calls[1:]]} for one in changes[:2])", "calls} for one in changes[:2])",
        "calls of tools whose results need them are in no loss",
        (f"{_MESSAGES}::test_calls_are_learnt_whose_thoughts_an_answer_shortens",),
    ),
    Mutant(
        "moments-without-a-second", "training/updates/update_rules.py",
        "first.masked_fill_(first.abs().div_(most) > deviation, 0)", "first.abs().div_(most)",
        "a row of a rare token moves by thousands of times the rate, where 8 bits have lost its second moment",
        ("tests/training/test_eight_bit.py::test_a_token_that_is_rare_moves_no_further_than_others",),
    ),
    Mutant(
        "words-of-context-learnt", "training/data/messages.py",
        '("weight", "train", "training", "trainable", "loss", "loss_mask")', '("weight", "train")',
        "messages that other trainers leave out of the loss are learnt",
        ("tests/public/test_chats.py::test_an_answer_that_is_marked_as_context_is_none_to_be_learnt",),
    ),
    Mutant(
        "no-calls-as-calls", "training/data/messages.py",
        ' and (name, x) != ("tool_calls", [])', "",
        "a template takes an answer with an empty list of calls for one that calls",
        ("tests/public/test_chats.py::test_no_calls_are_none",),
    ),
    Mutant(
        "results-learnt", "training/data/answers.py",
        "if not least or (last in before and least < len(before) - before.rfind(last)):", "if not least:",
        "what a tool says is learnt where calls follow one another", (_LEFT_OUT,),
    ),
    Mutant(
        "calls-among-the-tools", "training/data/answers.py",
        "if other not in shown), None)", "if name not in text), None)",
        "calls that the template does not write are learnt as empty answers, where it names tools", (_LEFT_OUT,),
    ),
    Mutant(
        "results-in-answers", "training/data/answers.py",
        "numbered, sure = _numbered(messages), True", "numbered, sure = list(messages), False",
        "results that the template leaves out pass, where an answer says the same", (_LEFT_OUT,),
    ),
    Mutant(
        "words-beside-calls", "training/data/answers.py",
        "            beside += 1", "            beside += 0",
        "words that the template leaves out beside calls are not told",
        (f"{_MESSAGES}::test_texts_and_tools_that_a_template_leaves_out_beside_calls_are_told",),
    ),
    Mutant(
        "json-within-json", "training/data/answers.py",
        "return json.dumps(arguments, ensure_ascii=False)\n    return str", "return _MARK\n    return str",
        "arguments are learnt as a string of JSON", (f"{_MESSAGES}::test_arguments_of_calls_are_written_once",),
    ),
    Mutant(
        "a-system-prompt-nobody-sees", "training/data/messages.py",
        "    return [turn, *messages]", "    return messages",
        "the prompt beside the turns is left out", (f"{_MESSAGES}::test_columns_and_roles_by_other_names",),
    ),
    Mutant(
        "a-role-without-a-word", "training/data/answers.py",
        "_without(render, messages, number) == text:", "_without(render, messages, number) == content:",
        "turns that the template does not know are left out, unsaid", (_LEFT_OUT,),
    ),
    Mutant(
        "modes-without-private-attributes", "training/mesh/modes.py",
        "        if name not in _NOT_FOLLOWED and (", "        if name[0] != '_' and name not in _NOT_FOLLOWED and (",
        "a module that goes another way by an attribute of its own runs by the program of the way before",
        (_CHANGES,),
    ),
    Mutant(
        "modes-without-lists", "training/mesh/modes.py",
        "len(x) > _MOST_LEAVES:", "len(x) > 0:",
        "so does one that has it in a list or a dict, as peft the adapters that are on",
        (_CHANGES,),
    ),
    Mutant(
        "modes-of-config-alone", "training/mesh/modes.py",
        "isinstance(x, (SimpleNamespace, Namespace)) or hasattr(x, \"__dataclass_fields__\")", "False",
        "so does one that has it in a dataclass",
        (_CHANGES,),
    ),
    Mutant(
        "modes-without-what-is-trained", "training/mesh/modes.py",
        "p.requires_grad_(trained.get(key, p.requires_grad))", "p.requires_grad_(p.requires_grad)",
        "parameters that were frozen at first have each rank's part of their gradients once they are trained",
        (_CHANGES,),
    ),
    Mutant(
        "modes-without-hooks", "training/mesh/modes.py",
        "    own[kind].update({n: rebound(Shared", "    own[kind].update({} and {n: rebound(Shared",
        "a hook that comes later works on parts",
        (_CHANGES,),
    ),
    Mutant(
        "marks-of-no-adapters", "sharding/derive/marking/published.py",
        '(".weight", ".base_layer.weight",', '(".weight",',
        "layers beside which adapters stand are whole on every rank",
        (_HOLDS,),
    ),
    Mutant(
        "marks-of-no-model-inside", "sharding/derive/marking/published.py",
        "found = ways[0](model) or ways[1](model)", "found = _known(model)",
        "a model of one's own around a backbone is refused without marks",
        (_HOLDS,),
    ),
    Mutant(
        "modes-without-other-modules", "training/mesh/modes.py",
        "    if (now := modules_of(model)) != known:", "    if (now := modules_of(model)).keys() != known.keys():",
        "of a norm that another one stands in the place of each rank has its own part of the gradient",
        ("tests/training/test_modes.py::test_another_module_is_refused",),
    ),
    Mutant(
        "the-clock-of-the-day", "training/data/chat.py",
        "template = _stopped_clock(self.day or USUAL_DATE) + template if asks_for_date else template", "pass",
        "each day has other tokens of the same rows", (f"{_DATES}::test_it_is_the_same_on_any_day",),
    ),
    Mutant(
        "a-date-beside-the-text", "training/data/chat.py",
        "settings.append(str(data.date or USUAL_DATE))", "pass",
        "tokens of another date are taken from the cache",
        (f"{_DATES}::test_it_is_told_and_part_of_what_the_tokens_are",),
    ),
    Mutant(
        "functions-nobody-knows", "training/data/messages.py",
        'return tools or (functions and [{"type": "function", "function": one} for one in functions])', "return tools",
        "functions of the older kind are left out, unsaid", (f"{_INSTRUCTIONS}::test_functions_are_tools",),
    ),
    Mutant(
        "an-instruction-nobody-sees", "training/data/tasks.py",
        "(_question(row) or None) if texts and prompt is None else prompt", "prompt",
        "pairs are told apart without what they answer",
        (f"{_INSTRUCTIONS}::test_pairs_answer_an_instruction",),
    ),
    Mutant(
        "pairs-of-good-answers", "training/data/tasks.py",
        "shift = 2 * self.vocabulary", "shift = 0",
        "rejected answers of pairs are good ones to kto",
        (f"{_INSTRUCTIONS}::test_a_pair_is_a_good_answer_and_a_bad_one",),
    ),
    Mutant(
        "measured-on-what-is-learnt", "training/data/corpus.py",
        "both = [one in trained for split", "both = [False for split",
        "nobody says that what is measured on is trained on",
        ("tests/training/data/test_evaluation.py::test_what_is_trained_on_too_is_told",),
    ),
    Mutant(
        "skipped-one-by-one", "planner/legality/check_plan.py",
        're.sub(r"\\.\\d+\\.", ".*.", one) for one in codes', "one for one in [*codes][:1]",
        "of parameters whose moments of 8 bits would be cut apart one is named at a time",
        ("tests/training/test_eight_bit.py::test_a_layout_that_cuts_blocks_apart_is_refused_once_for_all",),
    ),
    Mutant(
        "whole-tokens-of-answers", "training/data/chat.py",
        "counted |= (spans[:, 1] > start) & (spans[:, 0] < stop)",
        "counted |= (spans[:, 0] >= start) & (spans[:, 0] < stop)",
        "the first token of an answer is in no loss where it is one with what asks",
        ("tests/public/test_rows.py::test_a_token_of_which_a_part_is_an_answer_is_learnt",),
    ),
)
