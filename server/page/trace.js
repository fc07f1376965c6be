// One cycle of a trace as the page keeps it: what was proposed, judged, emitted and cached, each
// token with its text. Positions that an event leaves open follow from the cycle before it.

/** A cycle from its event and the cycle before it (none for the prefill). */
export function readCycle(event, previous) {
  const { step, tokens, ms, text, proposals = [], rejected = null, cached = [], drafter = null,
    recurrent = null, controller = null, grammar = null, distributions = [], tree,
    prompt_text = "", prompt_tail: tail = [] } = event;
  const named = (token) => ({ ...token, text: event.texts?.[token.id] ?? `#${token.id}` });
  // What follows no draft is nobody's bonus: it is the token of plain decoding.
  const kindOf = ({ kind }) => (kind === "bonus" && !proposals.length ? "plain" : kind);
  return {
    step, cached, ms, text, controller,
    drafter, // who has drafted
    recurrent, // how far the states of recurrent layers go back
    first: previous ? previous.first + previous.tokens.length : 0, // of its tokens, in the output
    before: previous ? previous.cached[1] : 0,
    prompt: previous?.prompt ?? { length: cached[1], text: prompt_text, tail },
    pending: previous?.tokens.at(-1) ?? null,
    proposals: proposals.map((id) => named({ id })),
    fed: (tree ?? proposals.map((id, i) => ({ id, parent: i - 1 }))).map(named),
    tokens: tokens.map((token) => named({ ...token, kind: kindOf(token) })),
    rejected: rejected && named(rejected),
    distributions: distributions.map((entries) => entries.map(named)),
    grammar: grammar?.map((at) => ({ ...at, forbidden: at.forbidden.map(named) })),
  };
}

const readCycles = (events) => events.reduce((all, event) => [...all, readCycle(event, all.at(-1))], []);

export function readRun({ prompt, request, events }) {
  const plain = events.flatMap(({ plain: event }) => (
    event ? { ...event, texts: { [event.tokens[0].id]: event.text } } : []));
  const cycles = readCycles(events.filter((event) => "step" in event));
  return { prompt, request, cycles, plain: readCycles(plain), answer: events.at(-1) };
}

export const tokensIn = (cycles) => cycles.flatMap(({ tokens }) => tokens);
/** What a cycle took, or a part of it that is known. */
export const spentMs = ({ draft = 0, verify = 0, other = 0 } = {}) => draft + verify + other;

/** Where, among all that was drafted, the proposals are: the branch that the text took. */
export function placesOf({ fed, proposals }) {
  let at = -1;
  return proposals.map(({ id }) => (at = fed.findIndex((token) => token.parent === at && token.id === id)));
}

/** The target's own token of a cycle; null where the text ends among the accepted. */
export const ownToken = ({ tokens }) => (tokens.at(-1).kind === "accepted" ? null : tokens.at(-1));
/** How many proposals were judged; none are behind an end of text among the accepted. */
const numJudged = (cycle) => (ownToken(cycle) ? cycle.proposals : cycle.tokens).length;
export const numAccepted = ({ tokens }) => tokens.filter(({ kind }) => kind === "accepted").length;

/** The cycle that tells most: most accepted before a rejection, else most accepted, else the last. */
export function tellingCycle(cycles) {
  const cut = cycles.filter((cycle) => cycle.rejected && numAccepted(cycle));
  const [best] = (cut.length ? cut : cycles).toSorted((a, b) => numAccepted(b) - numAccepted(a));
  return best && numAccepted(best) ? best : cycles.at(-1);
}

export function ruleOf({ u, score, total }) {
  if (u !== undefined) return "rejection";
  return total === undefined || total === score ? "greedy" : "coupled";
}

const ratio = (part, whole) => (whole ? part / whole : null);
const sum = (all, name) => all.reduce((total, one) => total + one[name], 0);

/** The figures of a run, by the formulas of runtime/statistics.py. */
export function figuresOf(cycles) {
  const later = cycles.slice(1); // the prefill drafts nothing and counts as no pass
  const perCycle = later.map((cycle) => ({ drafted: numJudged(cycle), accepted: numAccepted(cycle),
    beside: ownToken(cycle) ? cycle.fed.length - cycle.proposals.length : 0 })); // in other branches
  const [judged, accepted, beside] = ["drafted", "accepted", "beside"].map((name) => sum(perCycle, name));
  const count = (holds) => perCycle.filter(holds).length;
  // By place in the draft; reached is where everything before was accepted.
  const at = Array.from({ length: Math.max(0, ...perCycle.map((cycle) => cycle.drafted)) }, (_, i) => ({
    drafted: count((cycle) => cycle.drafted > i),
    reached: count((cycle) => cycle.drafted > i && cycle.accepted >= i),
    accepted: count((cycle) => cycle.accepted > i),
  }));
  const [tokens, passes, spent] = [tokensIn(cycles).length, later.length, later.map(({ ms }) => ms)];
  const told = later.findLast(({ controller }) => controller);
  const [draft, verify, other] = ["draft", "verify", "other"].map((name) => sum(spent, name));
  return {
    tokens, passes, drafted: judged + beside, accepted, at, ms: { draft, verify, other },
    totalMs: spentMs({ draft, verify, other }), tokensPerPass: ratio(tokens - 1, passes),
    acceptanceRate: ratio(accepted, judged + beside), alpha: ratio(accepted, sum(at, "reached")),
    acceptanceLength: judged ? 1 + accepted / count((cycle) => cycle.drafted) : null,
    controller: told ? `Cycle ${told.step}: ${told.controller}` : null, // its last sentence
  };
}
