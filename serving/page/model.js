// The model that is served, and its drafters: a sentence on each and what it costs here.

import { entry } from "./charts.js";
import { byId, element } from "./elements.js";
import { bytes, milliseconds, short } from "./words.js";

const KINDS = {
  ngram: "Looks up how the text went on when it last ended like this. It has no model and no probabilities, "
    + "and is nearly free.",
  suffix: "Looks up the longest ending of the text that occurred before, in this text or in what the server "
    + "wrote before. Its guess is as long as its chances are good, and is nearly free.",
  draft_model: "A small model of the same kind writes the guesses one after the other, with probabilities of "
    + "its own.",
  mtp: "A layer that was trained with the target guesses from the target’s own hidden states.",
  eagle3: "A layer that was trained afterwards guesses from hidden states of three of the target’s layers.",
  self_int8: "The target itself with its weights rounded to 8 bits: it reads a quarter of the bytes and is "
    + "nearly always right.",
  auto: "The server chooses among all of them every cycle, by what each has cost and kept so far.",
};

const millions = (count) => `${(count / 1e6).toFixed(1)} M`;

/** Draw both, from /health and the recorded story (null where it is another model's). */
export function drawModel({ model, target, model_card: card, bitwise_lossless: isExact, drafters }, story) {
  const vocabulary = `vocabulary ${target.vocabulary}, context ${target.context}`;
  byId("model-card").replaceChildren(
    entry("model", model, card ? `${card.origin}, ${card.licence}` : ""),
    entry("parameters", millions(target.parameters), vocabulary),
    entry("layers", target.layers),
    entry("weights", bytes(target.weight_bytes), `${target.dtype}; every pass reads them all`),
    entry("one pass", story ? milliseconds(story.plain_ms) : "–", "median, one token, recorded at the start"),
    isExact ? entry("exact", "to the bit", "greedy and coupled text is plain decoding’s, checked at the "
      + "start; by the rule of rejection only the distribution is")
      : entry("exact", "not to the bit", "rounding may decide near-ties"),
  );
  byId("drafters").replaceChildren(...drafters.map((name) => {
    const words = KINDS[name] ?? "A drafter of your own.";
    const cost = element("p.note", costOf(name, story, target));
    return element("li", element("h3", name), element("p", words), cost);
  }));
}

function costOf(name, story, target) {
  const costs = story?.costs[name];
  if (!costs) return "";
  const read = costs.parameters * target.weight_bytes / target.parameters;
  const size = read ? `A step reads ${bytes(read)}; ` : "";
  const step = costs.step_ms;
  if (!step) return `${size}it guessed nothing in the recording.`;
  return `${size}${milliseconds(step)} for each guess, c = ${short(step / story.plain_ms)}.`;
}
