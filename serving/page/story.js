// The first minute: a recorded cycle, slowed, and beside it the two ways on one axis of time. It
// plays by itself, once; the reader may pause it, go back and forth, or look at another cycle.

import { byId, drawing, element, mayMove, onPress, write } from "./elements.js";
import { phasesOf, Picture } from "./picture.js";
import { readCycles, numAccepted } from "./trace.js";
import { bytes, counted, milliseconds, quoted, times } from "./words.js";

const PACE_MS = { draft: 1500, verify: 4200, accept: 1900, truncate: 6000 }; // to read what is said

/** How well a cycle tells the story: some accepted, one rejected, a tail to cut. */
function worth(cycle) {
  if (cycle.step === 0) return -1;
  const [n, accepted] = [cycle.proposals.length, numAccepted(cycle)];
  return n + 3 * Math.min(accepted, 3) + (cycle.rejected ? 4 : 0) + (n - accepted > 1 ? 2 : 0);
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
  /** Whether the story has come to what this cycle gave. */
  get #isKnown() { return this.#phase >= this.phases.length - 1; }
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
    const ending = this.cycle.pending && `The text so far ends with ${quoted(this.cycle.pending)}.`;
    this.#picture.show(this.#phase, true);
    write("story-says", phase?.says
      ?? `${ending} It is chosen, but the target has not read it yet: it is pending.`);
    write("story-play", this.#timer ? "Pause" : this.#phase >= this.phases.length ? "Replay" : "Play");
    for (const item of document.querySelectorAll(".stages li")) {
      item.toggleAttribute("aria-current", item.dataset.stage === phase?.stage);
    }
    this.#drawTimeline();
  }
  #label() {
    const { model, drafter, stored, prompt } = this.#story;
    const when = stored ? "Recorded earlier, as an example," : "Recorded when this server started,";
    const which = `Cycle ${this.cycle.step} of ${this.#cycles.length - 1}`;
    write("story-label", `${when} with ${model}; drafter: ${drafter}, K = 5, greedy. ${which}.`);
    const earlier = this.#cycles.slice(0, this.#at).flatMap(({ tokens }) => tokens).slice(-14);
    byId("story-text").replaceChildren(
      element("span.soft", this.#at < 4 ? prompt.slice(-60) : "… "),
      ...earlier.map(({ text, kind }) => element(`span.token.${kind}`, text)),
    );
  }
  /** The two ways for this cycle's tokens, in measured ms; what has happened so far is filled. */
  #drawTimeline() {
    const { plain_ms: plain, costs, drafter, target } = this.#story;
    const { step_ms: step, verify_ms: verify, parameters } = costs[drafter];
    const [n, gained, box] = [this.cycle.proposals.length, this.cycle.tokens.length, byId("timeline")];
    const [weights, each] = [target.weight_bytes, target.weight_bytes / target.parameters];
    const [alone, together] = [(n + 1) * plain, n * step + verify];
    const shown = this.#isKnown ? gained : n + 1; // of the passes; the others are dashed
    const total = Math.max(alone, together);
    const width = Math.max(280, box.clientWidth || 400);
    const x = (ms) => (ms / total) * (width - 2);
    const words = this.#timelineWords();
    const svg = drawing("svg", { viewBox: `0 0 ${width} 208`, role: "img", "aria-label": words });
    const say = (y, said, kind = "start") => svg.append(drawing(`text.${kind}`, { x: 1, y }, said));
    const block = (from, ms, y, kind, isOn, said) => {
      const size = { x: 2 + x(from), y, width: Math.max(1.5, x(ms) - 2), height: 34, rx: 3 };
      svg.append(drawing(isOn ? `rect.${kind}` : `rect.${kind}.more`, size));
      if (x(ms) <= 34) return;
      svg.append(drawing("text.middle", { x: 1 + x(from + ms / 2), y: y + 22 }, said));
    };
    say(14, "One by one: each token needs a pass", "value");
    for (let i = 0; i <= n; i += 1) block(i * plain, plain, 22, "plain-pass", i < shown, `pass ${i + 1}`);
    const unused = shown <= n ? " · dashed: not gained here" : "";
    const passes = counted(n + 1, "pass", "passes");
    say(72, `${passes}, ${bytes((n + 1) * weights)} read, ${milliseconds(alone)}${unused}`);
    say(108, `Guess and check: ${counted(n, "draft step")} and one pass`, "value");
    for (let i = 0; i < n; i += 1) block(i * step, step, 116, "draft-step", this.#phase > i, "");
    block(n * step, verify, 116, "verify-pass", this.#phase > n, "one pass");
    say(166, `${bytes(n * parameters * each + weights)} read, ${milliseconds(together)}`);
    say(196, "0 ms");
    svg.append(
      drawing("line.axis", { x1: 1, y1: 180, x2: width - 1, y2: 180 }),
      drawing("text.end", { x: width - 1, y: 196 }, milliseconds(total)),
    );
    box.replaceChildren(svg);
    write("timeline-says", `${words} Times are medians of this recording.`);
  }
  /** What the timeline shows, in words, and how much faster this cycle and the whole recording were. */
  #timelineWords() {
    const { plain_ms: plain, costs, drafter, target } = this.#story;
    const { step_ms: step, verify_ms: verify } = costs[drafter];
    const spent = (cycles) => cycles.reduce((ms, { proposals }) => ms + proposals.length * step + verify, 0);
    const alone = (cycles) => cycles.reduce((ms, { tokens }) => ms + tokens.length * plain, 0);
    const gain = (cycles) => times(alone(cycles) / spent(cycles));
    const [later, ratio] = [this.#cycles.slice(1), verify / plain];
    const doubt = ratio < 0.7 || ratio > 3
      ? " These times are disturbed: the machine was busy when they were taken." : "";
    return `A pass over 6 positions took ${times(ratio)} the time of a pass over one, `
      + `because both read the same ${bytes(target.weight_bytes)} of weights, `
      + "and reading takes most of the time. "
      + (this.#isKnown ? `This cycle gave ${counted(this.cycle.tokens.length, "token")}: one by one `
        + `${milliseconds(alone([this.cycle]))}, so ${gain([this.cycle])} as fast. ` : "")
      + `Over all ${later.length} cycles of this recording it was ${gain(later)} as fast.${doubt}`;
  }
}
