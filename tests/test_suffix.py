"""The drafter suffix proposes what followed the end of the text before: in it, or in past outputs.

What it remembers of these changes how long an answer takes, and no token of it. What it shares with
all drafters is in test_drafters.py.
"""

import json
import random

import pytest
from conftest import GREEDY, WAYS, grammar_of, run

from drafters import DraftedText, DrafterPool, Task, corpus, suffix
from drafters.corpus import Corpus
from drafters.grammar import GrammarDrafter
from drafters.suffix import PastOutputs, SuffixDrafter, SuffixIndex
from runtime.grammars import REGEX, Matcher
from runtime.values import Request, Verdict
from server import core
from server.comparison import runs_to_compare
from server.options import REMEMBERED, Options, parse_arguments

REJECTION = core.Sampling(temperature=0.8, verification="rejection")


def draft(drafter, text):
    state = drafter.open(text, GREEDY, None)
    tokens = drafter.propose(state, 6).tokens
    assert tokens == drafter.guess(state, 6)
    return tokens


def remember(drafter, output):
    state = drafter.open([1], GREEDY, None)
    drafter.observe(state, Verdict(0, len(output) - 1, output))
    drafter.close(state)


def test_the_longer_match_is_proposed_where_it_scores_better():
    drafter = SuffixDrafter(100)
    remember(drafter, [1, 2, 3, 4, 5])
    assert draft(drafter, [7, 2, 8, 1, 2]) == [3, 4, 5]  # own: one token, then 8
    assert draft(drafter, [1, 2, 9, 9, 1, 2])[:1] == [9]  # as long: its own text comes first


def followers(text, context):
    """What follows a string in a text, each time that it occurs and does not end the text."""
    size = len(context)
    return [text[i + size] for i in range(len(text) - size) if text[i : i + size] == context]


def brute_force(text, inside, limit):
    """The length of the longest suffix, and the draft and its score by what followed it."""
    sizes = range(min(len(text), suffix.DEPTH), 0, -1)
    start = next((text[-n:] for n in sizes if followers(inside, text[-n:])), [])
    tokens, chance, score, context = [], 1.0, 0.0, start
    while len(tokens) < limit and context:
        found = followers(inside, context)
        best = max(map(found.count, found))
        token = next(token for token in reversed(found) if found.count(token) == best)
        chance *= best / (len(found) + 1 / len(context))
        if token == suffix.END or chance < suffix.LEAST_CHANCE:
            break
        tokens, score, context = [*tokens, token], score + chance, [*context, token]
        context = context if followers(inside, context) else start
    return len(start), tokens, pytest.approx(score)


@pytest.mark.parametrize("kind", ["own", "past", "corpus"])
def test_a_draft_agrees_with_a_brute_force_search(monkeypatch, kind):
    """Of a text's own end, and of another text's in outputs that have ended, or in a corpus."""
    monkeypatch.setattr(suffix, "MOST", 1000)
    chance, lengths = random.Random(0), set()
    for _ in range(120):
        grown, text, texts = SuffixIndex(), [], []
        for _ in range(chance.randint(1, 10)):
            new = [chance.randrange(3) for _ in range(chance.randint(1, 14))]
            texts.append(new)
            new = new if kind == "own" else [*new, suffix.END]
            text += new
            grown.extend(new)
            index = Corpus(texts) if kind == "corpus" else grown
            asked = text
            if kind != "own":  # some of the text, behind other tokens
                asked = [chance.randrange(4) for _ in range(9)]
                begin = chance.randrange(len(text))
                asked += [t for t in text[begin : begin + chance.randrange(9)] if t >= 0]
            match = index.match(asked)
            expected = brute_force(asked, text, 6)
            assert (match.length, *suffix.likely(index.tokens, match, 6)) == expected
            lengths.add(match.length)
    assert lengths >= set(range(8))


def test_the_latest_places_of_a_match_count():
    index = SuffixIndex()
    index.extend([1, 2] * 100 + [1, 3] * suffix.MOST)
    draft = suffix.likely(index.tokens, index.match([1]), 1)
    assert draft == ([3], suffix.MOST / (suffix.MOST + 1))


def test_its_evidence_is_how_many_tokens_were_found_again():
    """In the text itself or in past outputs, whichever goes further."""
    drafter = SuffixDrafter(100)
    texts = [1, 2, 3, 4, 9, 2, 3], [1, 2, 3], [1, 2, 6]
    states = [drafter.open(text, GREEDY, None) for text in texts]
    for expected in ([2, 0, 0], [4, 2, 0]):
        for state, evidence in zip(states, expected, strict=True):
            drafter.guess(state, 4)
            assert drafter.evidence(state) == evidence
        remember(drafter, [7, 4, 9, 2, 3, 8])


def test_the_oldest_outputs_are_forgotten_first():
    drafter, past = SuffixDrafter(100), []
    for i in range(40):
        past.append(list(range(100 * i, 100 * i + 9)))
        remember(drafter, past[-1])
        assert len(drafter.past) <= 100
        known = [draft(drafter, output[:3]) == output[3:] for output in past]
        assert known == sorted(known) and known[-1]
        assert sum(known) == min(i + 1, 5 + i % 5 + 1)  # ten tokens each: five outputs a half


