// The model that is served, and its drafters: a sentence on each and what it costs here.

import { entry } from "./charts.js";
import { byId, element, write } from "./elements.js";
import texts from "./texts.json" with { type: "json" };
import { bytes, counted, milliseconds, short } from "./words.js";

export function drawModel({ model, target, model_card: card, drafters, ...health }) {
  const parameters = `${(target.parameters / 1e6).toFixed(1)} M`;
  write("model-number", `${model}, ${parameters} parameters, ${counted(drafters.length, "drafter")}`);
  const exact = "greedy and coupled text is plain decoding’s, checked at the start; "
    + "by the rule of rejection only the distribution is the same";
  const { pass_ms: pass, draft_step_ms: steps } = health.controller?.costs_by_batch?.["1"] ?? {};
  byId("model-card").replaceChildren(
    entry("model", model, card ? `${card.origin}, ${card.licence}` : ""),
    entry("parameters", parameters, `vocabulary ${target.vocabulary}, context ${target.context}`),
    entry("layers", target.layers),
    entry("weights", bytes(target.weight_bytes), `${target.dtype} in memory, all read in every `
      + "pass; the file may be smaller"),
    ...pass ? [entry("one pass", milliseconds(pass), "one token, by the controller's clock so far")] : [],
    health.bitwise_lossless ? entry("exact", "to the bit", exact)
      : entry("exact", "not to the bit", "rounding may decide near-ties"),
  );
  drawDrafters(drafters, "A drafter of your own.", (name) => {
    const step = steps?.[name];
    return step && pass ? `${milliseconds(step)} for each guess, c = ${short(step / pass)}.` : "";
  });
}

function drawDrafters(names, unknown, costOf) {
  const none = element("li.note", "No drafter is loaded: each cycle is plain decoding.");
  byId("drafters").replaceChildren(...names.map((name) => element("li", element("h4", name),
    element("p.note", `${texts.drafters[name] ?? unknown} ${costOf(name)}`))), names.length ? "" : none);
}
