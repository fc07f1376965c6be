// The first minute: a recorded cycle, slowed, and beside it the two ways on one axis of time. It
// plays by itself, once; the reader may pause it, go back and forth, or look at another cycle.

import { byId, drawing, element, mayMove, onPress } from "./elements.js";
import { phasesOf, Picture } from "./picture.js";
import { readCycles, numAccepted } from "./trace.js";
import { bytes, counted, milliseconds, times, visible } from "./words.js";

const PACE_MS = { draft: 1500, verify: 4200, accept: 1900, truncate: 6000 }; // to read what is said

/** How well a cycle tells the story: some accepted, one rejected, a tail to cut. */
function worth(cycle) {
  const [n, accepted] = [cycle.proposals.length, numAccepted(cycle)];
  return cycle.step ? n + 3 * Math.min(accepted, 3) + (cycle.rejected ? 4 : 0) + (n - accepted > 1 ? 2 : 0) : -1;
}

export class Story {
  #picture = new Picture(byId("story-picture"));
  #cycles = [];
  #at = 0;
  #phase = 0;
  #timer = 0;
  #story = null;
  constructor() {
    onPress("story-back", () => this.move(-1));
    onPress("story-on", () => this.move(1));
    onPress("story-play", () => (this.#timer ? this.pause() : this.play()));
    onPress("story-next", () => {
      this.#at = this.#at % (this.#cycles.length - 1) + 1;
      this.#begin();
    });
  }
  /** Draw anew what depends on the width. */
  draw() { if (this.#story) this.#drawTimeline(); }
  /** Tell a story as GET page/story.json has it. */
  tell(story) {
    this.#story = story;
    this.#cycles = readCycles(story.cycles);
    this.#at = this.#cycles.reduce((a, b) => (worth(b) > worth(a) ? b : a)).step;
    this.#begin();
  }
  #begin() {
    const kinds = this.#cycles.flatMap(({ tokens }) => tokens.map(({ kind }) => kind));
    this.#picture.draw(this.cycle, kinds);
    this.#label();
    this.#phase = mayMove() ? 0 : this.phases.length;
    if (mayMove()) this.play();
    else this.pause();
  }
  get cycle() { return this.#cycles[this.#at]; }
  get phases() { return phasesOf(this.cycle); }
  /** One phase on, or back; whoever does that wants no clock. */
  move(by) {
    if (!this.#story) return;
    this.#phase = Math.max(0, Math.min(this.phases.length, this.#phase + by));
    this.pause();
  }
  pause() {
    if (!this.#story) return;
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#show();
  }
  play() {
    if (this.#phase >= this.phases.length) this.#phase = 0;
    this.#wait();
    this.#show();
  }
  #wait() {
    const stage = this.phases[this.#phase - 1]?.stage ?? "draft";
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#phase += 1;
      this.#timer = 0;
      if (this.#phase < this.phases.length) this.#wait();
      this.#show();
    }, PACE_MS[stage]);
  }
  #show() {
    const phase = this.phases[this.#phase - 1];
    this.#picture.show(this.#phase, true);
    byId("story-says").textContent = phase?.says
      ?? `The text so far ends with “${visible(this.cycle.pending.text)}”. It is chosen, but the target has not read it yet: it is pending.`;
    byId("story-play").textContent = this.#timer ? "Pause" : this.#phase >= this.phases.length ? "Replay" : "Play";
    for (const item of document.querySelectorAll(".stages li")) item.toggleAttribute("aria-current", item.dataset.stage === phase?.stage);
    this.#drawTimeline();
  }
  #label() {
    const { model, drafter, stored, prompt } = this.#story;
    const where = stored ? "Recorded earlier, as an example, with" : "Recorded when this server started, with";
    byId("story-label").textContent = `${where} ${model}; drafter: ${drafter}, K = 5, greedy. Cycle ${this.cycle.step} of ${this.#cycles.length - 1}.`;
    const earlier = this.#cycles.slice(0, this.#at).flatMap(({ tokens }) => tokens).slice(-14);
    byId("story-text").replaceChildren(
      element("span", { class: "soft" }, this.#at < 4 ? prompt.slice(-60) : "… "),
      ...earlier.map(({ text, kind }) => element("span", { class: `token ${kind}` }, text)),
    );
  }
  /** The two ways for this cycle's tokens, in measured ms; what has happened so far is filled. */
  #drawTimeline() {
    const { plain_ms: plain, costs, drafter, target } = this.#story;
    const { step_ms: step, verify_ms: verify, parameters } = costs[drafter];
    const [n, gained, box] = [this.cycle.proposals.length, this.cycle.tokens.length, byId("timeline")];
    const each = target.weight_bytes / target.parameters;
    const width = Math.max(280, box.clientWidth || 400);
    const total = Math.max((n + 1) * plain, n * step + verify);
    const x = (ms) => (ms / total) * (width - 2);
    const svg = drawing("svg", { viewBox: `0 0 ${width} 208`, role: "img", "aria-label": "" });
    const block = (from, ms, y, kind, words) => {
      svg.append(drawing("rect", { x: 1 + x(from) + 1, y, width: Math.max(1.5, x(ms) - 2), height: 34, rx: 3, class: kind }));
      if (words && x(ms) > 34) svg.append(drawing("text", { x: 1 + x(from + ms / 2), y: y + 22, class: "middle" }, words));
    };
    const say = (y, words, kind = "") => svg.append(drawing("text", { x: 1, y, class: kind }, words));
    say(14, "One by one: each token needs a pass", "value");
    for (let i = 0; i <= n; i += 1) block(i * plain, plain, 22, i < gained ? "plain-pass" : "plain-pass more", `pass ${i + 1}`);
    say(72, `${counted(n + 1, "pass", "passes")}, ${bytes((n + 1) * target.weight_bytes)} read, ${milliseconds((n + 1) * plain)}${gained <= n ? " · dashed: not gained here" : ""}`);
    say(108, `Guess and check: ${counted(n, "draft step")} and one pass`, "value");
    for (let i = 0; i < n; i += 1) block(i * step, step, 116, this.#phase > i ? "draft-step" : "draft-step more", "");
    block(n * step, verify, 116, this.#phase > n ? "verify-pass" : "verify-pass more", "one pass");
    say(166, `${bytes(n * parameters * each + target.weight_bytes)} read, ${milliseconds(n * step + verify)}`);
    say(196, `0 ms`);
    svg.append(drawing("line", { x1: 1, y1: 180, x2: width - 1, y2: 180, class: "axis" }),
      drawing("text", { x: width - 1, y: 196, class: "end" }, milliseconds(total)));
    const gain = (gained * plain) / (n * step + verify);
    const [, ...later] = this.#cycles;
    const tokens = later.reduce((sum, cycle) => sum + cycle.tokens.length, 0);
    const spent = later.reduce((sum, cycle) => sum + cycle.proposals.length * step + verify, 0);
    const ratio = verify / plain;
    const doubt = ratio < 0.7 || ratio > 3 ? " These times are disturbed: the machine was busy when they were taken." : "";
    const words = `A pass over 6 positions took ${times(ratio)} the time of a pass over one, because both read the same `
      + `${bytes(target.weight_bytes)} of weights, and reading takes most of the time. This cycle gave ${counted(gained, "token")}: one by one `
      + `${milliseconds(gained * plain)}, so ${times(gain)} as fast; over all ${later.length} cycles of this recording, ${times((tokens * plain) / spent)}.${doubt}`;
    svg.setAttribute("aria-label", words);
    box.replaceChildren(svg);
    byId("timeline-says").textContent = `${words} Times are medians of this recording.`;
  }
}
