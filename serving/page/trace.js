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
    pending: previous ? previous.tokens.at(-1) : null,
    proposals: event.proposals.map((id) => named({ id })),
    tokens: event.tokens.map((token, i) => {
      const second = event.target_top[i]?.find(({ id }) => id !== token.id);
      return { ...named(token), runnerUp: second && named(second) };
    }),
    rejected: event.rejected && named(event.rejected),
    choices: event.target_argmax.map((id) => named({ id })),
    cached: event.cached,
    controller: event.controller ?? null,
    ms: event.ms,
    text: event.text,
  };
}

/** How many proposals were judged; none are behind an end of text among the accepted. */
export function numJudged(cycle) {
  const isCut = cycle.tokens.at(-1).kind === "accepted";
  return isCut ? cycle.tokens.length : cycle.proposals.length;
}

export const numAccepted = (cycle) => cycle.tokens
  .filter((token) => token.kind === "accepted").length;
