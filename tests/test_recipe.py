"""A drafter of each kind learns to draft as its target writes, and what was trained is what drafts.

Its scores while it drafts are those that training computed, to the token and within rounding. What
is saved can be trained on, and a head that is broken or another target's is refused in one line.
"""

import json
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import conftest
import gguf
import pytest
import torch
from conftest import ROOT, TARGET, assemble, assert_lossless, fresh_state, load, propose_and_close
from gguf_files import Q8_0, TINY, write
from head_contract import changed, holding
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from drafters import base
from server.options import Options
from tools import train
from tools.training import heads, recipe

KINDS = {"eagle3": "eagle3", "dflash": "dflash", "mtp": "mtp", "draft": "draft_model"}
K = 4


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A toy of the embedded target; the command of docs/models.md makes its answers."""
    work = tmp_path_factory.mktemp("recipe")
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    (command,) = re.findall(r"python -m tools\.train (.*)$", text, re.MULTILINE)
    toy = f"--toy --target embedded --work {work} --stage answers"
    train.main([*command.split(), *toy.split()])
    return train.Plan("draft", TARGET, work / "toy", work / "draft", **train.TOY)


def in_float32(patch):
    """Each token of a draft is the likeliest one, where no rounding decides it."""
    patch.setattr(recipe, "fast_dtype", lambda: torch.float32)
    for drafter in "eagle3.Eagle3Drafter", "mtp.MtpDrafter":
        patch.setattr(f"drafters.{drafter}.weight_format", None)


@pytest.fixture(scope="module")
def learned(plan):
    """By kind: a plan, its target and data, the student that was trained and saved.

    And by how much training raises the share of drafts whose first token is right.
    """

    @cache
    def learn(kind):
        of_kind = replace(plan, kind=kind, out=plan.work / kind, epochs=1.0)
        with pytest.MonkeyPatch.context() as patch:
            in_float32(patch)
            target, data, student = train.student_of(of_kind)
            figures = recipe.train(student, train.rows_of(target), data, of_kind)
        first = (plan.work / f"{kind}.jsonl").read_text("utf-8").splitlines()[0]
        gained = figures["accepted"][0] - json.loads(first)["accepted"][0]
        deepcopy(student).save(of_kind.out)
        with torch.no_grad():  # as the file has them; rotations are not in it
            for weight in student.module.parameters():
                weight.copy_(weight.bfloat16())
        return of_kind, target, data, student, gained

    return learn


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_training_goes_on_from_a_head_of_its_target(kind, learned, monkeypatch, tmp_path):
    in_float32(monkeypatch)
    plan, _, _, student, _ = learned(kind)
    head = shutil.copytree(plan.out, tmp_path / "head")
    _, _, again = train.student_of(replace(plan, begin=head))
    trained = dict(student.module.named_parameters())
    assert torch.equal(again.words, student.words)
    for key, weight in again.module.named_parameters():
        assert not weight.requires_grad or torch.equal(weight, trained[key]), key
    save_file({name: torch.ones(3) for name in ("t2d", "x")}, head / "model.safetensors")
    with pytest.raises(SystemExit, match="error: the head of --begin is another target's"):
        train.student_of(replace(plan, begin=head))
    with pytest.raises(SystemExit, match=r"error: no head of this recipe is in .*nowhere"):
        train.student_of(replace(plan, begin=head / "nowhere"))


def trained_scores(student, target, texts, drafts):
    """What the student makes of drafts behind these texts: scores [text, K, words]."""
    pairs = zip(texts, drafts, strict=True)
    tokens = recipe.padded([torch.tensor([*text, *draft]) for text, draft in pairs])
    every = recipe.every_state(target, tokens)
    states = torch.stack([every[i] for i in (*student.layers_of(len(every) - 1), -1)], 2)
    batch = recipe.Batch(tokens, states[:, :, :-1].flatten(2), states[:, :, -1], None, None)
    places = torch.tensor([[len(text) - 2] for text in texts])
    steps = zip(range(K), student.steps(batch, places), strict=False)
    return torch.stack([student.logits(hidden[:, 0]) for _, hidden in steps], 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_a_drafter_learns_and_what_is_trained_is_what_drafts(kind, name, learned, monkeypatch):
    in_float32(monkeypatch)
    plan, target, data, student, gained = learned(kind)
    assert gained > 0.05
    engine = load(TARGET, drafter=name, **{name: plan.out})
    drafter = engine.pool.drafters[name]
    text, choose = data.train[0][0].tokens.tolist(), Mock(wraps=base.sample)
    monkeypatch.setattr(base, "sample", choose)
    texts, drafts, scores = [text[:length] for length in range(22, 38, 3)], [], []
    for tokens in texts:
        whole, stepped = (fresh_state(engine, drafter, tokens) for _ in range(2))
        with monkeypatch.context() as patch:  # a draft in one call shows no scores
            patch.setattr("runtime.kernels.can_chain", lambda *_: False)
            drafts += propose_and_close(drafter, [stepped], [K])
        scores.append(torch.stack([call.args[0] for call in choose.call_args_list[-K:]]))
        assert propose_and_close(drafter, [whole], [K]) == drafts[-1:]
    if kind == "draft":
        student.OTHERS, student.words = 0, torch.arange(4096)  # all, as those who draft
    with torch.no_grad():  # the student reads what was drafted, and states that nothing has rounded
        expected = trained_scores(student, target, texts, drafts)
    drafted, close = torch.stack(scores)[..., student.words], {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(drafted, expected, **close)
    chosen = torch.stack(scores).gather(2, torch.tensor(drafts)[..., None])[..., 0]
    torch.testing.assert_close(chosen, expected.amax(-1), **close)


def test_a_word_of_a_draft_model_has_few_numbers(plan, monkeypatch):
    """Those of the target's in orthogonal directions."""
    monkeypatch.setattr(heads.Draft, "EMBEDDING", 4096 * 32)
    target, _, student = train.student_of(plan)
    embedding, like = (m.get_input_embeddings().weight for m in (student.module, target))
    assert embedding.shape == (4096, 32)
    assert not student.module.config.intermediate_size % 32  # 112 could not be stored in 5 bits
    basis = torch.linalg.lstsq(like.float(), embedding).solution
    assert torch.allclose(basis.T @ basis, torch.eye(32), atol=0.01)


