// The first minute: a recorded cycle, slowed, and beside it the two ways on one axis of time. It
// plays by itself, once; the reader may pause it, go back and forth, or look at another cycle.

import { byId, element, mayMove, onPress, write } from "./elements.js";
import { phasesOf, Picture } from "./picture.js";
import { mostTelling, readCycles } from "./trace.js";
import { bytes, counted, milliseconds, quoted, times } from "./words.js";

const PACE_MS = { draft: 1500, verify: 4200, accept: 1900, truncate: 6000 }; // to read what is said

export class Story {
  #picture = new Picture(byId("story-picture"));
  #story = null;
  #cycles = [];
  #cycle; // the one that is told,
  #phases; // what happens in it,
  #phase = 0; // and how far it has come
  #timer = 0;
  constructor() {
    onPress("story-back", () => this.move(-1));
    onPress("story-on", () => this.move(1));
    onPress("story-play", () => (this.#timer ? this.pause() : this.#play()));
    onPress("story-next", () => this.#begin(this.#cycles[this.#cycle.step + 1] ?? this.#cycles[1]));
  }
  /** Tell a story as page/stored_story.json has it. */
  tell(story) {
    this.#story = story;
    this.#cycles = readCycles(story.cycles);
    this.#begin(mostTelling(this.#cycles));
  }
  #begin(cycle) {
    [this.#cycle, this.#phases] = [cycle, phasesOf(cycle)];
    this.#picture.draw(cycle, this.#cycles);
    this.#label();
    this.#phase = mayMove() ? 0 : this.#phases.length;
    if (mayMove()) this.#play();
    else this.pause();
  }
  /** One phase on, or back; whoever does that wants no clock. */
  move(by) {
    this.#phase = Math.max(0, Math.min(this.#phases?.length ?? 0, this.#phase + by));
    this.pause();
  }
  pause() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#draw();
  }
  /** From here on by itself; from the start again where it has come to its end. */
  #play() {
    if (this.#phase >= this.#phases.length) this.#phase = 0;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#phase += 1;
      if (this.#phase < this.#phases.length) this.#play();
      else this.pause();
    }, PACE_MS[this.#phases[this.#phase - 1]?.stage ?? "draft"]);
    this.#draw();
  }
  #label() {
    const { model, drafter, prompt } = this.#story;
    const { step } = this.#cycle;
    write("story-label", `An example, recorded earlier with ${model}; drafter: ${drafter}, K = 5, greedy. `
      + `Cycle ${step} of ${this.#cycles.length - 1}.`);
    const earlier = this.#cycles.slice(0, step).flatMap(({ tokens }) => tokens).slice(-14);
    const inOneLine = (text) => text.replaceAll("\n", "↵");
    byId("story-text").replaceChildren(element("span",
      element("span.soft", step < 4 ? inOneLine(prompt.slice(-60)) : "… "),
      ...earlier.map(({ text, kind }) => element(`span.token.${kind}`, inOneLine(text)))));
  }
  /** Show how far it has come. */
  #draw() {
    if (!this.#story) return;
    const { pending, tokens } = this.#cycle;
    const phase = this.#phases[this.#phase - 1];
    this.#picture.show(this.#phase, true);
    write("story-says", phase?.says ?? `The text so far ends with ${quoted(pending)}. `
      + "It is chosen, but the target has not read it yet: it is pending.");
    const isEnd = this.#phase >= this.#phases.length;
    write("story-play", this.#timer ? "Pause" : isEnd ? "Replay" : "Play");
    for (const item of document.querySelectorAll(".stages li")) {
      item.toggleAttribute("aria-current", item.dataset.stage === phase?.stage);
    }
    const isKnown = this.#phase >= this.#phases.length - 1; // what this cycle gave
    this.#timeline(isKnown ? tokens.length : Infinity);
    write("timeline-says", `${this.#timelineWords(isKnown)} Times are medians of this recording.`);
  }
  /** The two ways, in measured ms; passes beyond `gained` and what is to come are dashed. */
  #timeline(gained) {
    const { plain_ms: plain, costs, drafter, target } = this.#story;
    const { step_ms: step, verify_ms: verify, parameters } = costs[drafter];
    const n = this.#cycle.proposals.length;
    const [alone, together] = [(n + 1) * plain, n * step + verify];
    const block = (kind, ms, isOn, words = "") => {
      const made = element(isOn ? `span.${kind}` : `span.${kind}.more`, words);
      made.style.width = `${(100 * ms) / Math.max(alone, together)}%`;
      return made;
    };
    const list = (length, make) => Array.from({ length }, (_, i) => make(i));
    const passes = list(n + 1, (i) => block("plain-pass", plain, i < gained, `pass ${i + 1}`));
    const steps = list(n, (i) => block("draft-step", step, this.#phase > i));
    const [weights, unused] = [target.weight_bytes, gained <= n ? " · dashed: not gained here" : ""];
    const drafted = n * parameters * weights / target.parameters;
    byId("timeline").replaceChildren(
      element("b", "One by one: each token needs a pass"),
      element("div.blocks", ...passes),
      element("p.note", `${counted(n + 1, "pass", "passes")}, ${bytes((n + 1) * weights)} read, `
        + `${milliseconds(alone)}${unused}`),
      element("b", `Guess and check: ${counted(n, "draft step")} and one pass`),
      element("div.blocks", ...steps, block("verify-pass", verify, this.#phase > n, "one pass")),
      element("p.note", `${bytes(drafted + weights)} read, ${milliseconds(together)}`),
    );
  }
  /** What the timeline shows, in words, and how much faster this cycle and the whole recording were. */
  #timelineWords(isKnown) {
    const { plain_ms: plain, costs, drafter, target } = this.#story;
    const { step_ms: step, verify_ms: verify } = costs[drafter];
    const spent = (cycles) => cycles.reduce((ms, { proposals }) => ms + proposals.length * step + verify, 0);
    const alone = (cycles) => cycles.reduce((ms, { tokens }) => ms + tokens.length * plain, 0);
    const gain = (cycles) => times(alone(cycles) / spent(cycles));
    const [best, most] = Object.entries(this.#story.gains).sort(([, a], [, b]) => b - a)[0];
    const others = best === drafter ? "" : ` In a few cycles ${best} had ${times(most)}.`;
    const [own, later] = [[this.#cycle], this.#cycles.slice(1)];
    const gave = `This cycle gave ${counted(this.#cycle.tokens.length, "token")}: one by one `
      + `${milliseconds(alone(own))}, so ${gain(own)} as fast. `;
    return `A pass over 6 positions took ${times(verify / plain)} the time of a pass over one, `
      + `because both read the same ${bytes(target.weight_bytes)} of weights, `
      + `and reading takes most of the time. ${isKnown ? gave : ""}`
      + `Over all ${later.length} cycles of this recording it was ${gain(later)} as fast.${others}`;
  }
}
