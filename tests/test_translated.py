"""A draft model with another tokenizer: its drafts are translated, and the text stays the same."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, TARGET, assert_lossless, load, logits_of, run
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from drafters import Context
from drafters.small_model import small_drafter
from drafters.translated import Translation
from runtime.models.prompts import read_prompts
from runtime.models.token_bytes import all_bytes, bytes_of
from runtime.sampling import Noise
from runtime.statistics import Statistics
from runtime.values import Request, Sampling
from server import core, trial
from server.options import Options
from server.trial import Trial

DRAFT = ROOT / "demo_models" / "draft"
DRAWN = Sampling(temperature=0.8), Sampling(temperature=0.8, verification="rejection")


@torch.no_grad()
def remap(folder, share):
    """Write the embedded draft model with a `share` of its words, under other ids; the folder.

    They are the first that its tokenizer learned, so the rarest ones are missing. A text that has
    one of these is read in several of the others.
    """
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    words = sorted(ids, key=ids.__getitem__)[: int(share * len(ids))]
    old_ids = torch.randperm(len(words), generator=torch.Generator().manual_seed(1))
    new_ids = {words[old]: new for new, old in enumerate(old_ids.tolist())}
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) in new_ids]
    tokenizer["model"]["vocab"] = new_ids
    end = new_ids[words[model.config.eos_token_id]]
    tokenizer["added_tokens"][0]["id"] = end
    table = model.get_input_embeddings().weight[old_ids].clone()
    model.resize_token_embeddings(len(words)).weight.copy_(table)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = settings.pad_token_id = end
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DRAFT).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A draft model that lacks three of ten of the target's words."""
    return remap(tmp_path_factory.mktemp("draft"), 0.7)


@pytest.fixture(scope="module")
def engine(folder):
    return load(TARGET, draft_model=folder, drafter="draft_model")


def tokens_a_pass(engine, sampling):
    """Of all demo prompts' texts."""
    fields = {"num_speculative_tokens": 4, "sampling": sampling, "seed": 3, "max_tokens": 24}
    total = Statistics()
    for text in read_prompts().values():
        prompt = engine.target.tokenizer(text).input_ids
        s, _ = run(engine, prompt, drafter="draft_model", **fields)
        assert not s.warnings
        total += s.statistics
    return total.tokens_per_pass


def test_with_seven_tenths_of_the_words_drafts_bring_eight_tenths(engine, demo_engine):
    assert engine.pool.drafters["draft_model"].words.share == pytest.approx(0.7, abs=0.01)
    ratios = [
        tokens_a_pass(engine, sampling) / tokens_a_pass(demo_engine, sampling)
        for sampling in (Sampling(), *DRAWN)
    ]
    assert sum(ratios) / len(ratios) >= 0.8


def test_with_all_words_under_other_ids_drawn_drafts_are_the_same(tmp_path, demo_engine, prompts):
    same = load(TARGET, draft_model=remap(tmp_path, 1.0), drafter="draft_model")
    for sampling in DRAWN:
        fields = {"max_tokens": 24, "drafter": "draft_model", "sampling": sampling, "seed": 5}
        texts = [run(each, prompts["code_class"], **fields)[0] for each in (same, demo_engine)]
        assert texts[0].output == texts[1].output
        assert len({text.statistics.num_accepted_draft_tokens for text in texts}) == 1


def test_masks_and_penalties_of_a_greedy_request_hold_for_drafts(engine, prompts):
    few = Sampling(allowed_token_ids=(12, 1117, 1381, 1442), presence_penalty=0.5)
    s = assert_lossless(engine, prompts["code_class"], 12, "draft_model", sampling=few)
    assert s.statistics.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("sampling", [Sampling(), *DRAWN])
def test_its_cache_holds_the_text_alone_after_each_verdict(engine, prompts, sampling):
    """So what it would say next is what it says of the whole text, read anew."""
    drafter, draft = engine.pool.drafters["draft_model"], engine.draft_model
    given = {"num_speculative_tokens": 4, "sampling": sampling, "seed": 1, "isolated": True}
    s = engine.open(Request(prompts["hard_story"], 16, "draft_model", **given))
    while s.finish_reason is None:
        engine.step([s])
        state = s.drafting.states["draft_model"]
        read = [i for token in s.tokens for i in drafter.words.draft_ids(token)]
        held = draft.cache.lengths[state.row]
        if s.num_steps > 1 and s.finish_reason is None:  # it hears of verdicts on its drafts
            assert state.text == s.tokens and state.read == read and held < len(read)
            (logits,) = draft.forward([state.row], [read[held:]], [1]).logits
            assert torch.allclose(logits[0], logits_of(draft, read)[-1], atol=1e-4)
    engine.close(s)
    assert draft.cache.rows == [] and s.statistics.num_accepted_draft_tokens > 0