def test_an_optimizer_keeps_the_order_of_the_module(tmp_path):
    """A checkpoint numbers its states, and another process reads them. Two may have one rate."""
    module = torch.nn.ModuleDict({f"part{i}": torch.nn.Linear(2, 2) for i in range(20)})
    training = recipe.Training(module, tmp_path / "none.pt", 1, 1e-3, muon=1e-3)
    _, (_, muon) = training.optimizers
    (matrices,) = (group["params"] for group in muon.param_groups)
    expected = [layer.weight for layer in module.values()]
    assert all(a is b for a, b in zip(matrices, expected, strict=True))


def test_training_ends_early_where_the_score_stops_rising(tmp_path):
    """Its learning rate falls before, and the checkpoint knows of it."""

    rates = {}

    def trained(scores, file=tmp_path / "none.pt", last=None, rate=1e-3):
        module = torch.nn.Linear(2, 2)
        training, told = recipe.Training(module, file, last or 1000, rate), iter(scores)
        inputs = torch.ones(1, 2)

        def loss_of(number):
            ((_, optimizer),) = training.optimizers
            rates[number] = optimizer.param_groups[0]["lr"]
            return module(inputs).square().sum()

        training.run(loss_of, lambda: next(told), every=10)
        return training.number

    rising, end = [1 + i / 50 for i in range(200)], int(50 / recipe.CONSTANT) + 1
    assert trained(rising) == 1000
    assert trained(rising, last=1500) == 1500  # a training that was whole may go on
    assert trained([1.5] * 100, tmp_path / "a.pt") == end
    assert rates[end - 1] < 0.1 * rates[49] < rates[49] == rates[20]
    assert trained([1.5] * 100, tmp_path / "a.pt") == end  # it has ended
    more = trained(rising, tmp_path / "a.pt", last=1200, rate=2e-3)  # there are more answers
    assert more == 1200 and rates[500] == 2e-3
    flat_late = rising[:70] + [rising[69]] * 30  # the rate falls already
    assert trained(flat_late, tmp_path / "b.pt") == 1000


