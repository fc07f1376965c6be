// The race: speculative and plain decoding of one request in two lanes whose tokens, passes and
// time count live, then the measured speed-up against the predicted one.

import { byId, drawing } from "./elements.js";
import { milliseconds, times, visible } from "./words.js";

const BAR = 26; // px

/** One way of decoding: its text and counters. */
class Lane {
  tokens = 0;
  passes = 0;
  #began = null;
  #ms = 0;
  #new = "";

  constructor(id) {
    const lane = byId(id);
    this.counts = Object.fromEntries([...lane.querySelectorAll("[data-count]")]
      .map((span) => [span.dataset.count, span]));
    this.box = lane.querySelector(".text");
    this.text = this.box.appendChild(document.createTextNode(""));
  }

  clear() {
    Object.assign(this, { tokens: 0, passes: 0 });
    [this.#began, this.#ms, this.#new] = [null, 0, ""];
    this.text.data = "";
    this.flush();
  }

  /** A cycle that came at `at` ms: time counts from the prefill's, as the server's does. */
  add({ step, tokens, text }, at) {
    this.#began ??= at;
    this.#ms = at - this.#began;
    this.tokens += tokens.length;
    this.passes += step > 0;
    this.#new += text;
  }

  flush() {
    this.counts.tokens.textContent = this.tokens;
    this.counts.passes.textContent = this.passes;
    this.counts.time.textContent = milliseconds(this.#ms);
    if (!this.#new) return;
    this.text.appendData(this.#new);
    this.#new = "";
    this.box.scrollTop = this.box.scrollHeight;
  }

  /** The server's own clock, the median of its runs. Returns ms per token after prefill. */
  finish(timings) {
    this.#ms = timings.predicted_ms;
    this.flush();
    return timings.predicted_ms / Math.max(1, timings.predicted_n - 1);
  }
}

export class Race {
  #speculative = new Lane("lane-speculative");
  #plain = new Lane("lane-plain");
  #chart = byId("chart-race");
  #says = byId("race-says");
  #bars = null; // [label, ms per token]

  start() {
    this.#speculative.clear();
    this.#plain.clear();
    this.#bars = null;
    this.#chart.replaceChildren();
    this.#says.textContent = "";
  }

  cycle(event, at) {
    this.#speculative.add(event, at);
  }

  plain(event, at) {
    this.#plain.add(event, at);
  }

  flush() {
    this.#speculative.flush();
    this.#plain.flush();
  }

  /** The verdict of an answer with a comparison; `textOf` gives the text of a token id. */
  finish(answer, textOf) {
    const { compare } = answer;
    this.#bars = [
      ["speculative", this.#speculative.finish(compare.speculative.timings)],
      ["plain", this.#plain.finish(compare.plain.timings)],
    ];
    this.#says.textContent = `${speedWords(compare)} ${textWords(compare, textOf)}`;
    this.draw();
  }

  /** Both times per token, on one scale. */
  draw() {
    if (!this.#bars) return;
    const width = Math.max(260, this.#chart.clientWidth || 480);
    const most = Math.max(...this.#bars.map(([, ms]) => ms)) || 1;
    const label = this.#bars.map(([name, ms]) => `${name} ${ms.toFixed(2)} ms per token`).join();
    const size = `0 0 ${width} ${2 * (BAR + 22)}`;
    const svg = drawing("svg", { viewBox: size, role: "img", "aria-label": label });
    this.#bars.forEach(([name, ms], i) => {
      const y = i * (BAR + 22);
      const length = Math.max(1, (width * ms) / most);
      const words = `${name}: ${ms.toFixed(2)} ms per token`;
      svg.append(
        drawing("text", { x: 0, y: y + 13, class: "tick" }, words),
        drawing("rect", { x: 0, y: y + 18, width: length, height: BAR, class: `race-${name}` }),
      );
    });
    this.#chart.replaceChildren(svg);
  }
}

function speedWords(compare) {
  const { measured_speedup: measured, predicted_speedup: predicted, costs } = compare;
  if (measured === null) return "Too few tokens to measure a speed-up.";
  const [least, most] = compare.spread.map(times);
  const runs = `${compare.num_runs} runs gave ${least} to ${most}`;
  const doubt = `disturbed: the machine was busy, ${runs}`;
  const words = `Measured speed-up ${times(measured)}${compare.disturbed ? ` (${doubt})` : ""}`;
  if (predicted === null || costs.alpha === null) return `${words}; nothing was drafted.`;
  return `${words}, predicted ${times(predicted)} (α ${costs.alpha.toFixed(2)}, c `
    + `${costs.c.toFixed(2)}, t_verify ${costs.t_verify.toFixed(2)}).`;
}

function textWords({ identical, first_difference: difference }, textOf) {
  if (identical === null) {
    return "The texts are two draws from one distribution (verified by rejection): they are not compared.";
  }
  if (identical) return "The texts are identical, token for token.";
  const [ours, theirs] = [difference.speculative_token, difference.plain_token]
    .map((id) => (id === null ? "its end" : `“${visible(textOf(id))}”`));
  const why = difference.verdict === "near-tie" ? "a near-tie that rounding decided"
    : difference.verdict === "bug" ? "too far apart for rounding: a bug"
    : "where rounding may have moved the border of top-k, top-p or min-p";
  const place = `from token ${difference.position + 1} on`;
  return `The texts differ ${place}: ${ours} against ${theirs}, ${why}.`;
}
