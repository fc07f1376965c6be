"""The method in one function, `speculate`: it writes what plain decoding and the engine write.

    text = core.speculate(target, drafter, prompt, 40, eos_ids)

So what a reader learns from the core's first function is what the server does.
"""

import pytest
import speculative_decoding as core
from conftest import run

SAMPLINGS = {
    "greedy": core.Sampling(),
    "sampled": core.Sampling(temperature=0.8),
    "penalised": core.Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2),
}


def test_a_newcomer_calls_it_in_five_lines(demo_engine, prompts):
    target, prompt = demo_engine.target, prompts["easy_json"]
    drafter = core.drafters.load("ngram", core.Context(target, core.sample))
    text = core.speculate(target, drafter, prompt, 40, demo_engine.eos_ids)
    assert text == core.plain_decode(target, prompt, 40, demo_engine.eos_ids)


@pytest.mark.parametrize("way", SAMPLINGS)
def test_it_writes_what_plain_decoding_and_the_engine_write(demo_engine, prompts, way):
    """With each drafter; and the target runs less often than it writes tokens."""
    target, sampling, passes = demo_engine.target, SAMPLINGS[way], []
    for name, drafter in demo_engine.pool.drafters.items():
        for prompt in list(prompts.values())[:3]:
            fields = {"sampling": sampling, "seed": 7}
            text = core.speculate(target, drafter, prompt, 30, demo_engine.eos_ids, **fields)
            assert text == core.plain_decode(target, prompt, 30, demo_engine.eos_ids, **fields)
            sequence, _ = run(demo_engine, prompt, max_tokens=30, drafter=name, **fields)
            assert text == sequence.output, name
            passes.append(sequence.num_steps < len(text))
    assert core.speculate(target, drafter, prompt, 0, set()) == []
    assert any(passes) and target.cache.rows == []
