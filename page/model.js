// The model that is served, and its drafters: a sentence on each and what it costs here.

import { entry } from "./charts.js";
import { byId, element } from "./elements.js";
import { bytes, milliseconds, short } from "./words.js";

const KINDS = {
  ngram: "Looks up how the text went on when it last ended like this. It has no model and is nearly free.",
  suffix: "Looks up the longest ending of the text that occurred before, in this text or in what the server "
    + "wrote before. Its guess is as long as its chances are good, and is nearly free.",
  prediction: "Proposes the text that a request says it expects, such as a file before an edit.",
  draft_model: "A small model of the same kind writes one guess after the other, with its own chances.",
  mtp: "A layer that was trained with the target guesses from the target’s own hidden states.",
  eagle3: "A layer that was trained afterwards guesses from hidden states of three of the target’s layers.",
  dflash: "A few layers trained afterwards guess all tokens at once, from the target’s hidden states.",
  self_int8: "The target itself with smaller weights, of 8 bits or its GGUF file's own: nearly always right.",
  auto: "The server chooses among all of them every cycle, by what each has cost and kept so far.",
};

/** Draw both, from /health. */
export function drawModel({ model, target, model_card: card, drafters, ...health }) {
  if (!target) return drawElsewhere(model, health.engine, drafters);
  const vocabulary = `vocabulary ${target.vocabulary}, context ${target.context}`;
  const exact = "greedy and coupled text is plain decoding’s, checked at the start; "
    + "by the rule of rejection only the distribution is";
  const costs = health.controller?.costs_by_batch?.["1"];
  const pass = costs ? costs.pass_ms : null;
  byId("model-card").replaceChildren(
    entry("model", model, card ? `${card.origin}, ${card.licence}` : ""),
    entry("parameters", `${(target.parameters / 1e6).toFixed(1)} M`, vocabulary),
    entry("layers", target.layers),
    entry("weights", bytes(target.weight_bytes), `${target.dtype}; every pass reads them all`),
    entry("cost curve", rowsOf(health.controller?.curve), "time of a pass over so many tokens, in idle time"),
    entry("one pass", pass ? milliseconds(pass) : "–", "one token, as the controller has timed it so far"),
    health.bitwise_lossless ? entry("exact", "to the bit", exact)
      : entry("exact", "not to the bit", "rounding may decide near-ties"),
  );
  byId("drafters").replaceChildren(...drafters.map((name) => element("li", element("h3", name),
    element("p", KINDS[name] ?? "A drafter of your own."),
    element("p.note", costOf(costs?.draft_step_ms[name], pass)))));
}

/** What passes over more rows take, in those of one. */
function rowsOf(curve) {
  const known = Object.keys(curve ?? {}).filter((rows) => ["2", "4", "8", "16", "32", "64"].includes(rows));
  return known.map((rows) => `${rows}: ${(curve[rows] / curve["1"]).toFixed(2)}×`).join(", ") || "–";
}

/** The same where another engine runs the model: it does not tell its weights or its costs. */
function drawElsewhere(model, { name, version }, drafters) {
  byId("model-card").replaceChildren(entry("model", model), entry("engine", name, version ?? ""));
  const words = (drafter) => KINDS[drafter] ?? "A drafter that the engine was started with.";
  byId("drafters").replaceChildren(...drafters.map((drafter) => (
    element("li", element("h3", drafter), element("p", words(drafter))))));
}

const costOf = (step, pass) => (
  step && pass ? `${milliseconds(step)} for each guess, c = ${short(step / pass)}.` : ""
);
