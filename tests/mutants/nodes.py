"""Mistakes planted in snapshots that stay on several nodes, and in what their launchers agree on."""

from tests.mutants.mutant import Mutant

_DEAL = "tests/checkpoint/test_exchange.py::test_every_wanted_block_is_read_once_and_comes_to_all_who_want_it"
_NODES = "tests/resilience/test_nodes.py::test_"
_RUN = "tests/resilience/test_supervise.py::test_"

_SPARED = "tests/resilience/test_launchers.py::test_restarts_are_not_used_for_what_would_come_again"
_ROOM = "tests/resilience/test_fewer.py::test_as_many_ranks_go_on_as_there_are_devices_for"
_JOBS = "tests/planner/exports/test_platforms.py::"
_LAUNCHED = _JOBS + "test_a_launcher_is_started_once_a_node_and_goes_on_where_it_is_started_again"
_POD = _JOBS + "test_a_pod_that_is_to_end_has_torchrun_stop_the_run"
_QUEUED = _JOBS + "test_a_slurm_job_whose_time_is_nearly_over_stops_and_is_queued_again"
_NO_MEMORY = "tests/resilience/test_tiers.py::test_a_folder_for_snapshots_that_is_not_there_is_refused"
_KILLED_COPY = "tests/resilience/test_tiers.py::test_a_launcher_that_was_killed_as_it_copied_is_gone_on_from"
_SHARED = "tests/checkpoint/test_shared_files.py::test_"
_OTHER_RANKS = "on_the_way_to_the_disk_it_is_shared_with_that_of_other_ranks"
_HANGS = "the_end_does_not_wait_in_silence_nor_long_for_a_store_that_hangs"
_STORE = "tests/training/test_store.py::test_"
_DIES = "tests/training/test_launch.py::test_a_rank_that_dies_ends_the_job"
_MENDED = _STORE + "what_is_damaged_here_is_fetched_and_no_more"
_PATIENCE = "tests/training/test_command.py::test_a_run_stops_early_where_the_held_out_loss_falls_no_further"
_ENDED = _STORE + "a_run_that_has_ended_still_sends_what_the_store_did_not_take"
_TORN = "tests/training/test_resume.py::test_a_checkpoint_that_has_lost_a_file_is_told_of"