@pytest.fixture
def timed(plan, monkeypatch, tmp_path):
    """A plan of an hour on a machine of known speed, that has written 1,000 tokens."""
    shutil.copytree(plan.work / "answers", tmp_path / "answers")
    clock = SimpleNamespace(now=0.0, each=0.001)

    def write(*_):
        clock.now += 100.0
        return 50.0

    tokens = iter([1000, 51_000] * 9)
    writer = SimpleNamespace(seconds_a_token=lambda: clock.each)
    monkeypatch.setattr(train.answers, "Writer", lambda _: writer)
    monkeypatch.setattr(train.answers, "make", write)
    monkeypatch.setattr(train.answers, "num_in", lambda _: next(tokens))
    monkeypatch.setattr(train, "seconds_a_token", lambda _: (0.001, clock.each + 0.001))
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return replace(plan, work=tmp_path, minutes=60), clock


def test_as_many_answers_are_written_as_the_minutes_allow(timed):
    """Who gives the command again goes on with what was decided; other minutes decide anew."""
    plan, _ = timed
    left = 3600 - train.FOR_OTHERS - 100 + 51_000 * 0.001  # a thousandth of a second for each
    assert train.fitted(plan).tokens == int(left / 0.004)
    assert train.fitted(plan).tokens == int(left / 0.004)
    assert train.fitted(replace(plan, minutes=120)).tokens == int((left + 3600) / 0.004)


