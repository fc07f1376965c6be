"""Speculation changes nothing but the time: every text is the one of plain decoding.

One matrix says so: each target, with each drafter, however tokens are chosen, alone and with others
in the batch. Two rules say what is left out: a target may not have the drafter; and who is alone is
decoded by `speculate`, the method in one function, unless that knows no grammar or no such drafter.
Other tests need not ask for a text again, unless something fails in it. On a machine with a CUDA
device, which the ordinary run hides, `python -m pytest -m gpu -n 0` asks it of that, too.
"""

from dataclasses import replace

import conftest
import pytest
import torch
from conftest import ROOT, TARGET, WAYS, assert_lossless, grammar_of, needs_compiler, run, together
from head_contract import random_eagle3
from test_translated import remap

import drafters
from runtime.grammars import REGEX
from runtime.statistics import Statistics
from runtime.values import Request
from server import answers, core
from server.options import Options
from server.worker import Worker

DRAFT = str(ROOT / "demo_models/draft")
LENGTH, FEW = 14, (12, 1117, 1381, 1442)  # tokens of a text, and some that each drafter may guess
EXACT = "embedded", "int8", "hybrid", "windows"  # targets whose bits depend on no company
CHOSEN = "ngram", "draft_model", "self_int8", "auto", "tree"  # the controller decides
OPTIONS = {  # of the targets
    "embedded": Options("embedded", dflash=str(ROOT / "demo_models/target_dflash")),
    "int8": Options("embedded", dtype="int8", draft_model="remapped"),
    "modules": Options("embedded", kernels=False),
    "hybrid": Options("hybrid", draft_model=DRAFT),
    "windows": Options("mistral", dtype="bfloat16", draft_model="qwen3"),
}
MARKS = {"int8": needs_compiler, "windows": needs_compiler}
if torch.cuda.is_available():
    for name in ("embedded", "hybrid"):
        OPTIONS[f"{name}-cuda"] = Options(name, draft_model=DRAFT, device="cuda")
        MARKS[f"{name}-cuda"] = pytest.mark.gpu
TARGETS = [pytest.param(name, marks=MARKS.get(name, ())) for name in OPTIONS]
DRAFTERS = (
    "ngram", "suffix", "draft_model", "self_int8", "mtp", "eagle3", "dflash", "grammar",
    "prediction", "tree", "auto",
)  # fmt: skip
CHOOSING = {  # fields of requests
    **WAYS,
    "penalised": {"seed": 1, "sampling": core.Sampling(
        1.2, 1.0, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.3,
        logit_bias=((12, -2.0), (1381, 1.5)),
    )},
    "masked": {"seed": 2, "sampling": core.Sampling(
        1.0, 0.9, allowed_token_ids=FEW, bad_words=((12, 12), (1117, 12, 1381)), typical_p=0.9,
        min_tokens=9, end_ids=(1442,),
    )},
    "obeying": {"seed": 3, "sampling": core.Sampling(temperature=0.9)},  # a grammar
}  # fmt: skip


@pytest.fixture(scope="module", params=TARGETS)
def engine(request, tiny_folder, tmp_path_factory):
    """A target with all drafters that it can have, and a controller for `auto`."""
    options = OPTIONS[request.param]
    names = {"model": options.model, "draft_model": options.draft_model}
    tiny = {field: str(tiny_folder(n)) for field, n in names.items() if n in ("mistral", "qwen3")}
    if options.draft_model == "remapped":  # it has another tokenizer
        tiny["draft_model"] = str(remap(tmp_path_factory.mktemp("remapped"), 0.7))
    if request.param == "embedded":
        tiny["eagle3"] = str(random_eagle3(tmp_path_factory.mktemp("eagle3")))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("drafters.self_int8.MANY_WEIGHTS", 0)
        patched.setattr("server.trial.judge", lambda *_: None)  # which goes by the clock
        corpus = [*map(str, (ROOT / "demo_prompts").glob("*.txt"))]
        more = {"drafter": "auto", "suffix_cache": 0, "suffix_corpus": corpus, "max_running": 12}
        return core.load_engine(replace(options, **more, **tiny))


@pytest.fixture(scope="module", params=CHOOSING)
def asked(request, engine, prompts):
    """Requests for texts of several lengths without a drafter, and plain decoding's answers."""
    fields, target = dict(CHOOSING[request.param]), engine.target
    if request.param == "obeying":
        fields["grammar"] = grammar_of(engine, REGEX, r"( (red|green|blue),?){3,9}\.")
    names = "repetitive_colours", "code_class", "hard_story"
    requests = [Request(prompts[name], LENGTH, **fields) for name in names]
    if "grammar" in fields:
        return [(each, run(engine, **vars(each))[0].output) for each in requests]
    given = [(r.prompt, r.max_tokens, engine.eos_ids, r.sampling, r.seed) for r in requests]
    return [(r, core.plain_decode(target, *g)) for r, g in zip(requests, given, strict=True)]


