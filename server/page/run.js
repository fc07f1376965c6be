// One request under way: events are read as fast as they come and shown frame by frame, either all
// of them or, step by step, as many cycles as were asked for.

import { generate } from "./stream.js";

const BUDGET_MS = 8; // of a frame: what is left over waits for the next one, and clicks get through

export class Run {
  #abort = new AbortController();
  #waiting = []; // events
  #allowed; // cycles that may still be shown
  #frame = 0;
  #end = null; // {state, error}: how it ended, once it has
  #view;
  /** `view` shows: take(event), flush() after each frame's share, and once ended({state, error}). */
  constructor(request, key, view, isStepping) {
    [this.#view, this.#allowed] = [view, isStepping ? 1 : Infinity];
    this.#read(request, key);
  }
  /** Show one more cycle, when it is there; whoever ran freely goes step by step from here on. */
  step() { this.#allow(this.#allowed === Infinity ? 1 : this.#allowed + 1); }
  release() { this.#allow(Infinity); }
  /** Hang up, which frees the server, and show nothing more, even if all was read. */
  stop() { this.#abort.abort(); [this.#waiting, this.#end] = [[], { state: "stopped" }]; this.release(); }
  async #read(request, key) {
    try {
      for await (const event of generate(request, key, this.#abort.signal)) {
        if (this.#end) return; // stopped, with more of a chunk still to read
        this.#waiting.push(event);
        this.#allow(this.#allowed);
      }
      this.#end ??= { state: "finished" };
      this.#allow(this.#allowed);
    } catch (error) {
      this.#end ??= { state: "failed", error };
      this.release(); // nobody should have to step towards an error
    }
  }
  #allow(count) { this.#allowed = count; this.#frame ||= requestAnimationFrame(() => this.#show()); }
  #show() {
    const until = performance.now() + BUDGET_MS;
    const mayShow = () => this.#waiting.length && (this.#allowed > 0 || !("step" in this.#waiting[0]));
    while (mayShow() && performance.now() < until) {
      const event = this.#waiting.shift();
      if ("step" in event) this.#allowed -= 1;
      this.#view.take(event);
    }
    this.#view.flush();
    this.#frame = this.#end && !this.#waiting.length ? -1 : 0; // no more frames: its end is told once
    if (this.#frame) this.#view.ended(this.#end);
    else if (mayShow()) this.#allow(this.#allowed);
  }
}
