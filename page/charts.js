// The charts of a run: accepted per cycle, acceptance per position, and where the time went.

import { byId, element, write } from "./elements.js";
import { figuresOf } from "./trace.js";
import { counted, milliseconds, short } from "./words.js";

/** A bar between two shares of its row. */
export function bar(kind, from, to) {
  const made = element(`span.bar-${kind}`);
  [made.style.left, made.style.width] = [`${100 * from}%`, `${100 * (to - from)}%`];
  return made;
}

/** A row: a name, bars, and what is at their right. */
export const row = (kind, name, bars, right) => element(`div.row${kind}`,
  element("span.name", name), element("span.bars", ...bars), element("span", right));

/** A figure with its name and its formula. */
export const entry = (name, value, more = "") => element("div", element("dt", name),
  element("dd.figure", { "data-figure": name }, value), element("dd.formula", more));

/** Draw the figures of a session, and all charts of it. */
export function drawStatistics({ cycles, request, answer }) {
  if (answer && !cycles.length) return drawTold(answer);
  const figures = figuresOf(cycles);
  byId("figures").replaceChildren(
    entry("tokens", figures.tokens, "accepted + recovered + bonus"),
    entry("target passes", figures.passes, "target forwards after prefill"),
    entry("tokens per pass", short(figures.tokensPerPass), "tokens after prefill / passes"),
    entry("draft acceptance rate", short(figures.acceptanceRate), "accepted / drafted"),
    entry("mean acceptance length", short(figures.acceptanceLength), "1 + accepted / cycles with a draft"),
    entry("time", milliseconds(figures.totalMs), "draft + verify + other, after prefill"),
  );
  drawAccepted(byId("chart-accepted"), figures);
  byId("chart-positions").replaceChildren(...figures.at.map(({ drafted, reached, accepted }, i) => {
    const [conditional, whole] = [reached ? accepted / reached : 0, accepted / drafted];
    const numbers = `${reached ? short(conditional) : "–"} / ${short(whole)}`;
    return row("", `position ${i + 1}`, [bar("p", 0, conditional), bar("q", 0, whole)], numbers);
  }));
  byId("chart-time").replaceChildren(...Object.entries(figures.ms).map(([name, ms]) => {
    const share = ms / (figures.totalMs || 1);
    return row("", name, [bar(name, 0, share)], `${milliseconds(ms)}, ${Math.round(100 * share)} %`);
  }));
  write("controller-says", figures.controller ?? (request.fixed_k && request.drafter !== "none"
    ? "You named the drafter, so every cycle had the K that you asked for."
    : "It decided nothing: no run yet, plain decoding, or a server started with --fixed-k."));
}

/** Draw what another engine has told of a run; the rest it does not tell. */
function drawTold({ usage, timings, metrics: { speculative_decoding: told } }) {
  byId("figures").replaceChildren(
    entry("tokens", usage.completion_tokens, "of the answer"),
    entry("cycles with a draft", told.num_spec_steps ?? "–", "as the engine counts"),
    entry("draft acceptance rate", short(told.draft_acceptance_rate), "accepted / drafted"),
    entry("mean acceptance length", short(told.mean_acceptance_length), "1 + accepted / cycles with a draft"),
    entry("time", milliseconds(timings.predicted_ms), "after the first token, as it came here"),
  );
  for (const id of ["chart-accepted", "chart-positions", "chart-time"]) {
    byId(id).replaceChildren(element("p.note", "The engine does not tell this of one run."));
  }
  write("accepted-says", "");
  write("controller-says", "The engine chooses; /health has its acceptance by position.");
}

/** A column for each cycle: what was drafted, and the accepted part of it. */
function drawAccepted(box, { perCycle, accepted, drafted }) {
  const most = Math.max(1, ...perCycle.map((cycle) => cycle.drafted));
  const columns = `A column for each cycle, the tallest of ${counted(most, "token")}.`;
  write("accepted-says", `${columns} Pale: drafted, ${drafted} in all. Filled: accepted, ${accepted}.`);
  box.replaceChildren(...perCycle.map((cycle) => {
    const [all, kept] = [element("span.drafted"), element("span.accepted")];
    all.style.height = `${(100 * cycle.drafted) / most}%`;
    kept.style.height = `${(100 * cycle.accepted) / (cycle.drafted || 1)}%`;
    all.append(kept);
    return all;
  }));
}
