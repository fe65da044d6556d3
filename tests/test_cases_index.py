"""Which tests cover which case of real users' failures. A test's docstring names its case.

Not here: structured output (E), which is not offered; HTTP and the command line (J and parts of B to F, I, K); settings
per request (K8); devices and quantised models (L, but for a draft that overflows, encoder-decoder models and inputs
that are no ids); most of speed (M); training (N); most requests as checks (O).

T-A1
    test_cases_a::test_greedy_text_is_that_of_transformers_with_every_way_of_drafting
    test_cases_a::test_greedy_text_is_that_of_transformers_for_every_family
    test_cases_drafters::test_a_broken_drafter_costs_its_drafts_and_nothing_else
    test_cases_drafters::test_a_drafter_that_fails_for_one_row_serves_the_others
    test_cases_drafters::test_a_drafter_of_odd_types_does_no_harm
    test_cases_drafters::test_duplicate_siblings_are_walked_once
    test_cases_drafters::test_a_drafter_that_is_always_wrong_is_always_refused
    test_cases_drafters::test_a_wrong_draft_whose_keys_are_no_numbers_is_refused_like_any_other
    test_drafters::test_every_drafter_keeps_the_contract
    test_fewrows::test_texts_of_the_twin_are_those_of_the_model
    test_planner::test_no_plan_changes_a_text
    test_real::test_every_drafter_gives_the_plain_text
T-A2
    test_cases_a::test_trees_of_any_width_and_depth_do_not_change_the_text
    test_cases_a::test_random_trees_on_a_windowed_model_do_not_change_the_text
T-A6
    test_cases_a::test_bfloat16_text_differs_from_transformers_only_at_near_ties
T-A8
    test_cases_a::test_the_cache_equals_a_fresh_forward_after_every_round_of_trees
    test_cases_a::test_the_draft_models_cache_equals_a_fresh_forward_in_every_round
    test_cases_a::test_the_draft_models_cache_equals_the_text_after_other_rows_have_left
    test_cases_a::test_the_cache_equals_a_fresh_forward_while_rows_join_and_leave
    test_cases_a::test_recurrent_states_equal_a_fresh_forward_after_every_round
T-A10
    test_cases_a::test_a_call_repeats_in_the_same_process_and_in_another
T-B1
    test_cases_b::test_samples_follow_the_targets_law_with_a_noisy_draft_model
    test_cases_b::test_samples_follow_the_law_of_penalties_and_truncation
    test_cases_b::test_samples_follow_the_targets_law_with_trees_that_are_drafted_without_chance
    test_cases_b::test_drafts_in_different_branches_are_independent_under_the_ratio_test
    test_dropin_sampling::test_several_texts_of_a_prompt_follow_the_models_law
T-B4
    test_cases_b::test_samples_follow_the_targets_law_with_an_unrelated_draft_model
T-B7
    test_cases_b::test_the_text_of_a_seed_is_the_same_for_every_way_of_drafting
    test_cases_b::test_the_text_of_a_seed_is_the_same_for_every_kind_of_model
    test_cases_b::test_the_text_of_a_seed_does_not_depend_on_the_other_rows
    test_cases_b::test_a_seed_repeats_its_text_and_other_seeds_give_others
    test_cases_b::test_any_whole_number_is_a_seed
    test_cases_drafters::test_a_broken_drafter_does_not_change_a_sampled_text
    test_dropin_refusals::test_a_seed_that_is_no_whole_number_is_refused
    test_dropin_refusals::test_a_seed_of_an_odd_type_is_refused
    test_dropin_refusals::test_seeds_that_are_not_one_per_row_are_refused
    test_dropin_sampling::test_a_sampled_token_is_chosen_from_scores_that_transformers_processors_give
    test_dropin_sampling::test_the_text_of_a_seed_is_the_same_for_every_drafter_batch_and_padding
    test_dropin_sampling::test_several_texts_of_a_prompt_have_the_seeds_that_follow
    test_dropin_sampling::test_a_seed_repeats_its_text_and_other_seeds_give_others
    test_dropin_sampling::test_torchs_seed_repeats_texts_that_have_no_seed_of_their_own
    test_dropin_sampling::test_only_sampling_without_a_seed_asks_torchs_generator
    test_planner::test_no_plan_changes_a_text
    test_real::test_every_drafter_gives_the_plain_text
T-B8
    test_cases_b::test_temperature_zero_and_next_to_zero_are_greedy
    test_cases_b::test_a_temperature_that_is_none_is_refused
    test_dropin_sampling::test_a_temperature_of_zero_is_the_error_that_transformers_has_for_it
T-B11
    test_cases_b::test_copies_of_a_prompt_are_independent_samples
    test_dropin_sampling::test_several_texts_of_a_prompt_have_the_seeds_that_follow
    test_dropin_sampling::test_several_texts_of_a_prompt_follow_the_models_law
T-C1
    test_cases_c::test_the_text_ends_at_the_models_end_token_in_the_middle_of_a_draft
    test_cases_c::test_every_kind_of_model_ends_at_its_end_token
    test_cases_c::test_the_earliest_of_several_end_tokens_ends_the_text
    test_cases_c::test_ignoring_the_end_token_goes_on_behind_it
    test_cases_c::test_an_end_token_at_the_last_wanted_place_is_a_stop
    test_cases_c::test_the_end_token_is_found_where_the_model_states_it
    test_cases_c::test_a_drafter_that_only_drafts_ends_does_not_end_the_text
    test_dropin_batches::test_the_text_ends_at_its_end_token_in_the_middle_of_a_draft
T-C3
    test_cases_c::test_max_new_tokens_is_exact
    test_cases_c::test_max_new_tokens_is_exact_for_every_kind_of_model
    test_cases_drafters::test_the_budget_says_what_the_model_takes_and_the_text_still_wants
    test_dropin_arguments::test_greedy_text_under_an_argument_is_that_of_transformers
    test_dropin_batches::test_max_new_tokens_is_exact
    test_dropin_refusals::test_a_text_without_room_is_the_error_that_transformers_has_for_it
T-C5
    test_cases_c::test_a_stop_string_ends_the_text_where_plain_decoding_ends_it
    test_cases_c::test_the_first_of_two_stop_strings_is_reported
    test_cases_c::test_an_end_token_before_the_stop_string_wins
    test_cases_c::test_stop_strings_without_a_tokenizer_are_refused
    test_dropin_arguments::test_stop_strings_end_the_text_where_transformers_ends_it
    test_dropin_arguments::test_a_criterion_of_the_users_is_asked_beside_stop_strings
    test_dropin_arguments::test_stop_strings_without_a_tokenizer_are_refused_before_the_first_token
T-C7
    test_cases_c::test_a_model_without_end_and_padding_tokens_decodes
T-C10
    test_cases_c::test_a_draft_length_that_makes_no_sense_is_refused
    test_cases_c::test_a_draft_length_of_zero_is_refused_with_the_way_to_plain_decoding
    test_cases_c::test_a_width_that_makes_no_sense_is_refused
    test_cases_c::test_a_setting_that_makes_no_sense_is_refused_by_its_name
    test_cases_c::test_ids_outside_the_vocabulary_are_refused
    test_cases_c::test_a_prompt_that_is_none_is_refused
    test_dropin_refusals::test_an_option_of_accelerate_that_makes_no_sense_is_refused
T-C12
    test_cases_c::test_min_new_tokens_holds_the_end_back_as_in_transformers
    test_cases_c::test_a_budget_beyond_any_memory_costs_nothing_before_it_is_used
    test_cases_c::test_the_context_ends_the_wishes_of_a_request_by_name
    test_dropin_arguments::test_greedy_text_under_an_argument_is_that_of_transformers
    test_dropin_batches::test_several_budgets_together_are_as_in_transformers
T-D1
    test_cases_d::test_the_repetition_penalty_is_that_of_transformers
    test_cases_d::test_a_processor_is_called_once_per_committed_token_with_the_exact_text
    test_cases_d::test_a_stateful_processor_gives_the_same_text_with_drafts
    test_cases_d::test_the_ratio_test_refuses_a_processor_that_may_have_a_state
    test_dropin_arguments::test_greedy_text_under_an_argument_is_that_of_transformers
    test_dropin_callbacks::test_a_processor_with_a_state_is_called_as_transformers_calls_it
    test_dropin_sampling::test_the_repetition_penalty_looks_at_the_text_and_not_at_the_padding
T-D2
    test_cases_d::test_a_forbidden_token_never_appears
    test_cases_d::test_a_forbidden_word_of_two_tokens_never_appears
    test_cases_d::test_a_processor_may_write_into_its_scores
    test_dropin_arguments::test_greedy_text_under_an_argument_is_that_of_transformers
    test_dropin_arguments::test_a_text_that_repeats_is_copied_from_itself
    test_dropin_callbacks::test_a_processor_may_write_into_its_scores
T-D3
    test_cases_d::test_presence_and_frequency_penalties_are_those_of_openai
    test_cases_d::test_a_bias_is_added_to_a_tokens_score
T-D7
    test_cases_d::test_the_end_is_held_back_and_drafting_goes_on
    test_dropin_callbacks::test_a_processor_by_hand_that_looks_at_rows_alone_lets_them_move_alone
    test_dropin_callbacks::test_a_processor_that_says_so_is_asked_about_each_row_alone
T-D9
    test_cases_d::test_a_processors_exception_reaches_the_caller_once
    test_cases_d::test_a_processors_exception_ends_its_own_row_only
    test_dropin_callbacks::test_an_exception_of_a_callback_reaches_the_caller_once
    test_dropin_sharing::test_an_exception_in_one_thread_does_not_reach_another
T-F1
    test_cases_f::test_logprobs_are_those_of_a_fresh_forward
    test_cases_f::test_logprobs_are_the_same_with_and_without_drafts
    test_cases_f::test_a_text_that_ends_early_has_no_logprobs_behind_its_end
    test_cases_f::test_logprobs_are_raw_when_a_processor_writes_into_its_scores
    test_cases_f::test_logprobs_are_raw_under_penalties_and_temperature
    test_dropin_outputs::test_scores_and_logits_are_those_of_transformers
    test_dropin_outputs::test_transition_scores_are_computed_from_the_result
    test_dropin_sampling::test_a_sampled_token_is_chosen_from_scores_that_transformers_processors_give
T-F2
    test_cases_f::test_a_stream_has_the_same_logprobs
T-F4
    test_cases_f::test_logprobs_are_off_unless_asked_for
T-G1
    test_cases_g::test_embeddings_of_different_sizes_go_together
    test_cases_g::test_the_ratio_test_is_fed_with_whole_distributions
    test_cases_g::test_a_prompt_beyond_the_embedding_is_refused
T-G2
    test_cases_g::test_a_draft_tokenizer_with_three_other_entries_is_used_and_said
T-G3
    test_cases_g::test_an_unrelated_tokenizer_is_refused_before_the_first_pass
    test_cases_g::test_sizes_that_differ_need_both_tokenizers
    test_drafters::test_a_draft_model_of_an_unrelated_tokenizer
T-G6
    test_cases_g::test_tokens_that_were_added_to_the_target_only_do_not_matter
    test_cases_g::test_a_draft_without_an_embedding_for_a_token_drafts_on
T-H1
    test_cases_h::test_a_draft_model_with_fewer_positions_drafts_as_far_as_it_can
    test_cases_h::test_rows_beyond_the_draft_models_positions_go_on_beside_others
T-H3
    test_cases_h::test_the_last_positions_can_be_used_to_the_end
    test_dropin_refusals::test_a_text_may_reach_the_last_position_and_not_pass_it
T-H5
    test_cases_h::test_texts_that_grow_over_the_window_are_those_of_plain_decoding
    test_cases_h::test_a_prompt_of_3000_tokens_is_read_in_chunks_without_its_scores
    test_cases_h::test_a_long_prompt_joins_rows_that_are_being_decoded
    test_cases_h::test_every_kind_of_model_reads_its_prompt_in_chunks
T-H7
    test_cases_drafters::test_branches_for_a_model_that_takes_chains_only_are_thrown_away
    test_cases_h::test_a_model_whose_state_cannot_be_checked_in_one_pass_is_refused
    test_cases_h::test_models_with_states_give_the_plain_text
    test_cases_h::test_a_draft_model_that_is_the_target_is_never_refused
    test_cases_h::test_models_that_are_no_decoders_are_refused
    test_dropin_outputs::test_models_with_recurrent_state_take_no_cache
    test_dropin_outputs::test_models_with_recurrent_state_give_no_cache
T-I1
    test_cases_i::test_a_row_of_a_batch_is_what_it_is_alone
    test_cases_i::test_many_rows_of_many_lengths_are_decoded_together
    test_dropin_batches::test_a_row_of_a_batch_is_what_it_is_alone
    test_dropin_batches::test_padded_batches_of_other_families_are_those_of_transformers
    test_dropin_batches::test_many_rows_of_many_lengths_are_those_of_transformers
    test_dropin_batches::test_prompts_of_several_chunks_wait_for_each_other_where_rows_move_together
    test_dropin_refusals::test_a_mask_that_is_not_left_padding_is_refused
    test_real::test_a_padded_batch_is_that_of_transformers
T-I2
    test_cases_i::test_rows_that_end_at_very_different_times_keep_their_texts
    test_cases_i::test_rows_that_end_by_the_same_end_token_end_each_at_its_own_place
    test_cases_i::test_every_prompt_may_have_settings_of_its_own
    test_cases_i::test_rows_may_join_and_leave_between_any_two_steps
    test_cases_i::test_a_row_of_scores_that_are_no_numbers_harms_no_row_after_it
    test_cases_i::test_a_row_of_scores_that_are_no_numbers_harms_no_row_that_takes_its_place
    test_cases_i::test_a_row_of_scores_that_are_no_numbers_harms_no_row_beside_it
    test_cases_i::test_scores_that_are_no_numbers_are_an_error
    test_dropin_batches::test_rows_that_end_at_very_different_times_are_padded
    test_dropin_batches::test_rows_without_an_end_token_end_together
    test_dropin_callbacks::test_a_criterion_is_asked_once_per_committed_token_and_ends_rows_one_by_one
    test_dropin_callbacks::test_a_criterion_may_be_any_function
T-I6
    test_cases_i::test_a_stream_that_is_dropped_leaves_nothing_behind
T-I9
    test_cases_i::test_a_failure_of_the_model_reaches_every_caller_and_the_engine_goes_on
    test_cases_i::test_an_interrupt_in_the_middle_of_a_step_spoils_no_row
    test_cases_i::test_threads_on_one_engine_get_their_own_texts
    test_cases_i::test_an_exception_in_one_thread_does_not_reach_another
    test_dropin_sharing::test_threads_with_one_object_get_their_own_texts_and_counts
    test_dropin_sharing::test_an_exception_in_one_thread_does_not_reach_another
    test_dropin_sharing::test_a_callback_that_calls_back_gets_a_clear_error
    test_dropin_sharing::test_a_callback_may_use_the_model_and_other_objects
    test_dropin_streamers::test_a_stream_is_complete_while_others_decode_with_the_same_object
T-K1
    test_cases_k::test_forty_tokens_take_forty_over_k_plus_one_passes_of_the_target
    test_cases_k::test_a_draft_model_is_asked_once_per_drafted_token
    test_cases_k::test_a_drafter_object_of_any_name_is_the_one_that_drafts
    test_dropin_batches::test_forty_tokens_take_forty_over_k_plus_one_passes_of_the_target
T-K3
    test_cases_k::test_nothing_of_a_call_is_left_behind
    test_cases_k::test_a_refused_model_is_left_as_it_was
    test_cases_k::test_other_models_are_left_alone_while_a_tree_is_being_checked
    test_cases_k::test_the_models_own_generate_can_be_called_between_our_steps
    test_cases_k::test_two_engines_share_a_model
    test_dropin_sharing::test_nothing_of_a_call_is_left_behind
    test_dropin_sharing::test_what_a_call_is_given_is_left_as_it_was
    test_dropin_sharing::test_closing_lets_go_of_the_models
    test_drafters::test_drafting_for_itself_in_8_bits_leaves_the_model_as_it_is
    test_fewrows::test_the_twin_shares_all_parameters_and_the_model_is_untouched
T-K4
    test_cases_k::test_a_draft_model_that_is_the_target_is_said
    test_cases_k::test_an_option_that_cannot_be_honoured_is_refused_by_name
    test_dropin_refusals::test_an_argument_that_cannot_be_honoured_is_refused_by_name
    test_dropin_refusals::test_a_config_is_refused_as_arguments_are
    test_dropin_refusals::test_an_unknown_argument_is_the_error_that_transformers_has_for_it
    test_dropin_refusals::test_a_prompt_that_the_model_cannot_read_is_refused
    test_dropin_refusals::test_an_option_of_accelerate_that_makes_no_sense_is_refused
    test_dropin_refusals::test_two_draft_models_are_refused
    test_dropin_refusals::test_auto_takes_the_draft_model_where_there_is_one
    test_dropin_refusals::test_no_model_at_all_is_refused
T-K6
    test_cases_k::test_the_counts_of_a_request_add_up
    test_cases_k::test_the_counts_add_up_when_a_text_ends_inside_a_draft
    test_cases_k::test_rounds_without_drafts_are_counted_as_such
    test_cases_k::test_the_first_token_is_timed_apart_from_the_others
    test_dropin_batches::test_the_counts_of_each_row_add_up
    test_dropin_batches::test_the_passes_of_a_row_are_its_rounds
T-L2
    test_cases_drafters::test_a_draft_model_of_numbers_that_are_none_changes_nothing
T-L5
    test_dropin_refusals::test_encoder_decoder_models_are_refused_at_load
T-L8
    test_dropin_refusals::test_an_argument_that_cannot_be_honoured_is_refused_by_name
    test_dropin_refusals::test_an_input_that_drafts_cannot_carry_is_refused
    test_dropin_refusals::test_a_vision_language_model_writes_text_as_ever
    test_dropin_refusals::test_an_image_is_refused_by_its_name
T-M1
    test_planner::test_a_drafter_that_is_too_slow_is_switched_off_and_the_stats_say_so
T-M4
    test_real::test_a_copy_takes_a_third_of_the_passes
T-O1
    test_drafters::test_a_prediction_is_copied_and_does_not_change_the_text
"""

