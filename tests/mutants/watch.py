"""Mistakes planted in what a trace says of slow ranks, by file."""

from tests.mutants.mutant import Mutant

_HEALTH = "tests/tracing/test_health.py::"
_WITHOUT = _HEALTH + "test_a_step_without_who_is_slow_is_that_of_the_run_without_the_fault"
_TWO = _HEALTH + "test_of_two_slow_ranks_the_second_is_taken_away_with_the_first"
_CHANCE = _HEALTH + "test_a_rank_that_others_do_not_wait_for_is_not_slow"
_FAULTS = "tests/tracing/test_faults.py::"
_STOOD = _FAULTS + "test_a_rank_that_stood_still_and_went_on_is_named_with_the_step_as_it_would_have_been"
_COMPUTES = "tests/tracing/test_files.py::test_a_process_that_computes_has_not_stood_still"
_LEARNED = "tests/training/test_trial.py::test_what_slow_ranks_cost_is_not_learned"
_BEGINS = "tests/training/test_guard.py::test_where_numbers_began_to_be_not_finite_is_named"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "host-of-one-slow-rank", "tracing/blame.py",
        "ranks <= {one.rank for one in slow}", "ranks & {one.rank for one in slow}",
        "a host is blamed for one of its ranks", (_WITHOUT,),
    ),
    Mutant(
        "slow-at-no-cost", "tracing/blame.py",
        "if shares[i] - shares[i - 1] > WORTH", "if True",
        "a rank that fell behind by chance is blamed, though the step waits for another", (_CHANCE,),
    ),
    Mutant(
        "slow-share-fixed", "tracing/slow.py",
        "min(max(SIGMAS * sigma, LEAST_SHARE), SHARE)", "SHARE",
        "a rank that is a tenth slower than hundreds of equal ones is not seen", (_WITHOUT,),
    ),
    Mutant(
        "step-without-by-own-time", "tracing/slow.py",
        "now - float(np.median((most - own.max(0))[some]))", "now - float(np.median((most - own.min(0))[some]))",
        "the step is shortened by more than the others leave", (_WITHOUT,),
    ),
    Mutant(
        "slow-ranks-apart", "tracing/slow.py",
        "            own[index[one.rank]] = np.median(own[sound[one.rank] or [index[one.rank]]], 0)",
        "            own = own.copy() if one is groups[0][0] else own\n"
        "            own[index[one.rank]] = np.median(own, 0) * (1 if one is groups[0][0] else 9)",
        "each slow rank is taken away alone", (_TWO,),
    ),
    Mutant(
        "slow-ranks-are-learned", "training/observe/summary.py",
        "(1 - (self.slow_ranks_share or 0.0))", "1",
        "the planner learns from a rank that was slow by chance", (_LEARNED,),
    ),
    Mutant(
        "stop-without-others", "tracing/stops.py",
        "min(max(float(mine.max()) + between, least), now)", "least",
        "all of a stop is given back, though others were not ready either", (_STOOD,),
    ),
    Mutant(
        "stop-without-wait", "tracing/stops.py",
        "min(max(float(mine.max()) + between, least), now)", "now - float(own[:, at].max() - mine.max())",
        "of a stop while the rank waits nothing is given back", (_STOOD,),
    ),
    Mutant(
        "heart-of-who-computes", "tracing/files/heart.py",
        "used = max(self._timed.spent(), own.spent(), ran - self._burst)", "used = 0",
        "a rank that computes, or is short of CPU, is put down as stopped", (_COMPUTES,),
    ),
    Mutant(
        "stops-are-slow", "tracing/show/report.py",
        'if one.kind == "slow" and one.step_ms', "if one.step_ms",
        "the planner's history is corrected by a step in which a rank was stopped", (_STOOD,),
    ),
    Mutant(
        "stuck-for-stopped", "tracing/blame.py",
        'if stopped or stack is None else', 'if stopped or True else',
        "an endless call of C code is told as a process that somebody has stopped",
        (_FAULTS + "test_a_rank_whose_interpreter_is_stuck_is_not_said_to_be_stopped",),
    ),
    Mutant(
        "another-ranks-loss", "tracing/watch.py",
        'if f" step {one.step}: " in error', 'if not error',
        "of a loss that is not finite on one rank another is named, the first that has heard of it",
        ("tests/training/test_launch.py::"
         "test_of_ranks_that_stop_at_a_loss_that_is_none_the_one_that_has_it_is_named",),
    ),
    Mutant(
        "another-ranks-loss-under-torchrun", "training/run/torchrun.py",
        'meeting.store.add("astray", 0) == here.world', "True",
        "rank 0 looks into the trace before the rank whose loss is not finite has noted that",
        ("tests/training/test_torchrun.py::"
         "test_of_ranks_that_stop_at_a_loss_that_is_none_the_one_that_has_it_is_named",),
    ),
    Mutant(
        "a-hang-by-a-stop-of-all", "tracing/watch.py",
        "or not state or stood:", "or not state:",
        "a run that somebody has stopped by Ctrl-Z for a minute is ended as it goes on",
        ("tests/tracing/test_files.py::test_a_jump_of_long_ago_is_not_why_a_run_hangs",),
    ),
    Mutant(
        "no-hang-for-who-looks-seldom", "tracing/watch.py",
        "/ 1e9 and not self._stood", "/ 1e9",
        "a hang of many ranks, who are looked at seldom, never ends",
        ("tests/tracing/test_files.py::test_a_jump_of_long_ago_is_not_why_a_run_hangs",),
    ),
    Mutant(
        "nothing-wrong-in-nothing", "tracing/show/report.py",
        "and not trace.groups for trace", "and trace.groups for trace",
        "a program whose groups were made before the recording is said to have nothing wrong",
        ("tests/tracing/test_files.py::test_a_recording_without_a_collective_says_why",),
    ),
    Mutant(
        "death-of-who-was-ended", "tracing/stops.py",
        "trace.live.beat > min(failed, default=trace.live.beat)", "trace.live.beat < 0",
        "a rank that torchrun ends, as others have waited for it in vain, is said to have died",
        ("tests/tracing/test_files.py::test_a_rank_that_ends_says_when",),
    ),
    Mutant(
        "ends-without-a-beat", "tracing/files/heart.py",
        "self._over.set()\n        self._beat()", "self._over.set()",
        "the end of a rank seems to be before that of one that was killed and made it fail",
        ("tests/tracing/test_files.py::test_a_rank_that_ends_says_when",),
    ),
    Mutant(
        "late-is-not-absent", "tracing/stops.py",
        "if one.own - usual > outside.still_ns", "if one.own < 0",
        "nobody is named where a rank came to a call that others had given up waiting in",
        ("tests/public/test_hangs.py::test_a_rank_for_whom_others_have_waited_in_vain_is_named",),
    ),
    Mutant(
        "waits-are-late", "tracing/stops.py",
        "np.where(some[\"kind\"] == Kind.EXIT, 0, np.diff(times))", "np.diff(times)",
        "a rank that has waited for the one that is late is late, too",
        ("tests/tracing/test_files.py::test_who_waits_for_a_late_rank_is_not_late",),
    ),
    Mutant(
        "newest-attempt-alone", "tracing/reading.py",
        "return below[attempt - 1]", "return below[-1]",
        "of a run that has recovered the attempt that failed cannot be shown",
        ("tests/tracing/test_files.py::test_of_each_attempt_it_is_said_how_it_ended_and_each_can_be_shown",),
    ),
    Mutant(
        "perfetto-from-the-first-step", "tracing/show/perfetto.py",
        "(*begins, *trace.rows[\"begin\"][:1])", "trace.rows[\"begin\"][:1]",
        "what a rank did before its first step has times below zero",
        ("tests/tracing/test_page.py::test_perfetto_gets_steps_phases_and_waits_of_the_ranks_that_are_named",),
    ),
    Mutant(
        "top-ends-at-a-failure", "tracing/show/report.py",
        "return RECOVERS if (newest.parent / FAILURES).exists() else SETTLES", "return 0.0",
        "who watches a run that recovers sees it end at its first failure",
        ("tests/tracing/test_files.py::test_who_looks_at_a_run_sees_its_next_attempt",),
    ),
    Mutant(
        "not-finite-of-the-last-rank", "training/step/first_not_finite.py",
        "= min(world.peers.all_words", "= max(world.peers.all_words",
        "a run that stops names the layer that got what is not finite last", (_BEGINS,),
    ),
    Mutant(
        "not-finite-of-the-first-stage", "training/step/first_not_finite.py",
        "return min(bad, default", "return max(bad, default",
        "a run that stops names the last thing that is not finite, as the gradient of the embedding", (_BEGINS,),
    ),
    Mutant(
        "not-finite-checked", "training/step/first_not_finite.py",
        "replace(model, trace=UNTRACED)", "model",
        "the report calls each call of the second run of a step one too many",
        ("tests/training/test_command.py::test_a_run_that_diverges_ends_with_one_sentence",),
    ),
    Mutant(
        "not-finite-unsaid", "training/step/first_not_finite.py",
        "model.trace.first_not_finite(words, name)", "pass",
        "the report on a trace does not know what the run's sentence says",
        ("tests/training/test_command.py::test_a_run_that_diverges_ends_with_one_sentence",),
    ),
)
