"""What becomes of every field that clients of OpenAI, vLLM, SGLang and llama.cpp may send.

    honoured   parsing.py reads it, or the dialect of a route does
    harmless   it cannot change a text, and is taken silently
    refused    it would change a text or an answer: a 400 says what to use instead, unless the field
               has the value that changes nothing

Any other field is unknown, and a warning names it.
"""

import re
from typing import Any

from messages import Json, RequestError

# Other names of fields -> ours.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "no_stop_trim": "include_stop_str_in_output",
}
LIMITS = "max_tokens", "max_completion_tokens", "n_predict"

# Who asks, where and when it is computed, and how an answer is cut into events. Then what sets up a
# method that is off, or media that are refused.
HARMLESS = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention parallel_tool_calls reasoning_effort verbosity "
    "request_id rid priority session_id conversation_id cache_salt extra_key custom_labels "
    "routing_key data_parallel_rank routed_dp_rank disagg_prefill_dp_rank decode_tp_size "
    "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key http_worker_ipc "
    "external_trace_header received_time log_metrics kv_hints "
    "cache_prompt id_slot n_keep n_discard n_cache_reuse backend_sampling "
    "stream_interval stream_reasoning sse_ping_interval timings_per_token verbose "
    "spaces_between_special_tokens return_flat_raw_top_logprobs_b64 "
    "routed_experts_prompt_start routed_experts_start_len "
    "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold adaptive_decay dry_base "
    "dry_allowed_length dry_penalty_last_n dry_sequence_breakers grammar_type preserved_tokens "
    "reasoning_control reasoning_budget_message reasoning_budget_start_tag "
    "reasoning_budget_end_tag reasoning_budget_end_tags "
    "speculative.type speculative.n_max speculative.n_min speculative.p_min "
    "speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_min_hits "
    "media_io_kwargs mm_processor_kwargs mm_payload return_mm_kwargs mm_hashes mm_content_hashes "
    "images_config video_config max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
    "video_max_dynamic_patch use_audio_in_video need_wait_for_mm_inputs num_items_assigned "
    "encoder_urls".split()
)
_CUTS = "temperature, typical_p, top_k, top_p and min_p cut"
_NO_BUDGET = "reasoning has no limit of its own: max_tokens counts it"
_IN_CHATS = "it goes with messages, in /v1/chat/completions"
_BY_LOGPROBS = "logprobs tells of the likeliest tokens, by raw logits"
_TEXT_ALONE = "this server reads and writes text alone"
# The values that change nothing, the fields that have them, and what to know of others.
_GROUPS: tuple[tuple[tuple[Any, ...], str, str], ...] = (
    ((False,), "echo", "it goes with /v1/completions"),
    (("",), "suffix", "it goes with /v1/completions and /v1/fim/completions"),
    ((), "best_of", "it must equal n, as no choice is left out"),
    ((False,), "use_beam_search", "n gives several texts"),
    ((1,), "length_penalty beam_width", "it goes with use_beam_search"),
    ((), "messages", "it goes with /v1/chat/completions, and with /generate as prompt"),
    (([],), "tools", _IN_CHATS),
    (("none", "auto"), "tool_choice", _IN_CHATS),
    ((True,), "add_generation_prompt parse_tool_calls", _IN_CHATS),
    ((False,), "continue_final_message", _IN_CHATS),
    (({},), "chat_template_kwargs", _IN_CHATS),
    ((0,), "top_logprobs", f"{_IN_CHATS}; elsewhere logprobs is a number"),
    (([],), "functions", "tools are"),
    (("none", "auto"), "function_call", "tool_choice is"),
    ((["text"],), "modalities", _TEXT_ALONE),
    (([],), "image_data video_data audio_data multimodal_data", _TEXT_ALONE),
    ((), "audio web_search_options moderation prompt_embeds input_embeds", _TEXT_ALONE),
    ((), "positional_embed_overrides", _TEXT_ALONE),
    (([],), "documents", "write them into messages"),
    (("",), "chat_template generation_prompt chat_parser chat_format", "the template is the "
     "model's, with chat_template_kwargs"),
    ((), "thinking reasoning task", "chat_template_kwargs sets a template's variables"),
    ((-1,), "thinking_token_budget max_thinking_tokens thinking_budget_tokens "
     "reasoning_budget_tokens", _NO_BUDGET),
    ((True,), "include_reasoning separate_reasoning", "a chat's reasoning is reasoning_content"),
    (("auto", "deepseek"), "reasoning_format", "a chat's reasoning is reasoning_content"),
    ((False,), "require_reasoning", "the chat template decides"),
    (("", []), "text input_ids", "prompt takes texts and token ids"),
    (("", []), "input_prefix input_suffix input_extra", "they go with /infill"),
    (({},), "sampling_params", "its fields stand beside prompt"),
    ((), "max_new_tokens", "its name here is max_tokens"),
    ((), "min_new_tokens", "its name here is min_tokens"),
    ((), "sampling_seed", "its name here is seed"),
    ((True,), "add_special_tokens", "send token ids in place of a text"),
    ((True,), "skip_special_tokens", "token_ids has them"),
    (("", []), "stop_regex stop_sequences", "stop takes texts"),
    (({},), "session_params", "send the whole text: what was read before is cached"),
    (("", []), "lora lora_id lora_path", "the model has no adapters"),
    (({},), "custom_params vllm_xargs", "the server has no extensions"),
    (("",), "custom_logit_processor", "logit_bias, bad_words and allowed_token_ids are"),
    ((False, {}, {"enabled": False}), "watermark watermarking", "texts have no watermark"),
    (({},), "kv_transfer_params ec_transfer_params", "the server reads prompts itself"),
    ((), "repetition_detection", "repetition_penalty and frequency_penalty are"),
    ((), "structural_tag", "response_format, regex and grammar are"),
    ((False,), "grammar_lazy", "a grammar holds from the first token"),
    (([],), "grammar_triggers", "a grammar holds from the first token"),
    ((0,), "mirostat dynatemp_range xtc_probability dry_multiplier", _CUTS),
    ((-1, 0), "top_n_sigma adaptive_target", _CUTS),
    ((), "samplers", f"the order is fixed: {_CUTS}"),
    ((0, 1), "min_keep", f"at least one token stays: {_CUTS}"),
    ((0,), "n_indent", "regex and grammar are"),
    ((-1, 0), "t_max_predict_ms t_max_prompt_ms", "max_tokens is, and --request-timeout"),
    ((False,), "return_logprob return_text_in_logprobs return_entropy", _BY_LOGPROBS),
    ((False,), "return_sampling_mask post_sampling_probs", _BY_LOGPROBS),
    ((False,), "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs", _BY_LOGPROBS),
    ((False, 0), "top_logprobs_num", _BY_LOGPROBS),
    ((-1,), "logprob_start_len", "log-probabilities are of the new text"),
    (([],), "logprob_token_ids token_ids_logprob", _BY_LOGPROBS),
    ((), "sampling_logprobs_mode", _BY_LOGPROBS),
    ((False,), "return_prompt_token_ids return_tokens return_input_ids_in_sglext "
     "return_output_ids_in_sglext", "return_token_ids is"),
    ((False,), "return_cached_tokens_details return_spec_tokens_details return_meta_info", "usage "
     "and metrics are in every answer"),
    ((False,), "return_hidden_states return_routed_experts return_indexer_topk", "the model's "
     "insides are not sent"),
    ((False,), "return_prompt_text return_token_offsets return_weight_versions return_bytes",
     "the answer is text, and with return_token_ids token ids"),
    ((False,), "return_progress", "a stream has comments until the prompt is read"),
    (([],), "response_fields", "answers are whole"),
    ((False,), "background", "an answer comes in the same connection"),
    ((False,), "no_logs", "the log has prompts with --log-prompts only"),
    (([],), "multi_item_delimiter_indices token_indices_to_pool", "prompts are continued"),
)  # fmt: skip
REFUSED = {name: (values, why) for values, names, why in _GROUPS for name in names.split()}