def test_by_rejection_q_is_the_draft_models_over_the_words_that_both_have(engine, prompts):
    drafter, draft, sampling = engine.pool.drafters["draft_model"], engine.draft_model, DRAWN[1]
    prompt, words = prompts["code_class"], drafter.words
    state = drafter.open(prompt, sampling, Noise(1))
    q = drafter.propose(state, 1).probs[0]
    drafter.close(state)
    logits = logits_of(draft, [i for token in prompt for i in words.draft_ids(token)])[-1]
    common = sorted(words.alike.items())
    expected = torch.softmax(logits[[theirs for _, theirs in common]] / 0.8, 0)
    assert len(q) == engine.target.vocab_size and float(q.sum()) == pytest.approx(1)
    assert torch.allclose(q[[ours for ours, _ in common]], expected, atol=1e-5)
    assert {*q.nonzero().ravel().tolist()} <= {ours for ours, _ in common}


def test_a_text_longer_than_the_draft_models_context_is_decoded_without_it(folder, prompts):
    engine = load(TARGET, draft_model=folder, drafter="draft_model")
    engine.draft_model.max_length = len(prompts["hard_story"]) + 12
    s = assert_lossless(engine, prompts["hard_story"], 24, "draft_model")
    assert 0 < s.statistics.num_draft_tokens and not s.warnings


def test_a_drafter_of_one_s_own_may_have_such_a_model(folder, demo_engine, prompts):
    small = small_drafter(str(folder), Context(demo_engine.target))
    engine = core.Engine(demo_engine.target, {small.name: small}, small.name)
    for sampling in (Sampling(), DRAWN[0]):
        s = assert_lossless(engine, prompts["code_class"], 16, small.name, sampling=sampling)
        assert s.statistics.num_accepted_draft_tokens > 0
    with pytest.raises(ValueError, match="model folder nowhere/at/all not found"):
        small_drafter("nowhere/at/all", Context(demo_engine.target))


# ---------------------------------------------------------------------------- words and bytes
PIECES = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁m", "at", "▁", "é"]


def pieces_tokenizer(more=(), end="</s>"):
    """A vocabulary of pieces, as SentencePiece has them."""
    ids = {word: i for i, word in enumerate([*PIECES, *more])}
    backend = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    backend.decoder = decoders.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)


@pytest.mark.parametrize("make", [lambda: AutoTokenizer.from_pretrained(TARGET), pieces_tokenizer])
def test_the_bytes_of_all_tokens_are_those_of_each(make):
    tokenizer = make()
    found = all_bytes(tokenizer)
    assert len(found) == len(tokenizer)
    for i, word in found.items():
        text = tokenizer.decode([i], clean_up_tokenization_spaces=False)
        assert word == bytes_of(i, tokenizer) and ("\ufffd" in text or word == text.encode()), i
    text = "a é 🙃"  # of characters that are no tokens
    assert b"".join(found[i] for i in tokenizer(text)["input_ids"]) == text.encode()


def test_the_letter_that_stands_for_a_space_elsewhere_is_a_letter_among_pieces():
    for words in (
        {"▁the": " the", "▁a": " a", "Ġ": "Ġ", "é": "é"},
        {"Ġthe": " the", "Ã©": "é", "<｜end▁of▁sentence｜>": "<｜end▁of▁sentence｜>"},
    ):
        tokenizer = Mock()
        tokenizer.get_vocab.return_value = {word: i for i, word in enumerate(words)}
        assert [each.decode() for each in all_bytes(tokenizer).values()] == [*words.values()]


def translation(target, draft, ends=frozenset([0]), sizes=()):
    """Of two tokenizers, without models; `ends` are the target's."""

    def model(tokenizer, ends, size):
        fields = {"tokenizer": tokenizer, "vocab_size": size, "eos_ids": ends}
        return SimpleNamespace(cache=SimpleNamespace(device="cpu"), **fields)

    sizes = sizes or (len(target), len(draft))
    return Translation(model(target, ends, sizes[0]), model(draft, {0}, sizes[1]))


def test_a_word_that_only_the_target_has_is_read_in_the_longest_that_make_its_bytes():
    """Between a tokenizer of bytes and one of pieces; bytes that begin a character, too."""
    ours, theirs = AutoTokenizer.from_pretrained(TARGET), pieces_tokenizer()
    words, id_of = translation(ours, theirs), theirs.convert_tokens_to_ids
    for text, read in (
        (" the", ["▁the"]),
        (" that", ["▁", "<0x74>", "<0x68>", "at"]),
        (" é", ["▁", "<0xC3>", "<0xA9>"]),
        ("→", ["<0xE2>", "<0x86>", "<0x92>"]),
    ):
        tokens = ours(text).input_ids
        assert [i for each in tokens for i in words.draft_ids(each)] == list(map(id_of, read))
    assert words.draft_ids(ours.eos_token_id) == [0]  # whatever an end is called


