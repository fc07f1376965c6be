"""On a CUDA device, too, every drafter writes the text of plain decoding.

The ordinary run hides such a device, so that it does the same everywhere. By hand:

    python -m pytest -m gpu -n 0
"""

from dataclasses import replace

import pytest
import torch
from conftest import ROOT, WAYS, together

from runtime.values import Request
from server import answers, core
from server.options import Options
from server.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
DRAFT = str(ROOT / "demo_models/draft")
OPTIONS = Options(draft_model=DRAFT, fixed_k=True, suffix_cache=0, device="cuda")


@pytest.fixture(scope="module", params=["embedded", "hybrid"])
def engine(request):
    return core.load_engine(replace(OPTIONS, model=request.param))


@pytest.mark.parametrize("way", WAYS)
def test_every_drafter_writes_the_text_of_plain_decoding(engine, prompts, way):
    """All drafters run in one batch; some of their tokens are accepted."""
    colours, loaded = prompts["repetitive_colours"], enumerate(engine.pool.drafters)
    requests = [Request(colours[i:], 60, name, 5, **WAYS[way]) for i, name in loaded]
    sequences = together(engine, requests)
    for text in sequences:
        given, seed = (text.request.prompt, 60, engine.eos_ids), text.request.seed
        plain = core.plain_decode(engine.target, *given, text.request.sampling, seed)
        assert text.output == plain, text.request.drafter
        assert not text.warnings
    assert sum(text.statistics.num_accepted_draft_tokens for text in sequences) > 60


def test_health_promises_no_bits_there(engine):
    health = answers.health(engine, Worker(engine, OPTIONS), OPTIONS)
    assert not health["bitwise_lossless"] and not health["compiled"]