@pytest.mark.parametrize("capacity", [0, 1, 3, 20])
def test_of_an_output_that_is_too_long_its_end_is_kept(capacity):
    past = PastOutputs(capacity)
    for _ in range(3):
        past.add(list(range(50)))
        assert len(past) <= capacity
    assert past.halves[0].tokens[:-1] == (list(range(41, 50)) if capacity == 20 else [])


@pytest.fixture
def engine(demo_engine):
    return core.Engine(demo_engine.target, {"suffix": SuffixDrafter(2000)})


@pytest.mark.parametrize("memory", ["past outputs", "corpus"])
@pytest.mark.parametrize("way", [*WAYS.values(), {"sampling": REJECTION, "seed": 3}], ids=str)
def test_what_is_remembered_changes_times_and_no_text(engine, prompts, plain, way, memory):
    """All tokens of an answer are known the second time, the last ones too; a corpus has others.

    It helps isolated texts, too. None of it helps under the rule of rejection: an answer would be
    judged by the numbers that chose it.
    """
    target, is_coupled, num_outputs = engine.target, way.get("sampling") != REJECTION, 0
    fields = {"max_tokens": 40, "drafter": "suffix"} | way
    for name in ("hard_story", "code_class", "easy_table"):
        first, _ = run(engine, prompts[name], **fields)
        if memory == "corpus":
            known = Corpus([prompts["code_class"] * 3, [5, *first.output]])
            with_corpus = core.Engine(target, {"suffix": SuffixDrafter(0, known)})
            second, _ = run(with_corpus, prompts[name], **fields, isolated=True)
        else:
            second, _ = run(engine, prompts[name], **fields)
            num_outputs += 2 * (len(first.output) + 1)
            assert len(engine.pool.drafters["suffix"].past) == num_outputs
        assert first.output == second.output and second.warnings == []
        assert not is_coupled or first.output == plain(prompts[name], 40, **way)
        before, after = (s.statistics.target_passes for s in (first, second))
        least = -(-len(first.output) // 6) + 2
        assert after <= least < before if is_coupled else after == before


def test_what_comes_after_a_stop_string_is_not_kept(engine, prompts):
    for _ in range(2):
        fields = {"max_tokens": 40, "drafter": "suffix", "stop": (" green",)}
        s, _ = run(engine, prompts["repetitive_colours"], **fields)
        assert s.finish_reason == "stop"
    assert len(engine.pool.drafters["suffix"].past) == 2 * (len(s.output) + 1)


@pytest.mark.parametrize(("lines", "expected"), [
    (["", "--host localhost", "--host ::1"], REMEMBERED),
    (["--host 0.0.0.0", "--host ::", "--host example.org", "--suffix-cache 0"], 0),
    (["--api-key a", "--allowed-host a", "--allow-origin http://a"], 0),
    (["--host 0.0.0.0 --suffix-cache 7"], 7),
])  # fmt: skip
def test_an_exposed_server_keeps_no_outputs_unless_told_to(lines, expected):
    for line in lines:
        _, options = parse_arguments(["--port", "5000", *line.split()])
        assert options.for_drafters["suffix_cache"] == expected


def test_a_comparison_is_helped_by_no_earlier_run(engine, prompts):
    """Neither by what others asked nor by its own first run."""
    request, passes = Request(prompts["code_class"], 24, "suffix"), []
    for wanted in (request, *runs_to_compare(request)[::2]):
        *_, (s, _) = engine.generate(wanted)
        passes.append(s.statistics.target_passes)
    past = engine.pool.drafters["suffix"].past
    assert passes == passes[:1] * 4 and len(past) == len(s.output) + 1


# ------------------------------------------------------------------------------------ the corpus
CALL = {"function": {"name": "no", "arguments": '{"a": 1}'}}
PARTS = [{"type": "text", "text": "a part"}, {"image": 1}, 5]
LINES = [  # with the texts that are in each
    ("alone", ["alone"]),
    ({"text": "a text", "prompt": "no"}, ["a text"]),
    ({"completion": "a completion", "response": None, "output": ""}, ["a completion"]),
    ({"text": "half a pair: \ud800"}, ["half a pair: ?"]),
    ({"messages": [{"role": "user", "content": "no"}, "no", {"role": "assistant"}]}, []),
    ({"messages": [{"role": "assistant", "content": "said"}], "text": "no"}, ["said"]),
    ({"messages": [{"role": "user", "content": "no"}], "answer": "an answer"}, ["an answer"]),
    ({"messages": [{"role": "assistant", "content": PARTS, "tool_calls": [CALL, {}, 5]}]},
     ["a part", '{"a": 1}']),
]  # fmt: skip


def words_of(read, tokenizer):
    """The texts of a corpus, as words."""
    texts = " ".join(map(str, read.tokens)).split(" -1")
    return [tokenizer.decode([*map(int, text.split())]) for text in texts[:-1]]


def test_texts_come_from_plain_files_and_from_json_lines(demo_engine, tmp_path, caplog):
    tokenizer, size = demo_engine.target.tokenizer, demo_engine.target.vocab_size
    lines, plain = tmp_path / "some.jsonl", tmp_path / "plain.txt"
    lines.write_text("\n\n".join(json.dumps(line) for line, _ in LINES), "utf-8-sig")
    plain.write_text("one text\nof two lines\n", "utf-8")
    read = corpus.load([str(lines), str(plain)], tokenizer, size)
    expected = [text for _, texts in LINES for text in texts] + ["one text\nof two lines\n"]
    assert words_of(read, tokenizer) == expected
    assert "1 of 15 lines have no text" in caplog.text
    few = corpus.load([str(plain)], tokenizer, 1)  # ids that the model lacks are none
    assert set(few.tokens) == {suffix.END} and few.match([5]) == suffix.Match()


@pytest.mark.parametrize(("name", "content", "words"), [
    ("x.jsonl", b'"a"\n{"prompt": "b"}', "line 2 has no text: it needs text, completion,"),
    ("x.jsonl", b'{"text": 5}', "it has no text"),
    ("x.jsonl", b'""\n"' + b"a" * 3000 + b'"', "line 2 is longer than 2000 characters"),
    ("x.jsonl", b"\0", "line 1 is not JSON"),
    ("x.jsonl", b"a", "line 1 is not JSON"),
    ("x.jsonl", b"[" * 1500, "line 1 is not JSON"),
    ("x.jsonl", b'{"messages": []}', "it has no text"),
    ("x.txt", b"\xff\xfe", "codec can't decode byte 0xff"),
    ("x.txt", b"", "it has no text"),
    ("", b"", "Is a directory"),
])  # fmt: skip
def test_a_corpus_that_cannot_be_read_is_refused(monkeypatch, tmp_path, name, content, words):
    """Though nobody names the drafter."""
    monkeypatch.setattr(corpus, "_LONGEST_LINE", 2000)
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="cannot read --suffix-corpus") as error:
        core.load_engine(Options("embedded", suffix_corpus=[str(tmp_path / name)]))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("piece", [8, 10**6])