def drafting(asked, name, chosen=("auto",)):
    """A request for one of the texts, with this drafter, and its answer."""
    number = DRAFTERS.index(name)
    request, text = asked[number % len(asked)]
    fields = {"num_speculative_tokens": (1, 4, 16, 5)[number % 4], "fixed_k": name not in chosen}
    predicted = (*text[:9], 7, *text[10:])  # which is wrong once
    return replace(request, drafter=name, prediction=predicted, **fields), text


@pytest.fixture(scope="module")
def names(engine):
    """The drafters that this target can have."""
    return [name for name in DRAFTERS if name in engine.pool.choices]


def test_alone_the_text_is_plain_decoding_s(engine, asked, names):
    for name in names:
        request, expected = drafting(asked, name)
        if request.grammar or name not in engine.pool.drafters:
            s, _ = run(engine, **vars(request))
            assert s.output == expected and not s.warnings, name
        else:
            one, ends = engine.pool.drafters[name], engine.eos_ids
            given = request.prompt, LENGTH, ends, request.sampling, request.seed
            text = core.speculate(engine.target, one, *given, request.num_speculative_tokens)
            assert text == expected, name
    assert engine.target.cache.rows == []


def test_with_others_in_the_batch_the_text_is_plain_decoding_s(engine, asked, names):
    """All drafters run in one batch, and a text without one; some guess right, some wrong."""
    pairs = [*(drafting(asked, name, CHOSEN) for name in names), asked[0]]
    sequences = together(engine, [request for request, _ in pairs])
    for s, (request, text) in zip(sequences, pairs, strict=True):
        assert s.output == text and not s.warnings, request.drafter
    total = sum((s.statistics for s in sequences), Statistics())
    assert 0 < total.num_accepted_draft_tokens < total.num_draft_tokens
    assert engine.controller.costs.runs_model("tree") == ("tree" in names)  # and is priced so
    assert engine.target.cache.rows == []


@needs_compiler
def test_health_says_what_a_target_promises(engine, request):
    name = request.node.callspec.params["engine"]
    health = answers.health(engine, Worker(engine, OPTIONS[name]), OPTIONS[name])
    assert (health["bitwise_lossless"], bool(health["compiled"])) == (name in EXACT,) * 2
    assert health["quantization"] == OPTIONS[name].quantize
    if name == "hybrid":
        assert health["model"] == name and health["prefix_cache"] is None
        assert len(engine.target.cache.recurrent) == 6 and engine.pool.drafters["mtp"]._kernels


@pytest.mark.parametrize("name", ["code_class", "hard_story", "repetitive_colours"])
def test_plain_decoding_equals_transformers_generate(demo_reference, prompts, plain, name):
    ids = torch.tensor([prompts[name]])
    mask = torch.ones_like(ids)
    texts = demo_reference.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert texts[0, ids.shape[1] :].tolist() == plain(prompts[name], 24)


def test_a_perfect_drafter_is_accepted_entirely(demo_engine, prompts, way):
    """The target drafts for itself: every token of every draft is accepted."""
    itself = core.load_model(TARGET, Options())
    context = drafters.Context(demo_engine.target, itself)
    engine = core.Engine(demo_engine.target, {"itself": drafters.load("draft_model", context)})
    sequence = assert_lossless(engine, prompts["hard_story"], 19, "itself", **way)
    statistics = sequence.statistics
    assert statistics.target_passes == 3  # 1 token by prefill, then 6 a pass
    assert statistics.draft_acceptance_rate == 1.0 and statistics.num_recovered_tokens == 0


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 4, None])
def test_exactly_the_prefix_before_an_error_is_kept(demo_engine, prompts, plain, wrong_at, way):
    """By a drafter that knows the right text; its drafts are wrong at `wrong_at`."""
    prompt = prompts["hard_story"]
    truth = plain(prompt, 20, **way)

    def script(tokens, limit):
        draft = truth[len(tokens) - len(prompt) :][:limit]
        if wrong_at is not None and len(draft) > wrong_at:
            draft[wrong_at] = (draft[wrong_at] + 1) % 4096
        return draft

    engine = conftest.scripted_engine(demo_engine, script)
    sequence, events = run(engine, prompt, max_tokens=20, drafter="scripted", **way)
    assert sequence.output == truth
    whole = [event for event in events if len(event["proposals"]) == 5]
    num_right, last = (5, "bonus") if wrong_at is None else (wrong_at, "recovered")
    for event in whole:
        assert event["accepted_count"] == num_right
        kinds = [token["kind"] for token in event["tokens"]]
        assert kinds == ["accepted"] * num_right + [last]
    assert len(whole) > 1