def test_too_few_minutes_are_refused_at_the_start(timed, monkeypatch):
    plan, clock = timed
    clock.each = 60 / train.LEAST
    with pytest.raises(SystemExit, match=r"^error: 1 minutes are too few here: .* 2 minutes or"):
        train.fitted(replace(plan, minutes=1))
    assert clock.now == 0  # nothing was written
    clock.each = 3500 / train.LEAST
    with pytest.raises(SystemExit, match="60 minutes are too few here"):
        train.fitted(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_leaves_nothing_behind(kind, plan):
    before = {path: path.stat().st_mtime_ns for path in plan.work.rglob("*")}
    del before[plan.work / "answers"]
    read_s, train_s = train.seconds_a_token(replace(plan, kind=kind))
    assert read_s > 0 and train_s > 0
    after = {path: path.stat().st_mtime_ns for path in plan.work.rglob("*")}
    assert {path: after.get(path) for path in before} == before and len(after) == len(before) + 1


def test_a_work_folder_is_one_target_s(plan, tmp_path):
    for _ in range(2):
        train.check_work(replace(plan, work=tmp_path, target="one"))
    with pytest.raises(SystemExit, match=r"^error: .* has answers of one: give another --work$"):
        train.check_work(replace(plan, work=tmp_path, target="other"))


@pytest.mark.slow
def test_what_is_served_is_measured(learned, tmp_path):
    plan, _, data, _, _ = learned("mtp")
    figures = train.served(plan, data)
    assert 1 <= figures["tokens_per_pass"] <= 5 and 0 <= figures["acceptance"] <= 1
    (tmp_path / "config.json").write_text("{}")
    assert "mtp" in train.served(replace(plan, out=tmp_path), data)["error"].lower()


@pytest.mark.parametrize(("family", "wanted", "expected"), [
    ("qwen2", None, "mtp"), ("qwen3", None, "eagle3"), ("gemma3_text", None, "draft"),
    ("qwen2", "draft", "draft"), ("qwen2", "eagle3", "no eagle3 head fits a qwen2: train mtp or"),
    ("gemma3_text", "mtp", "no mtp head fits a gemma3_text: train draft"),
    ("qwen2", "hybrid", "no hybrid head fits a qwen2: train mtp or draft"),
])  # fmt: skip
def test_a_head_is_trained_for_targets_that_it_fits(tiny_folder, family, wanted, expected):
    if expected in KINDS:
        assert train.kind_for(str(tiny_folder(family)), wanted) == expected
    else:
        with pytest.raises(SystemExit, match=f"^error: {expected}"):
            train.kind_for(str(tiny_folder(family)), wanted)


def test_the_kind_of_a_gguf_target_is_read_too(tmp_path):
    write(file := tmp_path / "target.gguf", TINY, Q8_0)
    assert train.kind_for(str(file), None) in KINDS
    with pytest.raises(SystemExit, match="^error: cannot read the target: "):
        train.kind_for(str(tmp_path), None)


REFUSED = {
    "target --minutes 5": "--minutes goes with", "--tokens 9 --minutes 5": "--minutes goes with",
    "draft --begin x": "--begin goes with", "--tokens nan": "argument --tokens: must be above 0",
    "--epochs 0": "argument --epochs: must be above 0",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_trained_with_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        train.main(words.split())
    assert REFUSED[words] in capsys.readouterr().err


def test_the_draft_of_a_gguf_file_is_one(tmp_path):
    """It has the file's words, and computes what was trained, rounded to 5 and 6 bits."""
    target = write(file := tmp_path / "target.gguf", TINY, Q8_0)
    size, ids = target.config.vocab_size, list(range(5, 60))
    texts = recipe.Batch(torch.tensor([ids]), None, None, None, torch.tensor([len(ids)]))
    words = torch.arange(size)
    data = SimpleNamespace(batch=lambda _: texts, train=[0], commonest=lambda *_: words)
    plan = SimpleNamespace(target=str(file), draft_words=size, work=tmp_path)
    student = heads.Draft(target, data, plan)
    student.save(tmp_path / "draft.gguf")
    engine = load(file, draft_model=tmp_path / "draft.gguf", drafter="draft_model")
    assert engine.draft_model.model.config.tie_word_embeddings
    assert engine.draft_model.tokenizer.get_vocab() == engine.target.tokenizer.get_vocab()
    logits = conftest.logits_of(engine.draft_model, ids)
    with torch.no_grad():
        for name, weight in student.module.named_parameters():
            if weight.dim() == 2:
                kind = gguf.GGMLQuantizationType["Q4_1" if "embed" in name else "Q5_1"]
                rounded = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)
                weight.copy_(torch.from_numpy(rounded))
        expected = student.logits(student.module.model(torch.tensor([ids]))[0])[0]
    assert (logits - expected).norm() < 0.1 * expected.norm()


WORDS = torch.arange(1, 4096, 3)


@pytest.fixture(scope="module")
def llama_head(tiny_folder, tmp_path_factory):
    """A Llama, and an MTP head for it that knows every third word."""
    folder, work = str(tiny_folder("llama")), tmp_path_factory.mktemp("head")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    data = SimpleNamespace(commonest=lambda *_: WORDS)
    heads.Mtp(target, data, SimpleNamespace(draft_words=len(WORDS), begin=None)).save(work)
    return folder, work


def test_an_mtp_head_for_a_llama_is_written_as_mimo(llama_head):
    """It drafts words of its vocabulary, and the text is plain decoding's."""
    folder, head = llama_head
    assert json.loads((head / "config.json").read_text("utf-8"))["model_type"] == "mimo"
    engine, prompt = load(folder, mtp=head, drafter="mtp"), list(range(5, 60))
    assert_lossless(engine, prompt, 24, "mtp")
    _, events = conftest.run(engine, prompt, max_tokens=24, drafter="mtp")
    tokens = {token for event in events for token in event["proposals"]}
    assert tokens and tokens <= set(WORDS.tolist())


@pytest.mark.parametrize("change, problem", [
    ({"hidden_size": 64}, "it reads states of 64 numbers"),
    ({"vocab_size": 99}, "trained for a vocabulary of 99 tokens"),
    ({"model_type": "gpt2"}, "cannot use the MTP head"),
    ({"num_nextn_predict_layers": 0, "num_mtp_layers": 0}, "has no MTP head"),
    ({"num_nextn_predict_layers": 2, "num_mtp_layers": 2}, "could not be loaded"),
    (("t2d", 3), "t2d is \\[3\\] instead of"),
    (("t2d", 4096), "t2d marks no word"),
    (("model.mtp_layers.0.input_proj.weight", 3), "could not be loaded: .*input_proj|eh_proj"),
])  # fmt: skip
def test_a_broken_or_foreign_mtp_head_is_refused(change, problem, llama_head, tmp_path):
    folder, head = llama_head
    shutil.copytree(head, tmp_path / "head")
    if isinstance(change, dict):
        changed(tmp_path / "head", **change)
    else:
        name, size = change
        holding(name, lambda _: torch.zeros(size))(tmp_path / "head")
    with pytest.raises(ValueError, match=problem) as refused:
        assemble(Options(model=folder, mtp=str(tmp_path / "head")))
    assert "\n" not in str(refused.value)
