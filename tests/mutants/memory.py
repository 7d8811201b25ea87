"""Mistakes planted in updates in the backward, in streamed layers, and in bytes that the planner counts, by file."""

from tests.mutants.mutant import Mutant

_EARLY = "tests/training/test_in_backward.py"
_ONE = f"{_EARLY}::test_one_process_has_the_same_losses_to_the_last_digit"
_RANKS = f"{_EARLY}::test_ranks_have_the_same_losses"
_STREAM = "tests/training/test_layer_stream.py"
_MOVED = f"{_STREAM}::test_each_layer_is_moved_twice_and_two_are_there_at_most"
_PREFERENCES = "tests/training/test_preferences.py"
_REFERENCE = f"{_PREFERENCES}::test_losses_and_gradients_are_those_of_transformers_and_peft_on_any_mesh"
_BESIDE = "tests/public/test_preferences.py::test_what_is_trained_beside_adapters_is_not_in_the_reference"
_HELD_OUT = "tests/public/test_preferences.py::test_held_out_pairs_are_compared_with_the_begin_after_training"
_PEAKS = "tests/training/test_layer_peaks.py"
_OTHERS = "tests/training/test_row_lengths.py::test_rows_of_answers_with_labels_are_as_long_as_a_step_needs"
_STALE = f"{_STREAM}::test_a_copy_that_is_out_of_date_is_not_used"
_TASKS = "tests/planner/test_tasks.py"
_MEANS = "tests/planner/test_means.py"
_ENDS = f"{_MEANS}::test_embedding_and_head_beside_a_base_in_few_bits_are_as_those_who_prepare_it_leave_them"
_FEW = "tests/planner/test_few_bits.py"
_BITS = f"{_FEW}::test_adapters_beside_frozen_weights_take_what_was_measured"
_SCORES = f"{_FEW}::test_scores_and_their_gradients_take_what_torch_allocates"
_VERSION = f"{_FEW}::test_unsloth_is_of_its_version"
_KEYS = "tests/models/test_catalogue.py"
_LAYERS = "tests/planner/test_per_layer_fields.py"
_KERNELS = "tests/planner/test_kernels_and_hosts.py"
_GAPS = "tests/planner/test_samples.py::test_samples_of_long_documents_are_not_full"
_PARTS = (
    "tests/planner/test_memory.py::"
    "test_a_chunked_loss_is_of_as_many_tokens_as_its_framework_takes_and_of_preferences_none_is"
)

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "updated-twice", "training/step/backward.py",
        "        parameter.grad = None\n", "",
        "a gradient is used in the backward and again after it", (_ONE,),
    ),
    Mutant(
        "norms-lost", "training/step/backward.py",
        "norms_of([own])[0])", "norms_of([own])[0] * 0)",
        "the norm that is told is of what is left", (_ONE,),
    ),
    Mutant(
        "whole-ones-early", "schema/plan.py",
        "return all(axis in cutting or mesh.axes[axis][0] == 1 for axis in self.model_axes)", "return True",
        "TP ranks update what they hold whole by their own part of its gradient", (_RANKS,),
    ),
    Mutant(
        "moved-again", "training/parallel/layer_stream.py",
        "        copy = self._ahead.pop(unit, None)\n", "        copy = None\n",
        "what was copied ahead is copied again", (_MOVED,),
    ),
    Mutant(
        "kept-after-the-forward", "training/parallel/layer_stream.py",
        "            self._ahead[following] = self._begin(following)\n",
        "            self._ahead[following] = self._begin(following)\n        self._ahead[unit] = copy\n",
        "layers stay in memory", (_MOVED,),
    ),
    Mutant(
        "out-of-date", "training/parallel/layer_stream.py",
        "if copy is None or copy.versions != [one._version for one in places]:", "if copy is None:",
        "a layer computes with parameters of before", (_STALE,),
    ),
    Mutant(
        "padded-in-memory", "training/parallel/apply.py",
        "        map_padded(model)\n", "",
        "parts that FSDP fills up lie in memory", (f"{_STREAM}::test_parts_and_states_of_ranks_lie_in_files",),
    ),
    Mutant(
        "cut-off-answers", "training/data/stream.py",
        "_longest_other(corpus, data, samples) if corpus.labelled else 1", "1",
        "another's answer is cut off where rows end", (_OTHERS,),
    ),
    Mutant(
        "copied-while-exchanged", "training/parallel/model.py",
        "        self.before_write()\n", "",
        "a checkpoint has the reference's weights, which were there while it was copied", (_REFERENCE,),
    ),
    Mutant(
        "keys-that-nobody-sees", "training/step/layer_peaks.py",
        "torch.arange(T, device=rows_R.device) > rows_R[:, None]", "torch.arange(T, device=rows_R.device) < 0",
        "logits of keys behind the query count", (_PEAKS,),
    ),
    Mutant(
        "logits-copied-by-nobody", "planner/space/framework_profiles.py",
        '{"eager": 20.0, "eager-copies": 20.0}', '{"eager": 16.0, "eager-copies": 16.0}',
        "the copy that log_softmax makes of rows that are no one piece is forgotten",
        (f"{_TASKS}::test_bytes_of_a_pairs_logits_are_those_that_torch_allocates",),
    ),
    Mutant(
        "unpacked-for-a-moment", "planner/cost/kept_activations.py",
        "    if setting.base.stays:\n", "    if setting.base.moved < 0:\n",
        "weights that autograd keeps in 16 bits are taken as kept in 4",
        (f"{_MEANS}::test_autograd_keeps_what_torchs_own_operators_unpack",),
    ),
    Mutant(
        "ends-of-the-framework", "planner/space/setting.py",
        "self.base.ends or self.framework.frozen_end_bytes", "self.framework.frozen_end_bytes",
        "peft is taken to bring a GPTQ model's embedding to float32", (_ENDS,),
    ),
    Mutant(
        "like-nobody", "planner/space/framework_profiles.py",
        "{**usual, **like, **table,", "{**usual, **table,",
        "a trainer of transformers' models is taken as one that says nothing",
        (f"{_MEANS}::test_an_entry_that_is_like_another_differs_in_what_it_says",),
    ),
    Mutant(
        "keys-of-one-class", "models/building/strict.py",
        "            yield from _names(path, base.id)\n", "            pass\n",
        "keys that all configurations have are strange to each",
        (f"{_KEYS}::test_keys_of_a_type_are_those_of_its_class",),
    ),
    Mutant(
        "told-after-torch", "cli/plan/inputs.py",
        "    refuse_misspelt(model)\n", "",
        "a misspelt key is told after five seconds", (f"{_KEYS}::test_a_misspelt_key_is_told_before_torch_is_loaded",),
    ),
    Mutant(
        "experts-all-at-once", "planner/cost/block_time.py",
        "if experts and self.setting.framework.loops_experts else 1.0", "if experts < 0 else 1.0",
        "experts that are modules of their own are started as one",
        (f"{_KERNELS}::test_experts_that_are_modules_of_their_own_are_started_one_by_one",),
    ),
    Mutant(
        "routers-that-take-no-time", "planner/cost/block_time.py",
        "self.nothing + framework.router_seconds * times", "self.nothing",
        "mixtures of small micro-batches are as quick as their kernels",
        (f"{_KERNELS}::test_hosts_of_megatron_take_longer_for_mixtures_and_nothing_in_captured_graphs",),
    ),
    Mutant(
        "documents-rotated-at-once", "planner/cost/block_time.py",
        "several * framework.document_kernels[backward]", "0.0 * several",
        "a packed row of many documents takes the host no longer",
        (f"{_KERNELS}::test_each_document_of_a_packed_row_is_rotated_for_itself_where_one_kernel_does_not",),
    ),
    Mutant(
        "llama-rotated-one-by-one", "planner/cost/block_time.py",
        "if any(name in documents.model.lower() for name in framework.rotates_at_once):", "if False:",
        "models of which one kernel rotates all documents wait for each",
        (f"{_KERNELS}::test_each_document_of_a_packed_row_is_rotated_for_itself_where_one_kernel_does_not",),
    ),
    Mutant(
        "packed-without-gaps", "planner/space/setting.py",
        "return sum(lengths) / (len(lefts) * self.sequence - lefts[-1])", "return 1.0",
        "samples of documents of which no two fit are taken as full", (_GAPS,),
    ),
    Mutant(
        "packed-and-asked-as-full", "cli/plan/options.py",
        "documents.full if documents is not None and asked.filled == 1.0 else asked.filled", "asked.filled",
        "the gaps of packed samples take time", (_GAPS,),
    ),
    Mutant(
        "trays-of-a-rack-apart", "hardware/catalogue/uniform.py",
        "next((size for size in range(domain // near, 1, -1) if nodes % size == 0), 1)", "1",
        "trays of GB200 exchange over their NICs", ("tests/hardware/test_cluster.py",),
    ),
    Mutant(
        "captured-by-nobody", "planner/space/setting.py",
        "self.graphs or (self.framework.captures_blocks and self.in_blocks)", "self.graphs",
        "hosts take their time beside graphs that recipes capture",
        (f"{_KERNELS}::test_hosts_of_megatron_take_longer_for_mixtures_and_nothing_in_captured_graphs",),
    ),
    Mutant(
        "bits-in-the-name", "models/outlines/catalogue.py",
        "if name.lower().endswith(end) and in_catalogue", "if name.endswith(name + end) and in_catalogue",
        "who gives a name of weights in few bits is told of the hub alone",
        (f"{_KEYS}::test_names_are_found_in_any_case_and_misspelt_ones_told",),
    ),
    Mutant(
        "selective-as-megatron-has-it", "planner/search/explain.py",
        'framework(ask.framework).selective if given.again == "selective" else given.again', "given.again",
        "torchtitan's selective recompute is taken for nothing",
        ("tests/planner/test_again.py::test_selective_means_what_the_framework_means_by_it",),
    ),
    Mutant(
        "refused-for-the-ranking", "planner/search/explain.py",
        "        return plan(outline, cluster, replace(ask, able=ALL))\n", "        raise\n",
        "a strategy is refused since its framework's export has no other",
        ("tests/planner/test_ulysses.py::test_what_is_given_is_explained_where_its_frameworks_own_layouts_are_none",),
    ),
    Mutant(
        "adapters-alone-left-out", "training/parallel/model.py",
        "named_parameters() if p.requires_grad]", "named_parameters() if p.requires_grad and \"lora_\" in name]",
        "the reference follows a head that is trained beside adapters", (_BESIDE,),
    ),
    Mutant(
        "held-out-with-itself", "training/step/objectives.py",
        "        with model.reference.used():\n",
        "        from contextlib import nullcontext\n"
        "        with model.reference.used() if torch.is_grad_enabled() else nullcontext():\n",
        "held-out pairs are compared with what is trained", (_HELD_OUT,),
    ),
    Mutant(
        "sent-again", "planner/cost/kept_activations.py",
        "    return mean + _sent(block, hidden, g, setting), ", "    return mean, ",
        "what EP ranks exchanged is taken as sent again",
        (f"{_KERNELS}::test_recompute_by_operator_keeps_what_ranks_of_experts_exchanged",),
    ),
    Mutant(
        "weighted-in-16-bits", "planner/cost/kept_activations.py",
        "framework.expert_output_bytes or flow", "flow",
        "outputs that are weighted in float32 are taken as kept in 16 bits",
        ("tests/planner/test_memory.py::test_outputs_that_are_weighted_in_float32_are_kept_in_it",),
    ),
    Mutant(
        "rows-as-chosen", "planner/space/setting.py",
        "block.experts if block.all_rows and self.framework.runs_model_code else block.per_token", "block.per_token",
        "experts that take all rows are taken to compute their own",
        (f"{_KERNELS}::test_experts_that_are_called_with_all_rows_compute_them",),
    ),
    Mutant(
        "rows-unseen", "models/outlines/outlined_graph.py",
        "all_rows=to < fused.spread", "all_rows=False",
        "a graph's experts are taken to compute what is chosen",
        (f"{_KERNELS}::test_a_graph_shows_whether_experts_take_all_rows",),
    ),
    Mutant(
        "keys-kept-twice", "models/outlines/fused.py",
        "if v in flow.alive and (v == flow.main or v not in flow.block.takes)", "if v in flow.alive",
        "layers that attend to an earlier layer's keys are taken to keep them, too", (_LAYERS,),
    ),
    Mutant(
        "one-window-for-all", "models/building/fields.py",
        "return config.per_layer_config[at] if varies(config) else config", "return config",
        "a field of one layer is read off the configuration of all", (_LAYERS,),
    ),
    Mutant(
        "heads-of-the-first", "planner/legality/check_plan.py",
        'heads, tuple(one for one in values(text, groups) if isinstance(one, int)) or heads',
        'heads, tuple(one for one in values(text, groups) if isinstance(one, int))[:1] or heads',
        "key-value heads are judged by those of the first layer", (_LAYERS,),
    ),
    Mutant(
        "positions-as-patches", "models/outlines/outlined.py",
        'patch_embed(?!.*position)|', "patch_embed|",
        "a table of positions is taken for what patches are multiplied by", (_LAYERS,),
    ),
    Mutant(
        "ears-as-eyes", "models/outlines/outlined.py",
        ' or "audio" in one)', ")",
        "what hears is taken for the vision tower", (_LAYERS,),
    ),
    Mutant(
        "recipes-of-before", "planner/space/setting.py",
        "self.framework.overlap_expert_blocks if self.in_blocks else", "self.framework.overlap_expert if True else",
        "mixtures in MXFP8 wait for their exchanges",
        (f"{_KERNELS}::test_mixtures_in_blocks_of_8_bits_overlap_by_the_recipes_of_today",),
    ),
    Mutant(
        "pairs-in-parts", "planner/space/setting.py",
        '(self.framework.loss_of_pairs if more else "")', '("" if more else "")',
        "preferences are taken to have the next token's loss", (_PARTS,),
    ),
    Mutant(
        "parts-of-an-eighth", "planner/space/setting.py",
        "np.minimum(self.framework.chunk_tokens / tokens, 1.0)", "0.125",
        "a loss of 256 tokens at a time is taken as one of an eighth", (_PARTS,),
    ),
    Mutant(
        "keys-of-ones-own", "planner/cost/kept_activations.py",
        "        + _others_keys(block, g, setting)\n", "",
        "keys that CP ranks gather are forgotten",
        ("tests/planner/test_memory.py::test_keys_that_ranks_gather_are_those_of_all_tokens",),
    ),
    Mutant(
        "rows-of-16-bits", "planner/space/setting.py",
        "max(self.flow_bytes, self.frozen_end_bytes)", "self.flow_bytes",
        "activations beside weights in 4 bits are taken to be in 16 where peft has norms in float32", (_BITS,),
    ),
    Mutant(
        "frozen-and-reduced", "planner/cost/memory.py",
        "one.trained * setting.framework.reduce_bytes", "one.gathered * setting.framework.reduce_bytes",
        "frozen weights have gradients while a backward works", (_BITS,),
    ),
    Mutant(
        "gathered-unpacked", "planner/cost/memory.py",
        "(wide if setting.base is FULL else setting.base_bytes)", "(wide + 4)",
        "frozen weights in 4 bits are gathered in more", (_BITS,),
    ),
    Mutant(
        "scores-without-gradients", "planner/cost/kept_activations.py",
        "        + _scores_gradients(block, g, setting)\n", "",
        "attention that writes its scores has no gradient of them", (_SCORES,),
    ),
    Mutant(
        "experts-at-once-backward", "planner/cost/kept_activations.py",
        "if setting.framework.loops_experts else 1.0\n    for (cut", "if block.experts < 0 else 1.0\n    for (cut",
        "experts one by one have all gradients at once",
        ("tests/planner/test_few_bits.py::test_experts_one_by_one_have_one_gradient_at_a_time",),
    ),
    Mutant(
        "unsloth-of-today", "planner/space/frameworks.toml",
        'since = "2024-11"', 'since = "2024-01"',
        "unsloth is taken to have had no logits before it had", (_VERSION,),
    ),
    Mutant(
        "v100-of-32", "hardware/devices.toml",
        'called = ["V100-16"]\nfp16 = 125e12\nmemory_bytes = 16e9',
        'called = ["V100-16"]\nfp16 = 125e12\nmemory_bytes = 32e9',
        "a V100 of 16 GB has 32",
        ("tests/hardware/test_cluster.py::test_equal_nodes_of_the_catalogue_by_name",),
    ),
    Mutant(
        "recompute-of-the-whole", "training/parallel/apply.py",
        "name) and not around and not within", "name) and not within",
        "a pattern that fits the model too has nothing saved, or torch's own error",
        ("tests/training/test_recompute.py::test_a_pattern_that_fits_what_has_all_layers_inside_is_of_the_layers",),
    ),
)
