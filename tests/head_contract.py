"""What holds for every trained head, whatever it computes; a test is run where it is imported.

Who imports it has the fixtures `name` (the drafter's), `demo_engine`, `prompts`, and `loaded`: a
function that loads the demo target with the head and options of its own.
"""

import json
from dataclasses import replace

import speculative_decoding as core
from conftest import run
from safetensors.torch import load_file, save_file
from test_batching import together

from benchmarks import lossless


def test_the_head_is_accepted_and_changes_no_token(demo_engine, prompts, name):
    """Were it not, the tests here would see refused drafts only."""
    rates = []
    for prompt in list(prompts.values())[:4]:
        expected = core.plain_decode(demo_engine.target, prompt, 40, demo_engine.eos_ids)
        sequence, _ = run(demo_engine, prompt, max_tokens=40, drafter=name)
        assert sequence.output == expected and not sequence.seat.warnings
        rates.append(sequence.statistics.draft_acceptance_rate)
    assert max(rates) > 0.2, rates


def test_a_batch_is_drafted_like_each_alone_and_rows_are_given_back(
    demo_engine, prompts, name, way
):
    requests = [core.Request(p, 24, name, 4, **way) for p in list(prompts.values())[:6]]
    for request, sequence in zip(requests, together(demo_engine, requests), strict=True):
        target, ends = demo_engine.target, demo_engine.eos_ids
        assert sequence.output == core.plain_decode(target, request.prompt, 24, ends, **way)
        assert not sequence.seat.warnings
    cache = demo_engine.panel.drafters[name]._cache
    assert cache.lengths == [0] * 8 and sorted(cache._free) == list(range(8))


def test_rejection_keeps_the_distribution_of_the_first_tokens(loaded, name):
    """Three views (2nd, 3rd, all three tokens): odds of a false alarm 3e-6."""
    engine = loaded(max_running=lossless.BATCH, max_model_len=32)
    prompt = engine.target.tokenizer(lossless.PROMPT)["input_ids"]
    sampling = lossless.SAMPLINGS["temperature 0.7"]
    plain = core.Request(prompt, 12, None, sampling=sampling, seed=7)
    rule = replace(sampling, verification="rejection")
    ours = replace(plain, drafter=name, num_speculative_tokens=3, sampling=rule, seed=7_000_000)
    theirs = lossless.first_tokens(engine, plain, 512)
    tests = lossless.compare(lossless.first_tokens(engine, ours, 256), theirs)
    assert min(test.p_value for test in tests.values()) > 1e-6


# ------------------------------------------------------------------------- to break a head's files
def content_of(folder):
    return json.loads((folder / "config.json").read_text("utf-8"))


def changed(folder, **values):
    """Change what config.json says; a value of None leaves the field out."""
    content = content_of(folder) | values
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), "utf-8")


def changed_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def size_changed(folder):
    changed_weights(folder, lambda w: w.update({"fc.weight": w["fc.weight"][:8].clone()}))


BROKEN = {
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "Expecting property name"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "--allow-pickle"),
    "cut off": (lambda f: (f / "model.safetensors").write_bytes(b"abc"), "eader"),
    "lacks": (lambda f: changed_weights(f, lambda w: w.pop("norm.weight")), "lacks norm.weight"),
    "size": (size_changed, "fc.weight is [8, 96] instead of [32, 96]"),
}  # how, and what the error says