def test_what_a_draft_wrote_is_encoded_as_the_target_would_write_it():
    ours = AutoTokenizer.from_pretrained(TARGET)
    theirs = pieces_tokenizer(["▁wat", "▁water", "er", "ter"])
    words, ids = translation(ours, theirs), theirs.convert_tokens_to_ids
    text = ours("Give me").input_ids

    def written(*pieces, behind=text):
        return ours.convert_ids_to_tokens(words.encoded(behind, list(map(ids, pieces))))

    assert written("▁the", "▁water") == ["Ġthe", "Ġwater"]  # each ends where the draft's did
    assert written("▁the", "▁wat", "er") == ["Ġthe"]  # "Ġwater" may become longer
    assert written("▁the", "▁wat", "er", "</s>") == ["Ġthe", "Ġwater", "<|endoftext|>"]
    assert written("▁the", "▁water", "<0xE2>", "<0x86>") == ["Ġthe"]  # and a part of a character
    # Behind another spelling than the tokenizer's own, words of both are taken as they are.
    behind = [*text, *ours.convert_tokens_to_ids(["Ġw", "a"])]
    assert written("ter", "▁the", behind=behind) == ["ter", "Ġthe"]
    assert written("ter", "▁", "<0xE2>", behind=behind)[:1] == ["ter"]
    assert written() == []


def test_the_end_of_a_text_is_the_targets_usual_one_however_it_is_written():
    ours, theirs = AutoTokenizer.from_pretrained(TARGET), pieces_tokenizer(end="at")
    at = theirs.convert_tokens_to_ids("at")
    for ends, written in (({0, at}, [at]), ({0, 5}, [0]), (set(), [])):
        words = translation(theirs, ours, ends)
        assert words.encoded([260], [ours.eos_token_id]) == written
        assert not ends or words.draft_ids(0) == [0]


def test_the_beginning_of_a_text_is_the_draft_models_own():
    """Another token of the target's kind for beginnings, further on, is read."""
    ours, theirs = AutoTokenizer.from_pretrained(TARGET), pieces_tokenizer(["<s>"])
    theirs.bos_token, first = "<s>", theirs.convert_tokens_to_ids("<s>")
    at = theirs.convert_tokens_to_ids("at")
    words = translation(theirs, ours)
    text = ours.encode("<s>")
    assert words.read([first, at, first]) == [*ours.encode("at"), *text]
    adding = pieces_tokenizer(["<s>"])
    adding.bos_token = "<s>"
    adding._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    for target, prompt in ((theirs, [first, at]), (ours, ours.encode("at"))):
        assert translation(target, adding).read(prompt) == [first, at]
    assert translation(adding, theirs).read([first, at]) == [first, at]  # both have it


def test_ids_that_a_model_lacks_are_neither_read_nor_written():
    ours, theirs = AutoTokenizer.from_pretrained(TARGET), pieces_tokenizer()
    small, accented = 200, theirs.convert_tokens_to_ids("é")
    words = translation(theirs, ours, sizes=(len(theirs), len(ours)))
    assert words.encoded([70], [*ours.encode("é"), 0]) == [accented, 0]
    words = translation(theirs, ours, sizes=(small, len(ours)))  # é is beyond the target's ids
    assert words.encoded([70], [*ours.encode("é"), 0]) == [] and accented not in words.alike
    words = translation(ours, theirs, sizes=(len(ours), small))
    assert all(i < small for i in range(len(ours)) for i in words.draft_ids(i))


# ----------------------------------------------------------------------------------- the trial
def test_a_trial_reckons_the_speed_of_the_best_number_of_drafted_tokens():
    assert Trial(20, [0.8, 0.6, 0.1], 10.0, 1.0, 2.0).speedup == pytest.approx(2.4 / 1.6)
    assert Trial(20, [0.8, 0.6, 0.1], 10.0, 1.0, 20.0).speedup == pytest.approx(1.8 / 3.1)


def test_a_trial_counts_what_was_accepted_in_all_demo_prompts(engine):
    before = str(vars(engine.totals))
    tried = trial.run(engine, Options())
    assert tried.num_texts == len(read_prompts())
    assert 1 > tried.reach[0] >= tried.reach[1] >= tried.reach[3] > 0.1
    assert tried.plain_ms > 0 and tried.step_ms > 0 and str(vars(engine.totals)) == before


def test_a_pair_that_does_not_pay_is_refused_with_figures_unless_it_is_named(
    engine, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(trial, "run", lambda *_: Trial(17, [0.25, 0.1], 10.0, 1.0, 4.0))
    figures = "70% of the target's tokens: in 17 texts 25% of its first guesses were accepted, "
    with pytest.raises(ValueError, match=figures + "which gives 0.83 of plain decoding's speed"):
        trial.judge(engine, Options())
    trial.judge(engine, Options(drafter="draft_model"))
    assert "used without a trial" in caplog.text
    monkeypatch.setattr(trial, "run", lambda *_: Trial(17, [0.9, 0.8], 10.0, 0.1, 1.0))
    trial.judge(engine, Options())
    assert "2.21 of plain decoding's speed" in caplog.text


def test_a_drafter_that_fails_in_the_trial_is_one_that_does_not_pay(engine, monkeypatch):
    monkeypatch.setattr(Translation, "scores", lambda *_: 1 / 0)
    monkeypatch.setattr(Translation, "encoded", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="0% of its first guesses .* give --drafter draft_model"):
        trial.judge(engine, Options())


def test_a_draft_model_of_the_same_words_needs_no_trial(demo_engine, monkeypatch):
    monkeypatch.setattr(trial, "run", lambda *_: pytest.fail("it is tried"))
    trial.judge(demo_engine, Options())
