// One cycle of a trace as the page keeps it: what was proposed, judged, emitted and cached, each
// token with its text. Positions that an event leaves open follow from the cycle before it.

/** A cycle from its event and the cycle before it (none for the prefill). */
export function readCycle(event, previous) {
  const named = (token) => ({ ...token, text: event.texts?.[token.id] ?? `#${token.id}` });
  const { cached: [, length], prompt_text: promptText = "", prompt_tail: tail = [] } = event;
  return {
    step: event.step,
    first: previous ? previous.first + previous.tokens.length : 0, // of its tokens, in the output
    before: previous ? previous.cached[1] : 0,
    prompt: previous?.prompt ?? { length, text: promptText, tail },
    pending: previous?.tokens.at(-1) ?? null,
    drafter: event.drafter ?? null, // who has drafted
    proposals: event.proposals.map((id) => named({ id })),
    fed: (event.tree ?? event.proposals.map((id, i) => ({ id, parent: i - 1 }))).map(named),
    tokens: event.tokens.map(named),
    rejected: event.rejected && named(event.rejected),
    distributions: (event.distributions ?? []).map((entries) => entries.map(named)),
    grammar: event.grammar?.map((at) => ({ ...at, forbidden: at.forbidden.map(named) })) ?? null,
    cached: event.cached,
    recurrent: event.recurrent ?? null, // how far the states of recurrent layers go back
    controller: event.controller ?? null,
    ms: event.ms,
    text: event.text,
  };
}

/** All cycles of a list of events. */
export const readCycles = (events) => events.reduce((all, one) => [...all, readCycle(one, all.at(-1))], []);

/** Where, among all that was drafted, the proposals are: the branch that the text took. */
export function placesOf({ fed, proposals }) {
  let at = -1;
  return proposals.map(({ id }) => (at = fed.findIndex((token) => token.parent === at && token.id === id)));
}

/** The target's own token of a cycle; null where the text ends among the accepted. */
export const ownToken = ({ tokens }) => (tokens.at(-1).kind === "accepted" ? null : tokens.at(-1));

/** How many proposals were judged; none are behind an end of text among the accepted. */
export const numJudged = (cycle) => (ownToken(cycle) ? cycle.proposals : cycle.tokens).length;

export const numAccepted = ({ tokens }) => tokens.filter(({ kind }) => kind === "accepted").length;

/** The cycle that tells most: some drafts accepted, one rejected, a tail to cut. */
export function mostTelling(cycles) {
  const worth = (cycle) => {
    const [n, accepted] = [cycle.proposals.length, numAccepted(cycle)];
    return n + 3 * Math.min(accepted, 3) + (cycle.rejected ? 6 : 0) + (n - accepted > 1 ? 2 : 0);
  };
  return cycles.reduce((a, b) => (worth(b) > worth(a) ? b : a));
}

/** By which rule a token was chosen: rejection, greedy or coupled. */
export function ruleOf(token) {
  if (token.u !== undefined) return "rejection";
  return token.total === undefined || token.total === token.score ? "greedy" : "coupled";
}

const ratio = (part, whole) => (whole ? part / whole : null);
const total = (all, of) => all.reduce((sum, one) => sum + of(one), 0);

/** The figures of a run, by the formulas of control/statistics.py. */
export function figuresOf(cycles) {
  const later = cycles.slice(1); // the prefill drafts nothing and counts as no pass
  const perCycle = later.map((cycle) => ({ drafted: numJudged(cycle), accepted: numAccepted(cycle) }));
  const [drafted, accepted] = ["drafted", "accepted"].map((name) => total(perCycle, (cycle) => cycle[name]));
  const count = (holds) => perCycle.filter(holds).length;
  // By position in the draft; reached is where everything before was accepted.
  const at = Array.from({ length: Math.max(0, ...perCycle.map((cycle) => cycle.drafted)) }, (_, i) => ({
    drafted: count((cycle) => cycle.drafted > i),
    reached: count((cycle) => cycle.drafted > i && cycle.accepted >= i),
    accepted: count((cycle) => cycle.accepted > i),
  }));
  const [tokens, passes] = [total(cycles, (cycle) => cycle.tokens.length), later.length];
  const told = later.findLast(({ controller }) => controller);
  const ms = {};
  for (const name of ["draft", "verify", "other"]) ms[name] = total(later, (cycle) => cycle.ms[name]);
  return {
    tokens, passes, drafted, accepted, perCycle, at, ms,
    totalMs: ms.draft + ms.verify + ms.other,
    tokensPerPass: ratio(tokens - 1, passes),
    acceptanceRate: ratio(accepted, drafted),
    acceptanceLength: drafted ? 1 + accepted / count((cycle) => cycle.drafted) : null,
    alpha: ratio(accepted, total(at, ({ reached }) => reached)), // as in a comparison's costs
    controller: told ? `Cycle ${told.step}: ${told.controller}` : null, // its last sentence
  };
}
