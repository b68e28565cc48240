"""Rows 1 to 61 of the reliability table: the tests that cover them, and what is not tested and why.

Probes are in reliability_probes.py. A row can be in several places: parts not covered by a test
elsewhere are probed, and parts covered by neither are listed as left out.
"""

from __future__ import annotations

ROWS = range(1, 62)

_BAD = "server/test_server_bad_requests.py"
_WIRE = "server/test_server_transport.py"
_PROCESSES = "server/test_server_processes.py"
_WORKERS = "server/test_server_workers.py"
_TOOLS = "server/test_server_tools.py"
_HERE = "server/test_server_reliability.py"
_STORM = "server/test_server_storm.py"
_SOAK = "e2e/test_soak.py::test_a_short_soak"
_TABLE = f"{_BAD}::test_bad_request"

ELSEWHERE: dict[int, tuple[str, ...]] = {
    **dict.fromkeys((*range(1, 6), *range(7, 15), 16, 17, 18, 19, 21, 29, 31, 32), (_TABLE,)),
    6: ("server/test_server_endpoints.py::test_control_characters_pass",),
    15: (f"{_BAD}::test_prompt_that_never_fits_the_blocks_is_refused_not_queued",),
    20: (_TABLE, f"{_BAD}::test_tiny_temperature_is_accepted"),
    22: (f"{_BAD}::test_control_tokens_in_content_are_text",),
    23: (_TABLE, "frontend/test_detokenizer.py::test_stop_of_a_split_character"),
    24: (
        "structured/test_grammars.py::test_a_wrong_grammar_is_refused_in_one_line",
        "structured/test_structured_outputs.py::test_what_is_refused",
    ),
    25: (
        "structured/test_grammars.py::test_a_costly_grammar_neither_hangs_nor_crashes_what_comes_after",
        "structured/test_grammars.py::test_a_grammar_that_takes_too_long_is_refused_at_once_for_a_while",
    ),
    26: (f"{_HERE}::test_only_so_many_grammars_are_kept",),
    27: (_TABLE, f"{_TOOLS}::test_wrong_fields_are_named"),
    28: (
        "frontend/test_tools.py::test_a_broken_call_stays_content",
        f"{_TOOLS}::test_what_is_no_call_stays_content",
    ),
    30: (f"{_HERE}::test_template_that_misbehaves",),
    33: (_TABLE, f"{_HERE}::test_two_requests_of_one_id_are_both_served"),
    34: (_TABLE, f"{_WIRE}::test_bodies"),
    36: (f"{_WIRE}::test_bodies", f"{_WIRE}::test_body_at_the_limit_is_taken"),
    37: (f"{_WIRE}::test_paths",),
    38: (f"{_WIRE}::test_broken_http_is_refused",),
    39: (
        f"{_WIRE}::test_foreign_host_is_refused_on_loopback",
        f"{_WIRE}::test_cross_site_request_is_refused",
    ),
    40: (f"{_WIRE}::test_wrong_keys", f"{_WIRE}::test_everything_else_needs_a_key"),
    41: (f"{_WIRE}::test_slow_head_is_cut", f"{_HERE}::test_a_crowd_of_silent_connections"),
    42: (f"{_HERE}::test_a_crowd_of_silent_connections",),
    43: (f"{_WIRE}::test_full_queue_is_429_with_retry_after",),
    44: (
        f"{_WIRE}::test_leaving_frees_everything_within_a_step_or_two",
        f"{_WIRE}::test_leaving_the_queue",
        f"{_WIRE}::test_survivors_are_not_disturbed",
        f"{_HERE}::test_a_crowd_that_leaves_at_once",
        f"{_PROCESSES}::test_a_storm_of_aborts_leaves_nothing",
    ),
    45: (
        f"{_WIRE}::test_stalled_reader_is_cut_and_its_request_aborted",
        f"{_PROCESSES}::test_a_reader_that_stalls_is_cut_and_holds_up_nobody",
    ),
    46: (
        f"{_WIRE}::test_connection_is_reused_and_requests_may_be_pipelined",
        f"{_HERE}::test_half_closed_connection_is_answered_or_closed",
    ),
    48: (
        f"{_HERE}::test_noise_on_the_wire",
        f"{_STORM}::test_random_fields_never_break_the_server",
    ),
    49: (
        f"{_BAD}::test_request_that_fails_in_the_engine_is_a_500",
        "engine/test_fault_bisection.py::test_one_of_eight_is_poisoned",
    ),
    50: (
        "engine/test_engine_core.py::test_a_step_that_fails_once_ends_no_request",
        "engine/test_fault_bisection.py::test_several_culprits_are_found_one_by_one",
        f"{_BAD}::test_dead_engine_is_503_everywhere",
    ),
    51: (
        "runner/test_model_runner.py::test_a_row_whose_logits_are_not_finite_gets_none",
        "engine/test_scheduler.py::test_a_row_without_a_token_fails_alone_and_its_blocks_are_not_shared",
    ),
    52: (
        f"{_PROCESSES}::test_a_killed_engine_is_an_error_at_once_and_then_another_engine",
        f"{_PROCESSES}::test_an_engine_that_dies_too_often_ends_the_server",
    ),
    53: (f"{_WORKERS}::test_the_engine_ends_with_a_killed_main_process",),
    54: (
        f"{_WIRE}::test_sigterm",
        f"{_PROCESSES}::test_the_engine_leaves_signals_to_the_main_process",
    ),
    55: (f"{_PROCESSES}::test_a_stopped_engine_recovers",),
    56: (f"{_PROCESSES}::test_a_hanging_engine_is_not_ready_and_its_stacks_are_written",),
    57: (
        "engine/test_engine_simulation.py::test_every_request_ends_as_it_does_alone",
        "parity/test_greedy_parity.py::test_preemption_and_prefix_cache",
    ),
    58: (_SOAK, "engine/test_engine_simulation.py::test_every_request_ends_as_it_does_alone"),
    59: (
        f"{_HERE}::test_memory_that_runs_out_in_a_step_ends_its_request_alone",
        "startup/test_sizing.py::test_an_explicit_context_must_fit_and_the_message_has_the_numbers",
    ),
    60: (
        f"{_HERE}::test_a_loop_that_stands_still_loses_nothing",
        f"{_HERE}::test_durations_are_taken_from_a_clock_that_never_jumps",
    ),
    61: (_SOAK,),
}

LEFT_OUT: dict[int, str] = {
    30: "a template that computes for ever: 400 after 5 s, but Python can't stop its thread; "
    "templates come with the model, whose owner is trusted",
    35: "there are no adapters to load; the probes see that nothing answers to their names",
    40: "timing over 10,000 tries: noise of the network stack hides it either way; digests of "
    "equal length are compared by hmac.compare_digest",
    42: "10,000 connections and EMFILE: needs limits of the machine that tests must not change; "
    "150 at a time show that none is kept",
    47: "requests have no deadline of their own; `timeout` is refused as an unknown field (row 31)",
    54: "SIGHUP and SIGPIPE: Python ignores the second, the first ends the process as any other",
    61: "eight hours: `python -m bench.soak --minutes 480`; the tests run one minute of it",
}
