"""A GGUF file's header becomes the config of the model that the file was made of.

    original model of transformers → a file with gguf's writer → our loader → the same logits

Each key that gguf knows is applied, or refused in one line that names it, and a second reading sees
what the first one read wrongly. The cases are in gguf_files.py. What files are compared with is the
original model, which has not seen our reading of them.
"""

from itertools import combinations

import gguf
import numpy as np
import pytest
import torch
from conftest import assert_lossless
from gguf_files import CASES, FACTORS, LOCAL, LONG, begun, original, rotated, tensors_of, write
from gguf_header import assert_as_the_header_says
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from runtime.kernels import start
from runtime.models import StartError, gguf_config
from runtime.models.gguf_config import config_of
from runtime.models.gguf_file import BadFile
from runtime.models.gguf_model import load_model, open_model, why_not_packed
from runtime.models.loading import check_weights, load_pretrained
from runtime.models.rope import fix_rotations
from server import core
from server.options import Options
from tools.training.heads import write_gguf as finish

VOCAB = 4096


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@torch.no_grad()
def logits_of(model, length):
    ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits[0]


def loaded(path, length, is_packed, read=config_of):
    """The model of a file as the server has it, with transformers' modules."""
    with open_model(str(path)) as file:
        model, report = load_model(file, read(file), None if is_packed else torch.float32)
        check_weights(str(path), report)
        fix_rotations(model, length)
        assert_as_the_header_says(file, model, length)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_file_s_logits_are_those_of_the_model_that_it_was_made_of(path, name):
    """Unpacked; and as it lies in the file, where the family's matrices can be."""
    start.setup(None, "cpu", True)
    case = CASES[name]
    expected = logits_of(write(path, case), case.length)
    with open_model(str(path)) as file:
        forms = [False, True] if why_not_packed(file) is None else [False]
    for is_packed in forms:
        logits = logits_of(loaded(path, case.length, is_packed), case.length)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4 * float(expected.std()))


def test_each_case_is_seen_in_the_logits():
    """So a key that is dropped would fail: all originals of a kind say other things."""
    logits = {name: logits_of(original(case), 30) for name, case in CASES.items()}
    for (one, case), (other, another) in combinations(CASES.items(), 2):
        is_same = case.config == another.config or case.architecture != another.architecture
        if not is_same and logits[one].shape == logits[other].shape:
            assert (logits[one] - logits[other]).abs().max() > 0.01, (one, other)


@pytest.mark.parametrize("name", ["rope_freqs", "yarn, all", "longrope, short", "gemma3"])
def test_what_is_served_is_what_the_original_writes(path, name):
    """Over the whole path: packed where there are kernels, the KV cache, drafts, batches."""
    model, prompt, length = write(path, CASES[name]), [5, 17, 2048, 99, 5, 17], CASES[name].length
    usual = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(torch.tensor([prompt]), **usual)[0, len(prompt) :].tolist()
    for dtype in ("auto", "float32"):
        options = Options(model=str(path), dtype=dtype, max_model_len=length, fixed_k=True)
        assert assert_lossless(core.load_engine(options), prompt, 20, "ngram").output == expected