def wrong(path: str, what: str) -> RequestError:
    """The error for what stands at a path, which is the message's first word."""
    return RequestError(f"{path} {what}", param=re.match(r"\w+", path)[0])


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are equal; in JSON true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def check_supported(body: Json) -> None:
    """Raises RequestError for the first field that is refused; null counts as absent."""
    for name, value in body.items():
        if value is None or name not in REFUSED:
            continue
        neutral, why = REFUSED[name]
        if name == "best_of":
            neutral = (body.get("n") or 1,)
        if not any(_is_same(value, each) for each in neutral):
            raise RequestError(f"{name} is not supported here: {why}", param=name)


def check_dialect(body: Json) -> None:
    """Raises RequestError for the first field that a dialect other than ours refuses.

    A dialect takes the fields that it reads itself before.
    """
    if body.pop("chat", None) not in (None, False):
        raise wrong("chat", "is a field of /generate: /v1/chat/completions takes messages")
    check_supported(body)


def with_own_names(fields: Json) -> Json:
    """The fields, those with other names under ours. Raises RequestError where both were sent."""
    renamed = dict(fields)
    for other, name in OTHER_NAMES.items():
        if other in renamed:
            if renamed.get(name, renamed[other]) != renamed[other]:
                raise RequestError(f"{other} is another name of {name}: send one", param=other)
            renamed[name] = renamed.pop(other)
    return renamed
