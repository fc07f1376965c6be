// One request under way: events are read as fast as they come and shown frame by frame, either all
// of them or, step by step, as many cycles as were asked for.

import { generate } from "./stream.js";

const BUDGET_MS = 8; // of a frame: what is left over waits for the next one, and clicks get through

export class Run {
  #abort = new AbortController();
  #waiting = []; // events
  #allowed; // cycles that may still be shown
  #frame = 0;
  #end = null; // how it ended, once it has
  #view;
  /** `view` shows: take(event), flush() after each frame's share, and once ended({state, error}). */
  constructor(request, key, view, isStepping) {
    this.#view = view;
    this.#allowed = isStepping ? 1 : Infinity;
    this.#read(request, key);
  }
  /** Show one more cycle, when it is there; whoever ran freely goes step by step from here on. */
  step() {
    this.#allowed = this.#allowed === Infinity ? 1 : this.#allowed + 1;
    this.#wake();
  }
  /** Show everything from here on. */
  release() {
    this.#allowed = Infinity;
    this.#wake();
  }
  /** Hang up, which frees the server, and show nothing more. */
  stop() {
    this.#abort.abort();
    this.#waiting = [];
    this.#end = { state: "stopped" }; // even if all was read, and waited to be shown
    this.#wake();
  }
  async #read(request, key) {
    let end = { state: "finished" };
    try {
      for await (const event of generate(request, key, this.#abort.signal)) {
        if (this.#end) return; // stopped, with more of a chunk still to read
        this.#waiting.push(event);
        this.#wake();
      }
    } catch (error) {
      end = { state: "failed", error };
      this.#allowed = Infinity; // nobody should have to step towards an error
    }
    this.#end ??= end;
    this.#wake();
  }
  #wake() { this.#frame ||= requestAnimationFrame(() => this.#show()); }
  #show() {
    const until = performance.now() + BUDGET_MS;
    const mayShow = () => this.#allowed > 0 || !("step" in this.#waiting[0]);
    while (this.#waiting.length && mayShow() && performance.now() < until) {
      const event = this.#waiting.shift();
      if ("step" in event) this.#allowed -= 1;
      this.#view.take(event);
    }
    this.#view.flush();
    this.#frame = 0;
    if (this.#waiting.length) return mayShow() && this.#wake();
    if (!this.#end || this.#end.isTold) return null;
    this.#end.isTold = true;
    return this.#view.ended(this.#end);
  }
}