_BOARD = "tests/training/test_boards.py::test_a_resumed_run_takes_the_place_of_what_came_after_its_checkpoint"
_CUT = "tests/training/test_command.py::test_a_run_that_is_cut_short_goes_on_as_if_it_had_not_been"
_GOES_ON = "tests/public/test_going_on.py::test_"

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "read-where-it-is-not", "checkpoint/loading/assign_blocks.py",
        "able = np.flatnonzero(held[rows, some[0]])", "able = np.arange(len(rows))",
        "a block is read on a node that does not have its file", (_DEAL,),
    ),
    Mutant(
        "nobody-carries", "checkpoint/loading/assign_blocks.py",
        "np.flatnonzero(lacking & ~served)", "np.flatnonzero(lacking & served)",
        "what no node that wants it has is not sent by the one that has it", (_DEAL,),
    ),
    Mutant(
        "half-a-snapshot", "resilience/shares.py",
        "if by_number.keys() == set(range(first.of)):", "if first.number == 0:",
        "a snapshot is gone on from of which a share is nowhere",
        (_NODES + "all_go_on_from_the_newest_of_which_every_share_is_somewhere",),
    ),
    Mutant(
        "copies-unproved", "resilience/carrier.py",
        "if any(checksum(reading.read(BLOCK)) != expected for expected in stored.sums):", "if False:",
        "a copy on another node has other bytes than were written",
        (_NODES + "what_has_rotted_in_memory_is_not_copied",),
    ),
    Mutant(
        "first-word-counts", "resilience/nodes.py",
        "    if isinstance(error, RankError) and not error.details:\n        return 0\n", "",
        "who misses a killed rank is blamed for its end", (_NODES + "the_error_that_came_first_counts_on_all",),
    ),
    Mutant(
        "copied-one-too-far", "resilience/carrier.py",
        "(self._nodes.index + i) % self._nodes.count)", "(self._nodes.index + i - 1) % self._nodes.count)",
        "a node keeps its own share as the copy, and goes with it",
        (_NODES + "the_memory_of_any_one_node_may_be_lost",),
    ),
    Mutant(
        "turns-by-what-others-have", "checkpoint/loading/assign_blocks.py",
        "np.concatenate([wants, wants & held])", "np.concatenate([wants, held])",
        "of three nodes two mean others to read a block, and wait for ever",
        ("tests/checkpoint/test_exchange.py::test_every_wanted_block_is_read_once_and_comes_to_all_who_want_it",),
    ),
    Mutant(
        "last-steps-unheard", "training/run/launch.py",
        "                if isinstance(message, _Event):\n                    on_event(message.value)\n",
        "                assert message\n",
        "steps that a snapshot has are missing in what is told of the run",
        (_RUN + "steps_that_were_still_to_be_heard_of_are_told",),
    ),
    Mutant(
        "one-step-too-late", "training/step/loop.py",
        "if not stopped and hooks.reached and", "if not stopped and not hooks.reached and",
        "a run whose time is spent trains a step more for each lost rank",
        (_RUN + "where_the_time_is_spent_when_a_rank_is_lost_nothing_more_is_trained",),
    ),
    Mutant(
        "a-wish-that-comes-too-late", "training/run/launch.py",
        "if job.failures:  # what", "if not job.failures:  # what",
        "who is asked to stop while the ranks of a failure are ended starts others and trains on",
        ("tests/training/test_launch.py::test_who_is_asked_to_stop_as_a_rank_was_just_lost_says_so",),
    ),
    Mutant(
        "waits-for-who-is-stopped", "training/run/fork_server.py",
        "    _wake()\n    process.join()", "    process.join()",
        "a launcher waits for ever, and hears no signal, for the end of ranks whose fork server is stopped",
        ("tests/training/test_launch.py::test_a_fork_server_that_is_stopped_holds_nobody_up",),
    ),
    Mutant(
        "forks-from-who-is-stopped", "training/run/fork_server.py",
        "    _wake()\n    context", "    context",
        "a launcher waits for ever for ranks of a fork server that is stopped",
        ("tests/training/test_launch.py::test_a_fork_server_that_is_stopped_holds_nobody_up",),
    ),
    Mutant(
        "another-rank-another-error", "resilience/policy.py",
        're.sub(r"\\d[\\d.,]*", "0", self.words)', "self.words",
        "what runs out of memory again is another error, as it had some bytes more",
        ("tests/resilience/test_policy.py::test_an_error_that_comes_again_at_the_same_step_stops_it",),
    ),
    Mutant(
        "judged-anew", "training/objective/step_guard.py",
        "deque(before.losses, maxlen=plan.window)", "deque(maxlen=plan.window)",
        "after a lost rank nothing has diverged until there are as many losses again",
        ("tests/training/test_guard.py::test_who_goes_on_judges_as_who_was_never_interrupted",),
    ),
    Mutant(
        "stopped-and-begun-again", "resilience/supervise.py",
        "                if self._must_stop():\n", "                if False:\n",
        "who is asked to stop between two attempts begins another",
        (_RUN + "who_is_asked_to_stop_between_two_attempts_begins_none",),
    ),
    Mutant(
        "the-clock-alone", "resilience/tiers.py",
        "theirs.step > ours.step and theirs.created >= ours.created", "theirs.created > ours.created",
        "after the clock was set back the newest state, in memory, is older than the disk's, and removed",
        ("tests/resilience/test_tiers.py::test_a_clock_that_is_set_back_makes_nothing_older",),
    ),
    Mutant(
        "memory-before-all", "resilience/tiers.py",
        "(far if later else near).pop()", "near.pop()",
        "what was left in memory is newer than what was trained elsewhere since",
        ("tests/resilience/test_tiers.py::test_what_was_trained_elsewhere_since_is_newer_than_what_was_left_in_memory",),
    ),
    Mutant(
        "counts-forgotten", "training/state/restore.py",
        'state.experts = partial(dict, _table(manifest, "experts"))', "pass",
        "a count of experts lacks the steps before a rank was lost",
        ("tests/training/test_checkpoints.py::test_what_was_counted_of_experts_and_not_told_yet_goes_along",),
    ),
    Mutant(
        "half-a-line-stays", "training/observe/events.py",
        "if end and ", "if False and ",
        "a line is written behind half of one, and the file is read no more",
        ("tests/training/test_runs.py::test_half_a_line_in_the_midst_is_gone_with_the_next",),
    ),
    Mutant(
        "older-on-the-disk-will-do", "resilience/rescue.py",
        "if isinstance(error, OSError):", "if False:",
        "what a full disk did not take is removed, as an older checkpoint is on the disk",
        ("tests/resilience/test_tiers.py"
         "::test_what_a_full_disk_does_not_take_stays_in_memory_beside_an_older_checkpoint",),
    ),
    Mutant(
        "restarts-for-a-mistake", "training/run/environment.py",
        'if count != most and not (mistake and count != "0") else code',
        'if count != most and mistake and count != "0" else code',
        "torchrun starts what cannot begin a thousand times", (_SPARED,),
    ),
    Mutant(
        "room-of-all-nodes-together", "resilience/fewer.py",
        "most = count * min(some) if some", "most = sum(some) if some",
        "a node gets more ranks than it has devices", (_ROOM,),
    ),
    Mutant(
        "fewer-ranks-without-devices", "resilience/fewer.py",
        "most = plan.ranks - 1 if most is None else min(most, plan.ranks - 1)", "most = plan.ranks - 1",
        "the run goes on with more ranks than there are devices for, and fails", (_ROOM,),
    ),
    Mutant(
        "launcher-for-each-device", "planner/platforms/jobs.py",
        "return 1 if words(self)[: len(LAUNCHER)] == LAUNCHER else self.devices", "return self.devices",
        "a node has as many launchers as devices, which all refuse", (_LAUNCHED,),
    ),
    Mutant(
        "shell-before-torchrun", "planner/platforms/targets.py",
        'f"exec torchrun', 'f"torchrun',
        "a pod that is to end waits for a shell that has not heard it, and is killed", (_POD,),
    ),
    Mutant(
        "queued-again-after-a-cancel", "planner/platforms/targets.py",
        'if [ "$over" = yes ]; then', 'if [ "$code" != 0 ]; then',
        "a job that somebody cancelled comes back", (_QUEUED,),
    ),
    Mutant(
        "memory-that-is-not-there", "resilience/tiers.py",
        "        if memory is not None:\n            raise", "        if False:\n            raise",
        "a run has no snapshots, for a reason that is not the one it says", (_NO_MEMORY,),
    ),
    Mutant(
        "done-by-another-summary", "training/run/run_folder.py",
        'return summary if Path(summary["checkpoint"]).name == checkpoint.name else None', "return summary",
        "a run that went on with more steps and was killed before its proofs is said to be done", (_ENDED,),
    ),
    Mutant(
        "out-of-patience-for-good", "training/start.py",
        "if not 0 < plan.run.patience <= patience:", "if not patience:",
        "a run whose patience is raised is said to be done", (_PATIENCE,),
    ),
    Mutant(
        "done-and-never-sent", "training/start.py",
        "        send(CheckpointSaved(", "        str(CheckpointSaved(",
        "the last checkpoint of a run never gets to its store, however often it is started again", (_ENDED,),
    ),
    Mutant(
        "an-older-one-for-a-busy-store", "training/run/uploads.py",
        "    except StoreError:", "    except ZeroDivisionError:",
        "a store that fails for a moment costs the steps since the checkpoint before",
        (_STORE + "a_store_that_fails_for_a_while_costs_no_steps",),
    ),
    Mutant(
        "lost-objects-in-silence", "checkpoint/tiers/remote.py",
        "if marker.serial > last and (lacking", "if marker.serial < last and (lacking",
        "a run goes on from an older checkpoint of its store, and nobody is told",
        (_STORE + "what_the_newest_has_lost_is_told",),
    ),
    Mutant(
        "an-older-one-for-a-damaged-block", "training/run/resume.py",
        "if not findings or mended(store, path, tell):", "if not findings:",
        "a block that has rotted on the disk costs the steps since the checkpoint before, though the store has it",
        (_MENDED,),
    ),
    Mutant(
        "all-of-it-for-a-damaged-block", "checkpoint/tiers/remote.py",
        "if checksum(data[block]) != stored.sums[block]]", "if block >= 0]",
        "a checkpoint of terabytes is fetched for one block; and one that store and disk have together is lost",
        (_MENDED,),
    ),
    Mutant(
        "rotten-here-and-in-memory", "resilience/supervise.py",
        "self.bad.add(str(resume) if self.nodes is None else id_of(resume))",
        "self.bad.update(str(one) for one in self.tiers.newest_first() if id_of(one) == id_of(resume))",
        "where a snapshot has rotted in memory its sound copy on the disk is passed over, too",
        (_RUN + "a_rotten_snapshot_is_left_for_its_copy_or_an_older_one",),
    ),
    Mutant(
        "an-error-without-its-stack", "resilience/seen.py",
        '"details": details}', '"details": ""}',
        "of an error that does not come again nobody learns where it came from",
        (_RUN + "the_stack_of_an_error_that_did_not_come_again_is_kept",),
    ),
    Mutant(
        "an-error-that-no-terminal-takes", "training/run/signals.py",
        "    words = printable(", "    words = str(",
        "a file whose name is no text ends the launcher with a traceback of its own", (_DIES,),
    ),
    Mutant(
        "a-stack-that-no-file-takes", "training/run/launch.py",
        'details.encode(errors="backslashreplace").decode()', "details",
        "a file whose name is no text ends the run with a traceback of its own", (_DIES,),
    ),
    Mutant(
        "begun-anew-over-what-is-torn", "training/run/resume.py",
        "if not committed(folder) and not torn(folder) and not", "if not committed(folder) and not",
        "a run whose checkpoints have lost files begins with step 1", (_TORN,),
    ),
    Mutant(
        "torn-in-silence", "checkpoint/store/retention.py",
        "for path in there if (why := _torn(path))]", "for path in there if (why := str(path))]",
        "a resume passes a torn checkpoint over and does not say why", (_TORN,),
    ),
    Mutant(
        "another-runs-memory", "resilience/rescue.py",
        "    if job.resume is None:", "    if job.resume is not None:",
        "a run that begins anew at a path goes on from what a killed launcher of another has left in memory",
        ("tests/resilience/test_tiers.py::test_a_run_that_begins_takes_nothing_over_from_one_at_the_same_path",),
    ),
    Mutant(
        "another-runs-memory-under-torchrun", "training/start.py",
        '        on_one(meeting, partial(before, job), per="node")\n', "",
        "the same of ranks that torchrun has started",
        ("tests/training/test_command.py::test_ranks_that_torchrun_starts",),
    ),
    Mutant(
        "a-torn-copy-in-the-way", "checkpoint/tiers/promote.py",
        "commits.begin(target, marker.id, anew=True)", "commits.begin(target, marker.id)",
        "a run whose launcher was killed as it copied a snapshot to the disk cannot be gone on with", (_KILLED_COPY,),
    ),
    Mutant(
        "torn-copies-stay", "checkpoint/tiers/promote.py",
        "    commits.sweep(folder, IDLE)\n", "",
        "what launchers that were killed had copied stays in the folder of a run for ever", (_KILLED_COPY,),
    ),
    Mutant(
        "due-but-gone", "resilience/supervise.py",
        "if self.promoter.offer(event, disk=disk) and disk:", "if self.promoter.offer(event, disk=disk) or disk:",
        "where the snapshot that is due is gone none goes to the disk until the next is due",
        (_RUN + "where_the_one_that_is_due_is_gone_the_next_goes_to_the_disk",),
    ),
    Mutant(
        "the-base-again-at-the-end", "checkpoint/saving/save.py",
        "earlier: Earlier = commits.newest_files(partial.parent) if frozen else (partial, {})",
        "earlier: Earlier = (partial, {})",
        "the last checkpoint of a run has a frozen base in full", (_SHARED + "one_that_waits_shares_it_too",),
    ),
    Mutant(
        "alike-but-for-the-first-block", "checkpoint/tiers/promote.py",
        "of_other != first and checksum(of_other) == known.sums[0]", "of_other != first",
        "of a base that changed in its first block the one before is taken", (_SHARED + _OTHER_RANKS,),
    ),
    Mutant(
        "silent-about-the-store", "training/run/uploads.py",
        "        if self._thread.is_alive():\n", "        if not self._thread.is_alive():\n",
        "the end of a run waits for a store that hangs without a word", (_STORE + _HANGS,),
    ),
    Mutant(
        "as-long-as-it-takes", "training/run/uploads.py",
        " or (self._closed and time.monotonic() - begun > PATIENCE)", "",
        "the end of a run tries a store that hangs again and again", (_STORE + _HANGS,),
    ),
    Mutant(
        "no-matter-who-killed-it", "training/run/launch.py",
        "death(process.exitcode, memory=memory_kills() > self.kills)", "death(process.exitcode)",
        "a rank that the kernel ended as memory ran out is told as one that was killed",
        ("tests/training/test_launch.py::test_a_rank_that_is_killed_as_memory_ran_out_is_told_from_others",),
    ),
    Mutant(
        "put-off-by-the-first", "training/state/checkpointer.py",
        "return min(found, 2 ** len(self._costs)) if len(self._costs) < LAST else found", "return found",
        "the first snapshot, which costs more, puts the next one off for hundreds of steps",
        ("tests/training/test_pace.py::test_a_slow_first_save_does_not_put_the_next_one_off_for_long",),
    ),
    Mutant(
        "steps-of-no-state", "training/observe/events.py",
        "kept = [line for line in lines if not _step_of(line) > step]", "kept = lines",
        "a run that goes on keeps the lines of steps that its state has not done",
        ("tests/training/test_runs.py::test_what_was_done_after_the_checkpoint_that_is_gone_on_from_is_no_step_of_the_run",),
    ),
    Mutant(
        "boards-begin-twice", "training/observe/boards.py",
        "self._after + 1 if self._after or any(self._folder.iterdir()) else None", "None",
        "a board shows steps of a run that began anew, and of what came after its checkpoint", (_BOARD,),
    ),
    Mutant(
        "written-once-more", "training/run/rank.py",
        "if not (on_disk and state.progress == before):", "if True:",
        "a run of which no step is left writes its last checkpoint a second time", (_CUT,),
    ),
    Mutant(
        "due-at-once", "resilience/supervise.py",
        "            self.seen.promoted = read_marker(resume).step\n", "            self.seen.promoted = 0\n",
        "a run that goes on under a launcher saves at its first snapshot, and pushes an older checkpoint out",
        (_GOES_ON + "a_run_that_goes_on_saves_when_it_is_due_and_not_at_once",),
    ),
    Mutant(
        "memory-is-a-device", "planner/cost/goodput.py",
        'and row["cause"] == "killed"', 'and row["cause"] != "raised"',
        "ranks that the kernel ended as memory ran out, and hangs, count as failures of devices",
        ("tests/planner/test_failures.py::test_of_a_run_that_was_started_again_all_hours_count",),
    ),
    Mutant(
        "memory-is-no-cause", "training/run/signals.py",
        'as memory ran out: {LESS_MEMORY}", "memory"', 'as memory ran out: {LESS_MEMORY}", "killed"',
        "a rank that the kernel ended as memory ran out is written down as a device that failed",
        (_RUN + "without_snapshots_it_goes_on_from_the_disk",),
    ),
    Mutant(
        "done-again-as-memory-fills", "resilience/supervise.py",
        "                    return ENOUGH\n", "                    raise _SnapshotsEnd(self.full)\n",
        "where memory takes no snapshot, all steps since the last one are done again",
        (_RUN + "where_memory_is_full_checkpoints_go_to_the_disk",),
    ),
    Mutant(
        "older-after-newer", "resilience/supervise.py",
        "                    self.promoter.close()  # so", "                    pass  # so",
        "an older snapshot comes to the disk after the state of the last step, and is taken for the newest",
        (_RUN + "what_is_on_its_way_to_the_disk_as_memory_fills_is_waited_for",),
    ),
    Mutant(
        "no-room-no-word", "checkpoint/saving/writer_process.py",
        'reason if tries < 20 else ""', "reason",
        "the first writer waits ten minutes for one whose disk has no room to say that it is full",
        ("tests/checkpoint/test_writer.py::test_the_others_hear_of_one_that_has_no_room_to_say_why",),
    ),
    Mutant(
        "waits-on-a-read-only-disk", "checkpoint/saving/writer_process.py",
        "            if self._leave_failure(partial, _reason(error)):\n",
        "            self._leave_failure(partial, _reason(error))\n            if True:\n",
        "the first writer waits ten minutes for words that a read-only disk does not take",
        ("tests/checkpoint/test_writer.py::test_a_first_that_can_leave_nothing_waits_for_nobody",),
    ),
)
