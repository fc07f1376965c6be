// The race: one request decoded both ways, replayed on one clock from the times that the server has
// recorded, slowed. The figures under it are medians of three runs of each.

import { byId, element, mayMove, onPress, write } from "./elements.js";
import { milliseconds, times, visible } from "./words.js";

const REPLAY_MS = 7000; // what the slower lane takes on the screen

/** One way of decoding: its events, each with the time at which it came. */
class Lane {
  #events = []; // [ms since the prefill's end, tokens, passes, text]
  #box;
  constructor(id) { this.#box = byId(id); }
  clear() {
    this.#events = [];
    this.show(0);
  }
  add({ step, tokens, text, ms }) {
    const [before, count, passes, all] = this.#events.at(-1) ?? [0, 0, 0, ""];
    const took = step && ms ? ms.draft + ms.verify + ms.other : 0; // the clock starts behind the prompt
    this.#events.push([before + took, count + tokens.length, passes + (step > 0), all + text]);
  }
  get ends() { return this.#events.at(-1)?.[0] ?? 0; }
  show(ms) {
    const [, tokens, passes, text] = this.#events.findLast(([at]) => at <= ms) ?? [0, 0, 0, ""];
    this.#box.querySelector("[data-count=tokens]").textContent = tokens;
    this.#box.querySelector("[data-count=passes]").textContent = passes;
    const box = this.#box.querySelector(".text");
    box.textContent = text;
    box.scrollTop = box.scrollHeight;
  }
}

export class Race {
  #lanes = { speculative: new Lane("lane-speculative"), plain: new Lane("lane-plain") };
  #frame = 0;
  constructor() { onPress("race-again", () => this.#replay()); }
  start() {
    cancelAnimationFrame(this.#frame);
    for (const lane of Object.values(this.#lanes)) lane.clear();
    byId("chart-race").replaceChildren();
    write("race-clock", "0 ms");
    write("race-pace", "");
    write("race-says", "The server runs both ways, three times each …");
    byId("race-again").hidden = true;
  }
  add(name, event) { this.#lanes[name].add(event); }
  /** It ended without figures. */
  stop(words) { write("race-says", words); }
  /** The verdict of an answer with a comparison; `textOf` gives the text of a token id. */
  finish({ compare }, textOf) {
    const perToken = ({ timings: { predicted_ms: ms, predicted_n: count } }) => ms / Math.max(1, count - 1);
    if (compare.costs.alpha === null) {
      write("race-says", `Nothing was drafted, so this was no race. ${textWords(compare, textOf)}`);
      for (const lane of Object.values(this.#lanes)) lane.show(Infinity);
      write("race-clock", "");
      return;
    }
    const most = Math.max(perToken(compare.speculative), perToken(compare.plain)) || 1;
    byId("chart-race").replaceChildren(...["speculative", "plain"].map((name) => {
      const ms = perToken(compare[name]);
      const bar = element(`div.race-${name}`);
      bar.style.width = `${(100 * ms) / most}%`;
      return element("div", `${name}: ${ms.toFixed(2)} ms per token, the median of three runs`, bar);
    }));
    write("race-says", `${speedWords(compare)} ${textWords(compare, textOf)}`);
    byId("race-again").hidden = false;
    this.#replay();
  }
  #replay() {
    cancelAnimationFrame(this.#frame);
    const end = Math.max(...Object.values(this.#lanes).map(({ ends }) => ends));
    const slower = Math.max(1, REPLAY_MS / (end || 1));
    const began = performance.now();
    const pace = mayMove() ? `replayed ${slower.toFixed(slower < 10 ? 1 : 0)} times slower`
      : "not replayed, as less motion is wanted";
    write("race-pace", `on the server’s clock; ${pace}`);
    const show = (ms) => {
      for (const lane of Object.values(this.#lanes)) lane.show(ms);
      write("race-clock", milliseconds(Math.min(ms, end)));
      if (ms < end) this.#frame = requestAnimationFrame(() => show((performance.now() - began) / slower));
    };
    show(mayMove() ? 0 : end);
  }
}

function speedWords(compare) {
  const { measured_speedup: measured, predicted_speedup: predicted, costs } = compare;
  if (measured === null) return "Too few tokens to measure a speed-up.";
  const [least, most] = compare.spread.map(times);
  const doubt = `disturbed: the machine was busy, ${compare.num_runs} runs gave ${least} to ${most}`;
  const words = `Measured speed-up ${times(measured)}${compare.disturbed ? ` (${doubt})` : ""}`;
  if (predicted === null) return `${words}.`;
  const { alpha, c, t_verify: tVerify } = costs;
  const factors = `α ${alpha.toFixed(2)}, c ${c.toFixed(2)}, t_verify ${tVerify.toFixed(2)}`;
  return `${words}, predicted ${times(predicted)} (${factors}).`;
}

function textWords({ identical, first_difference: difference }, textOf) {
  if (identical === null) {
    return "The texts are two draws from one distribution (verified by rejection): they are not compared.";
  }
  if (identical) return "The texts are identical, token for token.";
  const [ours, theirs] = [difference.speculative_token, difference.plain_token]
    .map((id) => (id === null ? "its end" : `“${visible(textOf(id))}”`));
  const why = {
    "near-tie": "a near-tie that rounding decided",
    bug: "too far apart for rounding: a bug",
  }[difference.verdict] ?? "where rounding may have moved the border of top-k, top-p or min-p";
  return `The texts differ from token ${difference.position + 1} on: ${ours} against ${theirs}, ${why}.`;
}
