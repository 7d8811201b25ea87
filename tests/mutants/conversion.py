"""Mistakes planted in how checkpoints are converted, by file."""

from tests.mutants.mutant import Mutant

_ROUNDED = "tests/checkpoint/test_casts.py::test_what_a_mapping_rounds_is_measured"
_HEADS = "tests/checkpoint/test_families.py::test_each_architecture_is_proved_with_transformers_own_class"
_UNSAID = "tests/checkpoint/test_families.py::test_a_type_of_model_says_what_its_configuration_leaves_out"

_FUSED = "tests/public/test_convert_names.py::test_experts_as_a_module_has_them"
_WIDE = "tests/public/test_types.py::test_what_a_router_keeps_in_float32"
_CARRIED = "tests/public/test_carried.py"
_PUT_BACK = f"{_CARRIED}::test_text_converted_beside_its_directory_is_all_of_it"
_AVERAGES = "tests/public/test_averages.py"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rounded-of-the-result", "relayout/mapping/codecs.py",
        "(undone - own).abs() / own.abs()", "(undone - own).abs() / made.abs()",
        "0.1 less one is off by 0.2 % of what is written, and by 1.5 % when one is added again", (_ROUNDED,),
    ),
    Mutant(
        "rounded-sums-alone", "relayout/mapping/codecs.py",
        'ROUNDED = ("add", "mul")', 'ROUNDED = ("add",)',
        "a product rounds, too", (_ROUNDED,),
    ),
    Mutant(
        "heads-by-a-base-first", "models/families/__init__.py",
        "for names in (set(asked), bases):", "for names in (bases, set(asked)):",
        "a classifier with images is taken for the family of the text model", (_HEADS,),
    ),
    Mutant(
        "no-type-of-a-model-with-images", "models/families/__init__.py",
        '["ForConditionalGeneration"] if "vision_config" in config else ["ForCausalLM", "LMHeadModel"]',
        '["ForCausalLM", "LMHeadModel"]',
        "architectures left out of Qwen2.5-VL's configuration", (_UNSAID,),
    ),
    Mutant(
        "averages-as-likely", "checkpoint/formats/common/model_part.py",
        "return 2 if any(map(OTHERS.search, keys)) else 1 - bool(MODELS.intersection(keys))", "return 1",
        "an average that comes before the model by its name is exported in its place", (_AVERAGES,),
    ),
    Mutant(
        "average-goes-along", "checkpoint/formats/common/model_part.py",
        "lead for lead in found if lead.startswith(prefix) and lead != prefix", "lead for lead in found if not lead",
        "a model without a key of its own is mixed with the average beside it", (_AVERAGES,),
    ),
    Mutant(
        "either-of-two", "checkpoint/conversion/configured.py",
        "if others and counts[others[0]] == counts[lead]:", "if len(others) > 1:",
        "of two nets the first by its name is exported", (_AVERAGES,),
    ),
    Mutant(
        "wide-by-one-name", "checkpoint/conversion/new_tensors.py",
        "plan += [CORES[part] for part in plan if part in CORES]", "pass",
        "on the way to Megatron-core the bias of a router is rounded", (_WIDE,),
    ),
    Mutant(
        "wide-but-by-digests", "checkpoint/conversion/converting.py",
        'as_it_is = as_it_is and kept_wide(small.get("config.json"), options.dtype) is None',
        "as_it_is = bool(as_it_is)",
        "an export of one of Tangram's own checkpoints rounds the bias of a router", (_WIDE,),
    ),
    Mutant(
        "fused-experts-unsaid", "models/building/conversions.py",
        "one.source_patterns != one.target_patterns", "len(one.target_patterns) > 1",
        "experts that other programs than transformers 5 do not find", (_FUSED,),
    ),
    Mutant(
        "shapes-of-another-size", "checkpoint/conversion/configured.py",
        "if name in wanted and tuple(shape) != wanted[name]:", "if name in wanted and len(shape) != len(wanted[name]):",
        "a quarter of each MLP is exported as the model, unsaid",
        ("tests/public/test_folders.py::test_a_directory_of_which_each_rank_has_a_part",),
    ),
    Mutant(
        "tower-dropped", "training/state/export_hf.py",
        "    if carried is not None and carried.names:\n        carry(carried, folder)\n", "",
        "an export loses what text does not train", (_CARRIED,),
    ),
    Mutant(
        "text-alone", "training/state/export_hf.py",
        "files[CONFIG] = with_towers(files[CONFIG], carried.folder)", "pass",
        "the configuration of an export with a tower speaks of the text alone", (_CARRIED,),
    ),
    Mutant(
        "codes-carried", "training/state/carried.py",
        "Carried(folder, tuple(plain), tuple(behind))", "Carried(folder, tuple(names))",
        "codes go along with a configuration in plain numbers", (_CARRIED,),
    ),
    Mutant(
        "masks-carried", "models/building/conversions.py",
        " if is_so and not _has_owner(model, target)]", " if is_so]",
        "masks that old models kept are carried", (_CARRIED,),
    ),
    Mutant(
        "tower-trained", "training/trials/local_plans.py",
        "    if not found:\n", "    if True:\n",
        "what text does not reach is to be trained", (_CARRIED,),
    ),
    Mutant(
        "types-within", "training/run/resume.py",
        "return own | {name: _of_the_model(value) for name, value in within.items()}", "return own",
        "the type of weights in a configuration within another is taken for another model", (_CARRIED,),
    ),
    Mutant(
        "tower-not-put-back", "checkpoint/conversion/configured.py",
        "return part if beside is None else put_back(part, text, beside, notes)", "return part",
        "a conversion beside a directory leaves what that has beside the text", (_PUT_BACK,),
    ),
    Mutant(
        "text-by-its-own-names", "checkpoint/conversion/beside_text.py",
        "_joined(_named_as(source, found), whole, frozenset(beside))", "_joined(source, whole, frozenset(beside))",
        "the text has not the names of the directory beside its tower", (_PUT_BACK,),
    ),
    Mutant(
        "half-of-a-model", "checkpoint/conversion/configured.py",
        "        if beside is None:\n", "        if False:\n",
        "the text alone is written with a configuration of text and tower", (_PUT_BACK,),
    ),
)