import importlib
import re
from pathlib import Path

HERE = Path(__file__).parent


def listed() -> dict[str, set[str]]:
    """Case -> the tests named under it in this file's docstring, as "module::test"."""
    found: dict[str, set[str]] = {}
    case = ""
    for line in (__doc__ or "").splitlines():
        if re.fullmatch(r"T-[A-Z]\d+", line):
            case = line
            assert case not in found, f"{case} is listed twice"
            found[case] = set()
        elif line.startswith("    "):
            found[case].add(line.strip())
    return found


def stated() -> dict[str, set[str]]:
    """Case -> the tests whose docstrings name it."""
    found: dict[str, set[str]] = {}
    more = [HERE / f"test_{name}.py" for name in ("drafters", "fewrows", "planner", "real")]
    for file in (*HERE.glob("test_cases_*.py"), *HERE.glob("test_dropin_*.py"), *more):
        module = importlib.import_module(file.stem)
        for name, test in vars(module).items():
            if name.startswith("test_") and callable(test) and test.__module__ == file.stem:
                for case in re.findall(r"T-[A-Z]\d+", test.__doc__ or ""):
                    found.setdefault(case, set()).add(f"{file.stem}::{name}")
    return found


def test_every_test_that_the_index_names_exists_and_names_its_case() -> None:
    """And the other way round: a test that covers a case is in the index."""
    assert listed() == stated()
    assert len(listed()) >= 30