# ------------------------------------------------------------------------ what is not dropped
def keys_of(part):
    """All keys that gguf knows under an architecture's name."""
    for value in vars(part).values():
        if isinstance(value, type):
            yield from keys_of(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


FIRST = {case.architecture: case for case in reversed(CASES.values())}  # the first case of each


def config_with(path, case, tensors, **keys):
    """The config of a header with these keys more."""
    tokenizer = {"model": "gpt2", "tokens": ["a", "b"]}
    writer = begun(path, case.architecture, case.header(**keys), tokenizer)
    finish(writer, (), [(name, np.zeros(1, np.float32), "F32") for name in tensors])
    with open_model(str(path)) as file:
        return config_of(file).to_dict()


@pytest.mark.parametrize("architecture", [*gguf_config.FAMILIES, *GGUF_CONFIG_ARCHS])
def test_each_key_that_gguf_knows_is_applied_or_refused(path, architecture):
    """A key with another value changes the config, or is named in a refusal."""
    case, dropped = FIRST[architecture], set()
    tensors = tensors_of(original(case), architecture)
    config = config_with(path, case, tensors)
    for key in {*keys_of(gguf.Keys)} - set(gguf_config.NO_EFFECT):
        try:
            if config_with(path, case, tensors, **{key: 24}) == config:
                dropped.add(key)
        except Exception as error:  # of transformers, where such a model cannot be
            is_ours = isinstance(error, BadFile)
            assert not is_ours or key in str(error), (key, str(error))
    assert not dropped


@pytest.mark.parametrize(("name", "more", "reason"), [
    ("llama", {"dreams": 1}, "'llama.dreams' is 1, which llama has not here"),
    ("llama", {"blk.1.dream.weight": [1.0]}, "reads its tensor 'blk.1.dream.weight'"),
    ("llama", {"blk.1.attn_q.bias": [1.0] * 64}, "reads its tensor 'blk.1.attn_q.bias'"),
    ("lfm2", {"blk.1.dream.weight": [1.0]}, "reads its tensor 'blk.1.dream.weight'"),
    ("llama", {"rope_factors_long.weight": LONG}, "lacks a list of factors"),
    ("phi3", FACTORS | {"rope_freqs.weight": LONG}, "scaled in two ways"),
    ("yarn", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
    ("yarn", {"rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor is 1.0"),
    ("llama", {"rope.scaling.type": "spiral"}, "'spiral', which is not known"),
    ("llama", {"attention.head_count": [4, 4, 4, 2]}, "head_count is \\[4, 4, 4, 2\\]"),
    ("llama", {"expert_count": 4}, "'llama.expert_count' is 4"),
    ("phi3", {"rope.dimension_count": 7}, "dimension_count is 7"),
])  # fmt: skip
def test_what_would_be_another_model_is_refused(path, name, more, reason):
    """In one line with its name, packed or not."""
    start.setup(None, "cpu", True)
    write(path, CASES[name], more=more)
    for dtype in ("auto", "float32"):
        with pytest.raises(StartError, match=reason) as error:
            load_pretrained(str(path), Options(dtype=dtype))
        assert "model.gguf" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("keys", "window"), [
    ({"context_length": 4096}, 2047), ({"context_length": 16384}, None),
    ({"context_length": 4096, "attention.sliding_window": 0}, None),
])  # fmt: skip
def test_early_files_of_phi_3_have_the_window_of_their_original(path, keys, window):
    tensors = tensors_of(original(CASES["phi3"]), "phi3")
    assert config_with(path, CASES["phi3"], tensors, **keys)["sliding_window"] == window


class Counted(str):
    """A key that counts how often it is compared or taken apart."""

    count = 0

    def removeprefix(self, prefix):
        Counted.count += 1
        return super().removeprefix(prefix)

    def startswith(self, *prefix):
        Counted.count += 1
        return super().startswith(*prefix)


def test_each_of_many_keys_is_looked_at_a_few_times(path):
    """60,000 keys took 25 s where each was searched among the others."""
    write(path, CASES["llama"])
    with open_model(str(path)) as file:
        file.metadata |= {Counted(f"general.key{i}"): i for i in range(60_000)}
        config_of(file)
    assert 60_000 <= Counted.count <= 5 * 60_000


@pytest.mark.parametrize("family", ["falcon", "gemma4", "gpt-oss", "mamba", "minimax-m2"])
def test_a_family_whose_keys_are_not_known_is_refused(path, family):
    tensors = [(name, np.zeros(1, np.float32), "F32") for name in "abcd"]
    finish(begun(path, family, CASES["llama"].header()), (), tensors)
    with pytest.raises(StartError, match=f"kind '{family}' are not read from GGUF files"):
        load_pretrained(str(path), Options())


NO_ROPE = {"rope_parameters": LOCAL}
FAULTS = {  # a fault of the first reading, and what the second one finds
    "rope_freqs": (NO_ROPE, "rotation"),
    "yarn": (NO_ROPE, "rotation"),
    "epsilon": ({"rms_norm_eps": 1e-6}, "the epsilon of model.layers.0.input_layernorm"),
    "gemma2": ({"query_pre_attn_scalar": 256}, "the scale of model.layers.0.self_attn"),
    "gemma2, caps": ({"attn_logit_softcapping": 50.0}, "the cap of model.layers.0.self_attn"),
    "gemma3": ({"sliding_window": 4096}, "the window of model.layers.0.self_attn"),
    "gemma3, all": (rotated(), "rotation"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_second_reading_of_the_header_sees_what_the_first_one_read_wrongly(path, name):
    """Else the test above could not fail by it."""
    write(path, CASES[name])
    wrong, what = FAULTS[name]

    def misread(file):
        config = config_of(file)
        for name, value in wrong.items():
            setattr(config, name, value)
        return config

    with pytest.raises(AssertionError, match=what):
        loaded(path, CASES[name].length, False, misread)


def test_a_text_ends_where_the_file_says(path):
    """A config of transformers would have Llama 2's token 2 end it."""
    write(path, CASES["llama"], tokenizer={"eot_token_id": 7})
    assert load_pretrained(str(path), Options()).eos_ids == {0, 7}
