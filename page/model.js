// The model that is served, and its drafters: a sentence on each and what it costs here. Where another
// engine runs the model it says what that does not tell.

import { entry } from "./charts.js";
import { byId, element, write } from "./elements.js";
import texts from "./texts.json" with { type: "json" };
import { bytes, milliseconds, short } from "./words.js";

const NEED_A_TRACE = ["back", "step", "race", "racing", "cycle-number", "cycle-count", "whatif"];
const CHOSEN_BY_THE_ENGINE = ["drafter", "num_speculative_tokens", "verification", "json_schema"];

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
    entry("weights", bytes(target.weight_bytes), `${target.dtype} in memory, all read in every `
      + "pass; the file may be smaller"),
    ...pass ? [entry("one pass", milliseconds(pass), "one token, by the controller's clock so far")] : [],
    health.bitwise_lossless ? entry("exact", "to the bit", exact)
      : entry("exact", "not to the bit", "rounding may decide near-ties"),
  );
  drawDrafters(drafters, "A drafter of your own.", (name) => {
    const step = costs?.draft_step_ms[name];
    return step && pass ? `${milliseconds(step)} for each guess, c = ${short(step / pass)}.` : "";
  });
}

function drawDrafters(names, unknown, costOf) {
  const none = element("li.note", "No drafter is loaded: each cycle is plain decoding.");
  byId("drafters").replaceChildren(...names.map((name) => element("li", element("h4", name),
    element("p.note", `${texts.drafters[name] ?? unknown} ${costOf(name)}`))), names.length ? "" : none);
}

/** The same where another engine runs the model: it does not tell its weights or its costs. */
function drawElsewhere(model, { name, version }, drafters) {
  byId("model-card").replaceChildren(entry("model", model), entry("engine", name, version ?? ""));
  drawDrafters(drafters, "A drafter that the engine was started with.", () => "");
  for (const id of NEED_A_TRACE) byId(id).hidden = true;
  for (const legend of document.querySelectorAll("#workbench .legend")) legend.hidden = true;
  for (const id of CHOSEN_BY_THE_ENGINE) byId(id).parentElement.hidden = true;
  write("cycle-says", `${name} ${version ?? ""} runs this model. It does not tell p, q, u or its KV cache, `
    + "nor which tokens were drafted, so no cycle can be drawn.");
}
