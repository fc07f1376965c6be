// The race: one request decoded both ways, replayed on one clock from the times that the server has
// recorded, slowed. The figures under it are medians of three runs of each.

import { byId, drawing, element, mayMove, onPress } from "./elements.js";
import { milliseconds, times, visible } from "./words.js";

const REPLAY_MS = 7000; // what the slower lane takes on the screen
const BAR = 22; // px

/** One way of decoding: its events, each with the time at which it came. */
class Lane {
  #events = []; // [ms since the prefill's end, tokens, passes, text]
  constructor(id) {
    const lane = byId(id);
    this.counts = Object.fromEntries([...lane.querySelectorAll("[data-count]")].map((span) => [span.dataset.count, span]));
    this.box = lane.querySelector(".text");
  }
  clear() {
    this.#events = [];
    this.show(0);
  }
  add({ step, tokens, text, ms }) {
    const [before, count, passes, all] = this.#events.at(-1) ?? [0, 0, 0, ""];
    const took = step && ms ? ms.draft + ms.verify + ms.other : 0; // the prompt is read before the clock starts
    this.#events.push([before + took, count + tokens.length, passes + (step > 0), all + text]);
  }
  get ends() { return this.#events.at(-1)?.[0] ?? 0; }
  show(ms) {
    const [, tokens, passes, text] = this.#events.findLast(([at]) => at <= ms) ?? [0, 0, 0, ""];
    this.counts.tokens.textContent = tokens;
    this.counts.passes.textContent = passes;
    this.box.textContent = text;
    this.box.scrollTop = this.box.scrollHeight;
  }
}

export class Race {
  #lanes = { speculative: new Lane("lane-speculative"), plain: new Lane("lane-plain") };
  #bars = null; // [label, ms per token]
  #frame = 0;
  constructor() { onPress("race-again", () => this.#replay()); }
  start() {
    cancelAnimationFrame(this.#frame);
    for (const lane of Object.values(this.#lanes)) lane.clear();
    this.#bars = null;
    byId("chart-race").replaceChildren();
    byId("race-says").textContent = "The server runs both ways, three times each …";
    byId("race-again").hidden = true;
    byId("race-clock").textContent = "0 ms";
    byId("race-pace").textContent = "";
  }
  add(name, event) { this.#lanes[name].add(event); }
  /** It ended without figures. */
  stop(words) { byId("race-says").textContent = words; }
  /** The verdict of an answer with a comparison; `textOf` gives the text of a token id. */
  finish({ compare }, textOf) {
    this.#bars = ["speculative", "plain"].map((name) => {
      const { predicted_ms: ms, predicted_n: count } = compare[name].timings;
      return [name, ms / Math.max(1, count - 1)];
    });
    byId("race-says").textContent = `${speedWords(compare)} ${textWords(compare, textOf)}`;
    byId("race-again").hidden = false;
    this.draw();
    this.#replay();
  }
  #replay() {
    cancelAnimationFrame(this.#frame);
    const end = Math.max(...Object.values(this.#lanes).map(({ ends }) => ends));
    const slower = Math.max(1, REPLAY_MS / (end || 1));
    const began = performance.now();
    const show = (ms) => {
      for (const lane of Object.values(this.#lanes)) lane.show(ms);
      byId("race-clock").textContent = milliseconds(Math.min(ms, end));
      byId("race-pace").textContent = `on the server’s clock; replayed ${slower.toFixed(slower < 10 ? 1 : 0)} times slower`;
      if (ms < end) this.#frame = requestAnimationFrame(() => show((performance.now() - began) / slower));
    };
    show(mayMove() ? 0 : end);
  }
  /** Both times per token, on one scale. */
  draw() {
    if (!this.#bars) return;
    const width = Math.max(260, byId("chart-race").clientWidth || 480);
    const most = Math.max(...this.#bars.map(([, ms]) => ms)) || 1;
    const label = this.#bars.map(([name, ms]) => `${name} ${ms.toFixed(2)} ms per token`).join();
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${2 * (BAR + 20)}`, role: "img", "aria-label": label });
    this.#bars.forEach(([name, ms], i) => {
      const y = i * (BAR + 20);
      svg.append(drawing("text", { x: 0, y: y + 12 }, `${name}: ${ms.toFixed(2)} ms per token, the median of three runs`),
        drawing("rect", { x: 0, y: y + 16, width: Math.max(1, (width * ms) / most), height: BAR, class: `race-${name}` }));
    });
    byId("chart-race").replaceChildren(svg);
  }
}

function speedWords(compare) {
  const { measured_speedup: measured, predicted_speedup: predicted, costs } = compare;
  if (measured === null) return "Too few tokens to measure a speed-up.";
  const [least, most] = compare.spread.map(times);
  const doubt = `disturbed: the machine was busy, ${compare.num_runs} runs gave ${least} to ${most}`;
  const words = `Measured speed-up ${times(measured)}${compare.disturbed ? ` (${doubt})` : ""}`;
  if (predicted === null || costs.alpha === null) return `${words}; nothing was drafted.`;
  return `${words}, predicted ${times(predicted)} (α ${costs.alpha.toFixed(2)}, c ${costs.c.toFixed(2)}, t_verify ${costs.t_verify.toFixed(2)}).`;
}

function textWords({ identical, first_difference: difference }, textOf) {
  if (identical === null) return "The texts are two draws from one distribution (verified by rejection): they are not compared.";
  if (identical) return "The texts are identical, token for token.";
  const [ours, theirs] = [difference.speculative_token, difference.plain_token]
    .map((id) => (id === null ? "its end" : `“${visible(textOf(id))}”`));
  const why = { "near-tie": "a near-tie that rounding decided", bug: "too far apart for rounding: a bug" }[difference.verdict]
    ?? "where rounding may have moved the border of top-k, top-p or min-p";
  return `The texts differ from token ${difference.position + 1} on: ${ours} against ${theirs}, ${why}.`;
}
