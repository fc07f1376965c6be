// The race: one request decoded both ways. The server runs speculative decoding first, which is held back
// here. Then both lanes move on the server's clock, as plain decoding's tokens come. The figures under
// them are medians of three runs of each. A race that is over too soon to be seen is shown slowed.

import { bar, drawRows, row, scale } from "./charts.js";
import { byId, explained, mayMove, write } from "./elements.js";
import { isRecorded } from "./stream.js";
import { tokensOf } from "./tokens.js";
import { spentMs } from "./trace.js";
import { counted, milliseconds, short, times, visible } from "./words.js";

const [REPLAY_MS, SHORT_MS] = [7000, 2000]; // what the slower lane takes on the screen; too short to see
const NAMES = ["speculative", "plain"];

const endOf = (lane) => lane.at(-1)?.at ?? 0;
const elementsIn = (cycles) => cycles.flatMap(({ elements }) => elements);

export class Race {
  #lanes = {}; // by name, a cycle each: {at: its end, in ms since the prefill's, elements: of its tokens}
  #clock = 0; // ms, the server's,
  #slower = 1; // which runs so many times slower here
  #before = 0; // when it was looked at last
  #frame = 0;
  #finished = null; // shows the figures, once the lanes have come to their ends
  #first = byId("race-says").textContent;
  #about = null; // the request that was raced, in words
  /** A request begins, raced or not: what was raced of another one goes. */
  begin(about, isRace) {
    if (!isRace && about === this.#about) return;
    cancelAnimationFrame(this.#frame);
    [this.#clock, this.#slower, this.#frame, this.#finished, this.#about] = [0, 1, 0, null, about];
    byId("track").hidden = !isRace;
    this.say(isRace ? `The request ${isRecorded ? "was" : "is"} decoded both ways, three times each …`
      : this.#first);
    if (!isRace) return;
    this.#lanes = { speculative: [], plain: [] };
    this.#show();
    byId("chart-race").hidden = true;
    write("race-pace", "");
  }
  add(name, { step, tokens, text, ms }) {
    const lane = this.#lanes[name];
    const at = endOf(lane) + (step ? spentMs(ms) : 0); // the clock starts behind the prompt
    lane.push({ at, elements: tokensOf({ tokens, text }) });
    if (name === "plain") this.#move();
    write("race-pace", name === "plain" ? "on the run’s clock" : "Decoding with drafts comes first: "
      + `${counted(elementsIn(lane).length, "token")} so far. Both lanes start with plain decoding.`);
  }
  say(...words) { byId("race-says").replaceChildren(...words); }
  breakOff() {
    cancelAnimationFrame(this.#frame);
    this.say("The race did not come to its end.");
    write("race-pace", "");
  }
  /** The verdict of an answer with a comparison; `textOf` gives the text of a token id. */
  finish({ compare }, textOf) {
    this.#finished = () => this.#tell(compare, textOf);
    if (mayMove() && this.#endMs < SHORT_MS) this.#replay();
    else this.#move();
  }
  get #endMs() { return Math.max(...Object.values(this.#lanes).map(endOf)); }
  #tell(compare, textOf) {
    if (compare.costs.alpha === null) {
      return this.say(`Nothing was drafted, so this was no race. ${textWords(compare, textOf)}`);
    }
    const timings = NAMES.map((name) => compare[name].timings);
    const spent = timings.map(({ predicted_ms: ms, predicted_n: count }) => ms / Math.max(1, count - 1));
    const [most, words] = [Math.max(...spent) || 1, spent.map((ms) => `${ms.toFixed(2)} ms per token`)];
    const bars = ["ours", "plain"].map((kind, i) => [bar(kind, 0, spent[i] / most)]);
    const rows = NAMES.map((name, i) => row("", name, bars[i], words[i]));
    drawRows(byId("chart-race"), `Speculative: ${words[0]}, plain: ${words[1]}`, ...rows,
      row(".scale", "ms", scale(0, most)));
    byId("chart-race").hidden = false;
    return this.say("Medians of three runs; the lanes show one. ", ...speedWords(compare),
      ` ${textWords(compare, textOf)}`);
  }
  #replay() {
    cancelAnimationFrame(this.#frame);
    [this.#clock, this.#frame, this.#slower] = [0, 0, Math.max(1, REPLAY_MS / (this.#endMs || 1))];
    byId("chart-race").hidden = true;
    write("race-pace", `replayed ${this.#slower.toFixed(this.#slower < 10 ? 1 : 0)} times slower`);
    this.#move();
  }
  #move() { if (!this.#frame) this.#tick(this.#before = performance.now()); }
  /** Bring the clock and the lanes to where they are now: at most to where both are known. */
  #tick(now) {
    const { speculative, plain } = this.#lanes;
    const isWhole = this.#finished || elementsIn(plain).length >= elementsIn(speculative).length;
    const end = isWhole ? this.#endMs : endOf(plain);
    const passed = Math.max(0, now - this.#before) / this.#slower;
    this.#clock = mayMove() ? Math.min(end, this.#clock + passed) : end;
    [this.#before, this.#frame] = [now, 0];
    this.#show();
    if (this.#clock < end) this.#frame = requestAnimationFrame((then) => this.#tick(then));
    else this.#finished?.();
  }
  /** Show what had come by the clock, which may have gone back. */
  #show() {
    write("race-clock", milliseconds(this.#clock));
    for (const [name, lane] of Object.entries(this.#lanes)) {
      const [counts, box] = byId(`lane-${name}`).querySelectorAll(".counts, .text");
      const shown = lane.filter(({ at }) => at <= this.#clock);
      const [tokens, passes] = [elementsIn(shown), Math.max(0, shown.length - 1)]; // the prefill is none
      if (box.children.length !== tokens.length) box.replaceChildren(...tokens);
      counts.textContent = `${counted(tokens.length, "token")} · ${counted(passes, "pass", "passes")}`;
      box.scrollTop = box.scrollHeight;
    }
  }
}

/** The speed-up as parts of a sentence. */
function speedWords({ measured_speedup: measured, predicted_speedup: predicted, ...compare }) {
  if (measured === null) return ["Too few tokens to measure a speed-up."];
  const [least, most] = compare.spread.map(times);
  const doubt = `disturbed: the machine was busy, ${compare.num_runs} runs gave ${least} to ${most}`;
  const speed = Math.abs(measured - 1) < 0.05 ? "about as fast as"
    : measured > 1 ? "faster than" : "slower than";
  const words = `Speculative decoding was ${speed} plain decoding. `
    + `Measured speed-up ${times(measured)}${compare.disturbed ? ` (${doubt})` : ""}`;
  const costs = { alpha: "α", c: "c", t_verify: "t_verify" };
  const each = Object.entries(costs).flatMap(([name, sign], i) => (
    [i ? ", " : "", explained(name.replace("_", ""), sign), ` ${short(compare.costs[name])}`]));
  return predicted === null ? [`${words}.`] : [`${words}, predicted ${times(predicted)} (`, ...each, ")."];
}

function textWords({ identical, first_difference: difference }, textOf) {
  if (identical) return "The texts are identical, token for token.";
  if (identical === null) return "By rejection the texts are two draws from one distribution: not compared.";
  const [ours, theirs] = [difference.speculative_token, difference.plain_token]
    .map((id) => (id === null ? "its end" : `“${visible(textOf(id))}”`));
  const why = { "near-tie": "a near-tie that rounding decided", bug: "too far apart for rounding: a bug",
  }[difference.verdict] ?? "where rounding may have moved the border of top-k, top-p or min-p";
  return `The texts differ from token ${difference.position + 1} on: ${ours} against ${theirs}, ${why}.`;
}
