"""A trained head's drafts are accepted, and change no token: EAGLE-3 and DFlash, compiled and not.

What holds for every drafter holds for them. A head is used where somebody asks for it, and a head
that is broken, or does not fit its target, is refused in one line. What each kind computes is in
test_eagle3.py and test_dflash.py.
"""

import pytest
import test_dflash
import test_eagle3
from conftest import ROOT, TARGET, assert_lossless, together
from head_contract import load
from test_drafters import (  # noqa: F401 what holds for every drafter
    test_a_batch_of_states_proposes_like_each_alone,
    test_a_rolled_back_state_proposes_like_a_fresh_one,
)
from test_eagle3 import target_folder  # noqa: F401 a fixture
from test_prefix import test_hidden_states_are_remembered_where_they_stand  # noqa: F401

from runtime.values import Request
from server import core
from server.options import Options
from tools.training import train

HEADS = {"eagle3": test_eagle3, "dflash": test_dflash}


@pytest.fixture(scope="module", params=HEADS)
def name(request):
    return request.param


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """An EAGLE-3 head for the embedded target, trained for seconds by the script."""
    work = tmp_path_factory.mktemp("eagle3")
    more = {"epochs": 10.0, "rate": 6e-3}
    train.run(train.Plan("eagle3", TARGET, work, work / "head", **train.TOY | more))
    return work / "head"


@pytest.fixture(scope="module")
def folder(name, trained):
    return trained if name == "eagle3" else ROOT / "demo_models" / "target_dflash"


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "modules"])
def demo_engine(name, folder, request):
    """The embedded target with the head, for the tests of all drafters, too."""
    return load(name, head=folder, kernels=request.param)


def test_a_head_is_accepted_and_changes_no_token(demo_engine, prompts, name, way):
    """Were it not accepted, the tests here would see rejected drafts only. It keeps no row."""
    texts = list(prompts.values())[:6]
    sequences = together(demo_engine, [Request(text, 24, name, 4, **way) for text in texts])
    for s in sequences:
        given = demo_engine.target, s.request.prompt, 24, demo_engine.eos_ids
        assert s.output == core.plain_decode(*given, **way) and not s.warnings
    assert max(s.statistics.draft_acceptance_rate for s in sequences) > 0.2
    cache = demo_engine.pool.drafters[name]._cache
    assert cache.lengths == [0] * 8 and sorted(cache._free) == list(range(8))


def test_a_head_is_there_where_it_is_asked_for(name, folder, target_folder, prompts):  # noqa: F811
    for model in ("embedded", target_folder):
        assert name not in core.load_engine(Options(model=str(model))).pool.drafters
    with pytest.raises(ValueError, match=f"give --{name}"):
        core.load_engine(Options(model=str(target_folder), drafter=name))
    engine = load(name, head=folder, drafter="auto", fixed_k=False)
    others = {"mtp", "ngram", "suffix", "draft_model"} | engine.pool.special
    assert set(engine.pool.choices["auto"]) == others | {name}
    assert engine.controller.costs.at_once == ({"dflash": 7} if name == "dflash" else {})
    assert_lossless(engine, prompts["hard_story"], 40, "auto")


@pytest.mark.parametrize(
    ("name", "reason"), [(name, reason) for name in HEADS for reason in HEADS[name].BROKEN]
)
def test_a_head_that_cannot_be_used_is_one_line(name, reason, target_folder, tmp_path):  # noqa: F811
    """It is asked for by its option, and not passed over."""
    HEADS[name].new_head(tmp_path)
    HEADS[name].BROKEN[reason](tmp_path)
    kind = {"eagle3": "EAGLE-3", "dflash": "DFlash"}[name]
    with pytest.raises(ValueError, match=f"cannot use the {kind} head") as error:
        load(name, target_folder, tmp_path, drafter=None)
    assert reason in str(error.value) and "\n" not in str(error.value), error.value
