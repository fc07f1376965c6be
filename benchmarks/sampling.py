"""transformers' own processors: an oracle for tests/test_sampling.py."""

from transformers.generation import logits_process

from messages import Sampling


def processors(sampling: Sampling) -> logits_process.LogitsProcessorList:
    """What transformers' generate() applies for a sampling that is not greedy, in its order."""
    chosen = logits_process.LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chosen.append(logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chosen.append(logits_process.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        chosen.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chosen.append(logits_process.MinPLogitsWarper(sampling.min_p))
    return chosen
