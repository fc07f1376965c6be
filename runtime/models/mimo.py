"""MiMo (XiaomiMiMo/MiMo-7B), which transformers lacks: a Qwen2 with a layer that drafts.

The published folders bring Python code, which a server does not run. It adds one thing to
Qwen2: the MTP layer, whose weights are `model.mtp_layers.0.*`. Here they are left in the file, and
drafters/mtp.py reads them.
"""

from typing import ClassVar

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    """Qwen2's, with `num_nextn_predict_layers`."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's forward."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^model\.mtp_layers\."]


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