def test_a_corpus_is_read_to_its_limit(demo_engine, tmp_path, monkeypatch, caplog, piece):
    monkeypatch.setattr(corpus, "MOST_TOKENS", 20)
    monkeypatch.setattr(corpus, "_PIECE", piece)
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("some words and some more of them " * 50)
    target = demo_engine.target
    read = corpus.load([*map(str, files)], target.tokenizer, target.vocab_size)
    assert len(read.tokens) == 20  # with ends of texts
    assert "only the first 20 tokens are read" in caplog.text


@pytest.mark.parametrize("count", [20, 33, 63, 64, 1000])
def test_of_many_places_in_a_corpus_some_of_all_kinds_count(count):
    """Half of them behind one token go on with 1, the others behind another with 2."""
    texts = [[5 + i % 2, 9, 1 + i % 2] for i in range(count)]
    read = Corpus(texts)
    length, ends = read.match([3, 9])
    following = [read.tokens[end] for end in ends]
    assert length == 1 and len(ends) == min(count, suffix.MOST) == len({*ends})
    assert abs(following.count(1) - following.count(2)) <= 2 and ends == sorted(ends)[::-1]


def test_a_corpus_comes_from_the_command_line(demo_engine, tmp_path, capsys, prompts, plain):
    file, prompt = tmp_path / "texts.jsonl", prompts["hard_story"]
    command = ["--port", "5000", "--model", "embedded", "--fixed-k", "--suffix-corpus", str(file)]
    with pytest.raises(SystemExit):
        parse_arguments(command)
    assert capsys.readouterr().err == f"error: --suffix-corpus: there is no file {file}\n"
    file.write_text(json.dumps(demo_engine.target.tokenizer.decode(plain(prompt, 40))))
    engine = core.load_engine(parse_arguments(command)[1])
    ours, other = (run(engine, prompt, max_tokens=40, drafter=d)[0] for d in ("suffix", "ngram"))
    assert ours.statistics.target_passes < other.statistics.target_passes


def test_arguments_of_earlier_calls_are_drafted_behind_what_is_forced(demo_engine):
    """A tool's name is forced by the grammar, and what followed it before is in past outputs."""
    target, drafter = demo_engine.target, SuffixDrafter(100)
    pool = DrafterPool({"grammar": GrammarDrafter(), "suffix": drafter}, target.vocab_size)
    call = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
    remember(drafter, target.tokenizer(call)["input_ids"])
    rule = r'\{"name": "weather", "arguments": \{"city": "[a-zA-Z]+", "days": [0-9]\}\}'
    grammar = grammar_of(demo_engine, REGEX, rule)
    request = Request([5, 6], 60, "auto", 30, grammar=grammar)
    text = DraftedText(request, None, matcher=Matcher(grammar))
    pool.open(text)
    (draft,) = pool.propose([text], [Task("suffix", 30)])
    forced = target.tokenizer.decode(text.forced_tokens(30))
    assert len(forced) > 30 and call.startswith(forced)
    assert target.tokenizer.decode(draft.tokens) == call
