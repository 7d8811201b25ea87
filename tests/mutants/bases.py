"""Mistakes planted in adapters, and in how frozen weights are kept beside them, by file."""

from tests.mutants.mutant import Mutant

_KINDS = "tests/training/test_tuning_kinds.py"
_ROWS = "tests/checkpoint/test_adapter_rows.py"
_DEFAULTS = "tests/training/test_tuning_defaults.py"
_EXPERTS = "tests/training/test_expert_bases.py"
_STORED = "tests/training/test_stored_codes.py"
_FORMULA = "tests/training/test_byte_bases.py::test_a_weight_is_what_a_plain_formula_makes"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "frozen-adapters-as-drawn", "models/lora/adapter_files.py",
        "if p.requires_grad or n in of_experts or _ADDED.search(n))", "if p.requires_grad)",
        "adapters that are not trained begin as others than those that a run goes on from",
        ("tests/training/test_tuning_kinds.py::"
         "test_frozen_adapters_begin_as_stored_ones_where_a_stage_has_some_of_them",),
    ),
    Mutant(
        "scales-of-other-rows", "models/lora/bases.py",
        'kept["rows"][rows] / INT8_MOST', 'kept["rows"][: len(rows)] / INT8_MOST',
        "a part of a weight has the scales of the first rows", (_FORMULA,),
    ),
    Mutant(
        "squares-of-other-columns", "models/lora/bases.py",
        "own = scales[squares[some]][:, columns // SQUARE]",
        "own = scales[squares[some]][:, (columns - columns[0]) // SQUARE]",
        "a part of a weight has the scales of the first columns", (_FORMULA,),
    ),
    Mutant(
        "squares-of-zeros", "models/lora/bases.py",
        "    scales = torch.where(scales > 0, scales, 1.0)\n", "",
        "a square of zeros is no number", (_FORMULA,),
    ),
    Mutant(
        "squares-across-experts", "models/lora/bases.py",
        "return rows // shape[-2] * _squares(shape)[-2] + rows % shape[-2] // SQUARE", "return rows // SQUARE",
        "a square has rows of two experts", (f"{_EXPERTS}::test_a_part_stands_for_the_part_of_what_a_formula_makes",),
    ),
    Mutant(
        "rows-of-the-first-expert", "training/parallel/quantised_base.py",
        "places = (places[:, None] * size + own).flatten()", "places = (places[:, None] * 0 + own).flatten()",
        "all experts have the scales of the first",
        (f"{_EXPERTS}::test_a_part_stands_for_the_part_of_what_a_formula_makes",),
    ),
    Mutant(
        "decoding-as-the-models-own-calls", "models/capturing/called.py",
        "return torch._C.DisableTorchFunction()", "return torch.set_grad_enabled(torch.is_grad_enabled())",
        "a derived model takes what decodes a weight for functions of its code",
        (f"{_EXPERTS}::test_any_mesh_has_the_losses_of_one_process",),
    ),
    Mutant(
        "squares-cut-by-other-weights", "training/state/stored_codes.py",
        "return own in (its, its[::-1]) or", "return True or",
        "codes of experts have the scales of other rows",
        (f"{_EXPERTS}::test_experts_whose_squares_would_be_cut_are_refused",),
    ),
    Mutant(
        "transposed-the-other-way", "planner/local/derived_layouts.py",
        "turned = str(Layout(Layout.parse(text).dims[::-1]))", "turned = str(Layout(Layout.parse(text).dims))",
        "adapters beside GPT-2's weights are cut by the wrong dim",
        (f"{_DEFAULTS}::test_adapters_beside_weights_with_their_inputs_first_are_cut_with_them",),
    ),
    Mutant(
        "scale-of-the-usual-rank", "models/lora/adapters.py",
        "return alpha / (math.sqrt(self.rank_of(name)) if self.rslora else self.rank_of(name))",
        "return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)",
        "experts with another rank have the scale of the usual one",
        ("tests/training/test_expert_adapters.py::test_experts_may_have_other_ranks",),
    ),
    Mutant(
        "spread-of-the-usual-rank", "models/lora/adapters.py",
        "normal_(std=1 / shape[-1 if turned else -2]", "normal_(std=1 / shape[-2 if turned else -1]",
        "A begins with the spread of its inputs", (f"{_KINDS}::test_a_normal_begin_has_the_spread_of_peft",),
    ),
    Mutant(
        "bias-without-its-scale", "checkpoint/conversion/adapter_files.py",
        'pair.scale * parts["bias"]', 'parts["bias"]',
        "the bias of B is merged without its scale", (f"{_ROWS}::test_the_merged_model_is_pefts",),
    ),
    Mutant(
        "weight-of-an-adapter-forgotten", "checkpoint/conversion/lora_adapters.py",
        "changes = found.tensors if weight == 1 else _weighed(found.tensors, weight, folder)",
        "changes = found.tensors",
        "an adapter is merged once where a half was asked for",
        (f"{_ROWS}::test_several_are_the_sum_that_peft_has_of_them",),
    ),
    Mutant(
        "codes-through-numbers", "training/state/stored_codes.py",
        '"mean": torch.tensor(facts["offset"])', '"mean": torch.tensor(0.0)',
        "scales of NF4 are taken without their mean",
        (f"{_STORED}::test_what_is_kept_is_what_a_job_makes_of_the_same_numbers",),
    ),
    Mutant(
        "masks-beside-messages", "training/data/messages.py",
        'message["loss_mask"] = 0', 'pass',
        "answers that a list beside the messages leaves out are learnt",
        ("tests/public/test_chats.py::test_a_mask_beside_messages_says_which_answers_are_learnt",),
    ),
    Mutant(
        "what-asks-without-its-end", "training/data/answers.py",
        'return start, stop + len(next((one for one in ends if one and text.startswith(one, stop)), ""))',
        "return start, stop",
        "of a question that is to be learnt the end is not",
        ("tests/training/data/test_messages.py::test_what_asks_to_be_learnt_is_with_its_end",),
    ),
    Mutant(
        "weights-of-questions", "training/data/messages.py",
        "message.get(key) == 1 for key in _LEARNT[1:]", "message.get(key) == 1 for key in _LEARNT",
        "a table that has a weight of 1 for every message teaches the questions",
        ("tests/training/data/test_messages.py::test_what_asks_to_be_learnt_is_with_its_end",),
    ),
    Mutant(
        "adapters-of-another-model", "checkpoint/conversion/adapter_config.py",
        "if not base or Path(base).name == model.resolve().name:", "if base:",
        "adapters of another model of the same shapes are merged, unsaid",
        (f"{_ROWS}::test_several_are_the_sum_that_peft_has_of_them",),
    ),
    Mutant(
        "asked-behind-an-answer", "training/data/chat.py",
        "text.removesuffix(always_prompt(tokenizer, template, self.stops))", "text",
        "what asks for the next answer is learnt behind the last one, and the others end without their end",
        ("tests/training/data/test_messages.py::test_what_is_asked_behind_the_last_answer_is_none_of_it",),
    ),
    Mutant(
        "ends-taken-for-a-question", "training/data/answers.py",
        "not until.startswith(prompt) or later.startswith(until)", "not until.startswith(prompt)",
        "of templates that never ask, what ends an answer is cut off",
        ("tests/training/data/test_messages.py::"
         "test_templates_that_ask_when_they_are_to_have_nothing_behind_the_last_turn",),
    ),
    Mutant(
        "rows-that-nobody-has", "models/lora/adapter_files.py",
        "        state |= {name: own[name] for name in frozen_tables(model)}\n", "        pass\n",
        "adapters beside a vocabulary that has grown lack the rows of new tokens",
        ("tests/public/test_tuning_further.py::test_adapters_have_the_rows_that_their_model_has_not",),
    ),
    Mutant(
        "grown-unseen", "training/run/end_proofs.py",
        "grown = before is not None and before < rows", "grown = False",
        "a run whose vocabulary has grown saves adapters that lack the rows of new tokens",
        ("tests/training/test_tuning_defaults.py::test_a_whole_run_of_gpt2_and_of_tied_weights",),
    ),
    Mutant(
        "nothing-unsaid", "training/data/chat.py",
        "tally[f\"{NOTHING}: all\"] += found.empty", "pass",
        "answers that say nothing teach a model to end at once, unsaid",
        ("tests/training/data/test_messages.py::test_answers_that_say_nothing_are_told",),
    ),
)
