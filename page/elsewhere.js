// Another engine behind this server: its text and its acceptance are shown, and what it does not tell is
// said instead of drawn.

import { byId, write } from "./elements.js";

const NEED_A_TRACE = ["back", "step", "race", "slow", "cycle-number", "cycle-count", "story-try",
  "tab-try", "tab-race", "tab-whatif"];
const CHOSEN_BY_THE_ENGINE = ["drafter", "num_speculative_tokens", "verification", "json_schema"];

/** What the engine keeps to itself, in a sentence. */
const silence = ({ name, version }) => `${name} ${version ?? ""} runs this model. It does not tell p, q, u `
  + "or its KV cache, nor which tokens were drafted, so no cycle can be drawn.";

/** Hide what needs a trace, and the choices that the engine has made; say why. */
export function hideTraces({ engine }) {
  for (const id of NEED_A_TRACE) byId(id).hidden = true;
  for (const about of document.querySelectorAll(".kinds, #view-text .note")) about.hidden = true;
  for (const id of CHOSEN_BY_THE_ENGINE) byId(id).parentElement.hidden = true;
  write("cycle-says", silence(engine));
  write("story-label", `${silence(engine)} This cycle was recorded with another engine.`);
}

/** What an answer tells of its run, in words. */
export function toldWords({ usage, timings, metrics: { speculative_decoding: told } }) {
  const drafts = told.num_draft_tokens === null ? ""
    : `, ${told.num_accepted_draft_tokens} of ${told.num_draft_tokens} drafted ones accepted`;
  return `${usage.completion_tokens} tokens${drafts}, ${Math.round(timings.predicted_ms)} ms after the first`;
}
