// Bars in rows above a scale, and the charts of a run: acceptance by place, and where the time went.

import { byId, element, write } from "./elements.js";
import texts from "./texts.json" with { type: "json" };
import { figuresOf } from "./trace.js";
import { MARKS, milliseconds, short } from "./words.js";

/** Round numbers from `low` to `high`, some five of them. */
export function ticks(low, high) {
  const rough = (high - low) / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((size) => size * power).find((size) => size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}

/** Something at a share of its row, from 0 to 1. */
export function placed(made, share, width = null) {
  made.style.left = `${100 * share}%`;
  if (width !== null) made.style.width = `${100 * width}%`;
  return made;
}

/** A bar between two shares of its row, in the colour of `kind`. */
export const bar = (kind, from, to) => placed(element(`span.bar.${kind}`), from, to - from);
export const row = (kind, name, bars, right = "") => element(`div.row${kind}`,
  element("span.name", name), element("span.bars", ...bars), element("span", right));
/** Numbers from `low` to `high` where they stand in a row, as a scale. */
export const scale = (low, high) => ticks(low, high).map((tick) => placed(
  element("span.tick", String(tick).replace("-", "−").replace("0.", ".")), (tick - low) / (high - low || 1)));
export const entry = (name, value, more = "") => element("div", element("dt", name),
  element("dd.figure", { "data-figure": name }, value), element("dd.note", more));

/** Draw rows into a box, with their words for who does not see them. */
export function drawRows(box, words, ...rows) {
  box.replaceChildren(...rows);
  return Object.assign(box, { role: "img", ariaLabel: words });
}

/** Draw the figures of a session, and all charts of it; nothing of one that has not come to a cycle. */
export function drawStatistics({ cycles, request }) {
  byId("charts").hidden = !cycles.length;
  write("statistics-number", texts.says.statistics);
  if (!cycles.length) return;
  const { at, ms, totalMs, ...figures } = figuresOf(cycles);
  if (figures.passes) write("statistics-number", `${short(figures.tokensPerPass)} tokens per pass`);
  byId("figures").replaceChildren(
    entry("tokens", figures.tokens, "accepted + recovered + bonus + plain"),
    entry("target passes", figures.passes, "after the prefill"),
    entry("tokens per pass", short(figures.tokensPerPass), "after the prefill"),
    entry("draft acceptance rate", short(figures.acceptanceRate), "accepted / drafted"),
    entry("α", short(figures.alpha), "accepted / judged"),
    entry("mean acceptance length", short(figures.acceptanceLength), "1 + accepted / cycles with a draft"),
    entry("time", milliseconds(totalMs), "after the prefill"));
  const shares = at.map(({ drafted, reached, accepted }) => (
    [reached ? accepted / reached : null, accepted / drafted]));
  const words = shares.map(([reached, all], i) => `d${i + 1} ${short(reached)} / ${short(all)}`);
  drawRows(byId("chart-positions"), words.join(", ") || "No drafts.", ...shares.map(([reached, all], i) => (
    row("", `d${i + 1}`, [bar("accepted.whole", 0, all), bar("accepted", 0, reached ?? 0)],
      `${short(reached)} / ${short(all)}`))), row(".scale", "share", scale(0, 1)));
  const kinds = { draft: "drafting", verify: "pass", other: "other" };
  const parts = Object.entries(kinds).map(([name, kind]) => {
    const share = ms[name] / (totalMs || 1);
    return row("", `${MARKS[kind] ?? "\u00a0"} ${kind}`, [bar(kind, 0, share)],
      `${milliseconds(ms[name])}, ${Math.round(100 * share)} %`);
  });
  const said = parts.map(({ firstChild, lastChild }) => `${firstChild.textContent} ${lastChild.textContent}`);
  drawRows(byId("chart-time"), said.join("; "), ...parts, row(".scale", "ms", scale(0, totalMs || 1)));
  const who = request.drafter === "none" ? "nobody" : request.fixed_k ? "you" : figures.passes && "fixed";
  write("controller-says", figures.controller ? `${figures.controller}. ${texts.says.controller}`
    : texts.says[who]);
}
