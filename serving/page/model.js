// The model that is served, and its drafters: a sentence on each and what it costs here.

import { entry } from "./charts.js";
import { byId, element } from "./elements.js";
import { bytes, milliseconds, short } from "./words.js";

const KINDS = {
  ngram: "Looks up how the text went on when it last ended like this. It has no model and no probabilities, and is nearly free.",
  draft_model: "A small model of the same kind writes the guesses one after the other, with probabilities of its own.",
  mtp: "A layer that was trained with the target guesses from the target’s own hidden states.",
  eagle3: "A layer that was trained afterwards guesses from hidden states of three of the target’s layers.",
  self_int8: "The target itself with its weights rounded to 8 bits: it reads a quarter of the bytes and is nearly always right.",
  auto: "The server chooses among all of them every cycle, by what each has cost and kept so far.",
};

/** Draw both, from /health and the recorded story (null where it is another model's). */
export function drawModel(health, story) {
  const { target, model_card: card } = health;
  byId("model-card").replaceChildren(
    entry("model", health.model, card ? `${card.origin}, ${card.licence}` : ""),
    entry("parameters", `${(target.parameters / 1e6).toFixed(1)} M`, `vocabulary ${target.vocabulary}, context ${target.context}`),
    entry("layers", target.layers, ""),
    entry("weights", bytes(target.weight_bytes), `${target.dtype}; every pass reads them all`),
    entry("one pass", story ? milliseconds(story.plain_ms) : "–", "median, one token, recorded at the start"),
    entry("exact", health.bitwise_lossless ? "to the bit" : "not to the bit",
      health.bitwise_lossless ? "the text is plain decoding’s, checked at the start" : "rounding may decide near-ties"),
  );
  byId("drafters").replaceChildren(...health.drafters.map((name) => {
    const costs = story?.costs[name];
    const step = costs?.step_ms;
    const size = costs?.parameters ? `${(costs.parameters / 1e6).toFixed(1)} M weights; ` : "";
    const cost = step ? `${size}${milliseconds(step)} for each guess, c = ${short(step / story.plain_ms)}.`
      : costs ? `${size}it guessed nothing in the recording.` : "";
    return element("li", {}, element("h3", {}, name), element("p", {}, KINDS[name] ?? "A drafter of your own."), element("p", { class: "note" }, cost));
  }));
}
