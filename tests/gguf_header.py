"""A second reading of a GGUF file's header, which shares no code and no table with the first one.

The comparison at a server's start runs both of its sides with one config, so it cannot see that the
config is wrong. Here rotations, attention scales, epsilons and Gemma's windows and caps are derived
from the header once more, by the formulas of llama.cpp (ggml/src/ggml-cpu/ops.cpp), and compared
with what the model's modules hold.
"""

from math import log, pi, sqrt

import numpy as np


def assert_as_the_header_says(file, model, length):
    """Compare a loaded model, for texts of so many tokens, with its file's header."""
    prefix = f"{file.metadata['general.architecture']}."
    facts = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    for name, tensor in file.tensors.items():
        if name.startswith("rope_f"):
            facts[name] = file.read(tensor).view(np.float32).astype(np.float64)
    for what, actual, expected in _numbers(prefix[:-1], facts, model, length):
        actual, expected = np.float64(actual), np.float64(expected)
        assert actual.shape == expected.shape, what
        assert np.allclose(actual, expected, rtol=1e-5, atol=0), what


def _numbers(architecture, facts, model, length):
    """(What it is, the modules' number or numbers, those that the header asks for)."""
    width, heads = facts["embedding_length"], int(np.max(facts["attention.head_count"]))
    head = facts.get("attention.key_length", width // heads)
    is_27b = (architecture, facts["block_count"]) in (("gemma2", 46), ("gemma3", 62))
    norms = [facts[k] for k in facts if k.startswith("attention.layer_norm_")]
    window = facts.get("attention.sliding_window", 4096 if architecture == "gemma2" else 0)
    usual = 2 if architecture == "gemma2" else 6  # one layer in so many has no window
    every = facts.get("attention.sliding_window_pattern", usual)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("Norm"):
            epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", norms[0]))
            yield f"the epsilon of {name}", epsilon, norms[0]
        if kind.endswith("Attention") and hasattr(module, "scaling"):
            scale = 1 / sqrt(width // heads if is_27b else head)
            yield f"the scale of {name}", module.scaling, scale
        if kind.startswith("Gemma") and kind.endswith("Attention"):
            layer = module.layer_idx
            has_one = every[layer] if np.ndim(every) else every == 0 or (layer + 1) % every > 0
            yield f"the window of {name}", module.sliding_window or 0, window if has_one else 0
            cap = facts.get("attn_logit_softcapping", 50 if architecture == "gemma2" else 0)
            yield f"the cap of {name}", module.attn_logit_softcapping or 0, cap
        for buffer, values in module.named_buffers(recurse=False):
            if buffer.endswith("inv_freq") and "original" not in buffer:
                is_local = architecture == "gemma3" and buffer.startswith("sliding")
                turns, size = _rotation(facts, head, is_local, length)
                scaling = getattr(module, buffer.replace("inv_freq", "attention_scaling"), 1.0)
                yield "the rotation", values.double().cpu().numpy(), turns
                yield "the size of the rotation", scaling, size


def _rotation(facts, head, is_local, length):
    """Radians a position for each pair of numbers, and the factor of cos and sin."""
    count = facts.get("rope.dimension_count", head)
    base = facts.get("rope.freq_base_swa" if is_local else "rope.freq_base", 10000.0)
    turns = base ** -(np.arange(0, count, 2) / count)
    if is_local:
        return turns, 1.0

    def get(key, usual):
        return facts.get(f"rope.scaling.{key}", usual)

    kind, size = get("type", "linear"), get("attn_factor", 1.0)
    factor = get("factor", facts.get("rope.scale_linear", 0)) or 1.0
    original = get("original_context_length", facts["context_length"])
    slow = turns if kind == "none" else turns / factor
    if kind == "yarn":
        rotations = get("yarn_beta_fast", 32.0), get("yarn_beta_slow", 1.0)
        low, high = (count * log(original / (n * 2 * pi)) / (2 * log(base)) for n in rotations)
        low, high = max(np.floor(low), 0), min(np.ceil(high), count - 1)
        ramp = np.clip((np.arange(count // 2) - low) / max(0.001, high - low), 0, 1)
        slow = ramp * slow + (1 - ramp) * turns
        size *= get("yarn_attn_factor", 1 + 0.1 * log(factor))
    which = "long" if length > original else "short"
    factors = facts.get("rope_freqs.weight", facts.get(f"rope_factors_{which}.weight", 1.0))
    return slow / factors, size
