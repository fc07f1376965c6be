// The figures of a run, counted cycle by cycle with the formulas of control/statistics.py.

import { numAccepted, numJudged } from "./trace.js";

const ratio = (part, whole) => (whole ? part / whole : null);

export class Figures {
  tokens = 0;
  passes = 0; // target forwards after prefill
  drafted = 0;
  accepted = 0;
  speculative = 0; // cycles with a draft
  perCycle = []; // {drafted, accepted} of each cycle after the prefill
  draftedAt = []; // by position in the draft
  reachedAt = []; // of those: with everything before them accepted
  acceptedAt = [];
  ms = { draft: 0, verify: 0, other: 0 }; // after prefill
  controller = null; // its last sentence, and the cycle's number
  controllerStep = 0;
  add(cycle) {
    this.tokens += cycle.tokens.length;
    if (cycle.step === 0) return this; // the prefill drafts nothing and counts as no pass
    this.passes += 1;
    for (const name of Object.keys(this.ms)) this.ms[name] += cycle.ms[name];
    const [drafted, accepted] = [numJudged(cycle), numAccepted(cycle)];
    this.perCycle.push({ drafted, accepted });
    this.drafted += drafted;
    this.accepted += accepted;
    this.speculative += drafted > 0;
    for (let i = 0; i < drafted; i += 1) {
      this.draftedAt[i] = (this.draftedAt[i] ?? 0) + 1;
      this.reachedAt[i] = (this.reachedAt[i] ?? 0) + (i <= accepted);
      this.acceptedAt[i] = (this.acceptedAt[i] ?? 0) + (i < accepted);
    }
    if (cycle.controller) [this.controller, this.controllerStep] = [cycle.controller, cycle.step];
    return this;
  }
  get totalMs() { return this.ms.draft + this.ms.verify + this.ms.other; }
  get tokensPerPass() { return ratio(this.tokens - 1, this.passes); }
  get acceptanceRate() { return ratio(this.accepted, this.drafted); }
  get acceptanceLength() { return this.speculative ? 1 + this.accepted / this.speculative : null; }
  /** Accepted, of those with everything before them accepted: α, as in a comparison's costs. */
  get alpha() { return ratio(this.accepted, this.reachedAt.reduce((sum, count) => sum + count, 0)); }
  /** By position: {conditional, unconditional}, null where nothing came so far. */
  get positions() {
    return this.draftedAt.map((drafted, i) => ({
      conditional: ratio(this.acceptedAt[i], this.reachedAt[i]),
      unconditional: ratio(this.acceptedAt[i], drafted),
    }));
  }
}
