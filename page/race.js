// The race: one request decoded both ways, replayed on one clock from the times that the server has
// recorded, slowed. The figures under it are medians of three runs of each.

import { bar, row } from "./charts.js";
import { byId, explained, mayMove, onPress, write } from "./elements.js";
import { counted, milliseconds, times, visible } from "./words.js";

const REPLAY_MS = 7000; // what the slower lane takes on the screen
const NAMES = ["speculative", "plain"];

export class Race {
  #lanes = {}; // by name, [ms since the prefill's end, tokens, passes, text] of each event
  #frame = 0;
  constructor() { onPress("race-again", () => this.#replay()); }
  start() {
    cancelAnimationFrame(this.#frame);
    for (const name of NAMES) this.#lanes[name] = [];
    byId("chart-race").replaceChildren();
    this.#show(0, 0);
    this.#progress();
    this.say("The server runs both ways, three times each …");
    byId("race-again").hidden = true;
  }
  /** What the server does now, in words: events come of the first run of each way. */
  #progress() {
    const [ours, plain] = NAMES.map((name) => this.#lanes[name].at(-1)?.[1] ?? 0);
    write("race-clock", "");
    write("race-pace", !plain ? `Speculative decoding has written ${counted(ours, "token")}.`
      : plain < ours ? `Plain decoding has written ${plain} of ${counted(ours, "token")}.`
        : "Both texts are written. Two more runs of each follow, for medians.");
  }
  add(name, { step, tokens, text, ms }) {
    const [before, count, passes, all] = this.#lanes[name].at(-1) ?? [0, 0, 0, ""];
    const took = step && ms ? ms.draft + ms.verify + ms.other : 0; // the clock starts behind the prompt
    this.#lanes[name].push([before + took, count + tokens.length, passes + (step > 0), all + text]);
    this.#show(Infinity, 0);
    this.#progress();
  }
  say(...words) { byId("race-says").replaceChildren(...words); }
  /** The verdict of an answer with a comparison; `textOf` gives the text of a token id. */
  finish({ compare }, textOf) {
    write("race-pace", "");
    if (compare.costs.alpha === null) {
      this.say(`Nothing was drafted, so this was no race. ${textWords(compare, textOf)}`);
      return;
    }
    const spent = NAMES.map((name) => compare[name].timings)
      .map(({ predicted_ms: ms, predicted_n: count }) => ms / Math.max(1, count - 1));
    const most = Math.max(...spent) || 1;
    byId("chart-race").replaceChildren(...NAMES.map((name, i) => (
      row("", name, [bar(name, 0, spent[i] / most)], `${spent[i].toFixed(2)} ms per token`)
    )));
    const [speed, words] = [speedWords(compare), textWords(compare, textOf)];
    this.say("Medians of three runs. ", ...speed, ` ${words}`);
    byId("race-again").hidden = false;
    this.#replay();
  }
  #replay() {
    cancelAnimationFrame(this.#frame);
    const end = Math.max(...NAMES.map((name) => this.#lanes[name].at(-1)?.[0] ?? 0));
    const slower = Math.max(1, REPLAY_MS / (end || 1));
    const began = performance.now();
    const pace = mayMove() ? `replayed ${slower.toFixed(slower < 10 ? 1 : 0)} times slower`
      : "not replayed, as less motion is wanted";
    write("race-pace", `on the server’s clock; ${pace}`);
    const show = (ms) => {
      this.#show(ms, end);
      if (ms < end) this.#frame = requestAnimationFrame(() => show((performance.now() - began) / slower));
    };
    show(mayMove() ? 0 : end);
  }
  /** Both lanes as they were at `ms`. */
  #show(ms, end) {
    for (const name of NAMES) {
      const [, tokens, passes, text] = this.#lanes[name].findLast(([at]) => at <= ms) ?? [0, 0, 0, ""];
      const [counts, box] = byId(`lane-${name}`).querySelectorAll(".counts, .text");
      counts.textContent = `${tokens} tokens · ${passes} passes`;
      box.textContent = text;
      box.scrollTop = box.scrollHeight;
    }
    write("race-clock", milliseconds(Math.min(ms, end)));
  }
}

/** The speed-up as parts of a sentence. */
function speedWords(compare) {
  const { measured_speedup: measured, predicted_speedup: predicted, costs } = compare;
  if (measured === null) return ["Too few tokens to measure a speed-up."];
  const [least, most] = compare.spread.map(times);
  const doubt = `disturbed: the machine was busy, ${compare.num_runs} runs gave ${least} to ${most}`;
  const speed = Math.abs(measured - 1) < 0.05 ? "about as fast as"
    : measured > 1 ? "faster than" : "slower than";
  const words = `Speculative decoding was ${speed} plain decoding. `
    + `Measured speed-up ${times(measured)}${compare.disturbed ? ` (${doubt})` : ""}`;
  if (predicted === null) return [`${words}.`];
  const [alpha, c, tVerify] = [costs.alpha, costs.c, costs.t_verify].map((value) => ` ${value.toFixed(2)}`);
  return [`${words}, predicted ${times(predicted)} (`, explained("alpha", "α"), `${alpha}, `,
    explained("c", "c"), `${c}, `, explained("tverify", "t_verify"), `${tVerify}).`];
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
