"""GPT-Neo's local layers, made to see what the KV cache's mask says.

transformers places a local layer's window by counting: the last query belongs to the last key. In a
batch of texts of several lengths, and where keys are filled up to a whole block, the last key
belongs to no query at all, and a text would read with the wrong window. The mask that the KV cache
gives says where each query stands, so here the window is placed by that mask.

Other families place their windows by the mask already.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention


def follow_masks(model: nn.Module, num_keys: int) -> None:
    """Let a GPT-Neo attend by the caller's 4-D masks, of up to `num_keys` keys. In place."""
    for module in model.modules():
        if type(module) is not GPTNeoSelfAttention:
            continue
        # The mask in the module lets everything through from now on. A view: it takes no memory.
        module.bias = module.bias.new_ones(1, 1, 1, 1).expand(1, 1, num_keys, num_keys)
        if module.attention_type == "local":
            module.register_forward_pre_hook(_narrow, with_kwargs=True)


def _narrow(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Mask what is further back than the layer's window."""
    window = module.config.window_size
    mask: Tensor = options["attention_mask"]  # additive [B, 1, T, L], and causal
    if hasattr(mask, "place"):  # of runtime/kernels/modules.py, which takes the window
        return args, options | {"attention_mask": mask.place.mask(mask.dtype, window)}
    positions = (mask == 0).sum(-1, keepdim=True) - 1
    is_far = torch.arange(mask.shape[-1], device=mask.device) <= positions - window
    lowest = torch.finfo(mask.dtype).min
    return args, options | {"attention_mask": mask.masked_fill(is_far, lowest)}
