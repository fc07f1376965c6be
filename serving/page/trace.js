// One cycle of a trace as the page keeps it: what was proposed, judged, emitted and cached, each
// token with its text. Positions that an event leaves open follow from the cycle before it.

/** A cycle from its event and the cycle before it (null for the prefill). */
export function readCycle(event, previous) {
  const named = (token) => ({ ...token, text: event.texts?.[token.id] ?? `#${token.id}` });
  return {
    step: event.step,
    first: previous ? previous.first + previous.tokens.length : 0, // of its tokens, in the output
    before: previous ? previous.cached[1] : 0,
    numPrompt: previous ? previous.numPrompt : event.cached[1],
    promptText: previous ? previous.promptText : event.prompt_text ?? null,
    promptTail: previous ? previous.promptTail : event.prompt_tail ?? [],
    pending: previous ? previous.tokens.at(-1) : null,
    proposals: event.proposals.map((id) => named({ id })),
    tokens: event.tokens.map(named),
    rejected: event.rejected && named(event.rejected),
    distributions: (event.distributions ?? []).map((entries) => entries.map(named)),
    cached: event.cached,
    controller: event.controller ?? null,
    ms: event.ms,
    text: event.text,
  };
}

/** All cycles of a list of events. */
export function readCycles(events) {
  const cycles = [];
  for (const event of events) cycles.push(readCycle(event, cycles.at(-1) ?? null));
  return cycles;
}

/** How many proposals were judged; none are behind an end of text among the accepted. */
export function numJudged(cycle) {
  const isCut = cycle.tokens.at(-1).kind === "accepted";
  return isCut ? cycle.tokens.length : cycle.proposals.length;
}

export const numAccepted = (cycle) => cycle.tokens.filter(({ kind }) => kind === "accepted").length;

/** The target's own token of a cycle; null where the text ends among the accepted. */
export const ownToken = (cycle) => (cycle.tokens.at(-1).kind === "accepted" ? null : cycle.tokens.at(-1));

/** By which rule a token was chosen: rejection, greedy or coupled. */
export function ruleOf(token) {
  if (token.u !== undefined) return "rejection";
  return token.total === undefined || token.total === token.score ? "greedy" : "coupled";
}
