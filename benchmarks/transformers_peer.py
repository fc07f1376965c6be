"""transformers' generate() as benchmarks.peers calls it, told to draft as much as ours does."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from benchmarks import core
from serving.options import ROOT


class Result(NamedTuple):
    """One generation."""

    tokens: list[int]
    num_passes: int  # target forwards, the prompt's included
    prompt_ms: float  # until the first tokens came
    num_first: int  # how many those were: generate() may draft before it reads the prompt


class _Clock:
    """What generate() calls a streamer: is handed the prompt, then tokens as they come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


class Peer:
    """transformers' generate(), on models of its own."""

    def __init__(self, folder: str, dtype: str, device: Any, k: int, with_drafters: bool) -> None:
        def load(name: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()

        self.model, self.head, self.num_passes = load(folder), None, 0
        self.model.register_forward_pre_hook(self._count)
        smallest, largest = core.Options.prompt_lookup_min, core.Options.prompt_lookup_max
        assert smallest == 1, "prompt lookup goes down to suffixes of one token"
        lookup = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": largest}
        self.arguments: dict[str, dict[str, Any]] = {"greedy": {}, "ngram": lookup}
        if with_drafters:
            assistant = load(str(ROOT / "demo_models" / "draft"))
            own = assistant.generation_config
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = k, "constant"
            own.assistant_confidence_threshold = 0.0
            self.arguments["draft_model"] = {"assistant_model": assistant}
            self.head = MtpModel.from_pretrained(self.model)
            self.arguments["mtp"] = {"use_mtp": True}

    def _count(self, *_: Any) -> None:
        self.num_passes += 1

    @contextmanager
    def keeping_the_head(self) -> Iterator[None]:
        """generate() loads the MTP head anew at each call; within, it finds this one."""
        with mock.patch.object(MtpModel, "from_pretrained", lambda *_, **__: self.head):
            yield

    def generate(self, method: str, prompt: list[int], num_tokens: int) -> Result:
        """Up to `num_tokens` greedy tokens."""
        self.num_passes, clock, began = 0, _Clock(), time.perf_counter()
        ids = torch.tensor([prompt], device=self.model.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            **self.arguments[method],
        )
        prompt_ms = (clock.times[1] - began) * 1e3
        return Result(
            output[0, len(prompt) :].tolist(), self.num_passes, prompt_ms, clock.counts[1]
        )
