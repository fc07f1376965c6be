// What speculation ought to bring, by the formulas of Leviathan et al. (arXiv 2211.17192), and what was
// measured on this server, each as a point for "What if?":
//
//   alpha    the chance that a drafted token is accepted, the same for every token of a draft
//   k        drafted tokens per cycle
//   c        the time of one draft step, in passes of plain decoding
//   v        what each further token adds to a pass: t_verify, a pass over k + 1 tokens, is 1 + v·k
//   rank     of its source. A race is the best one, as it decodes plainly, too.

/** Tokens that a cycle gives: 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α). Any k, whole or not. */
const expectedTokens = (alpha, k) => (alpha === 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha));

/** Expected tokens per time of a plain pass: above 1 speculation is faster. */
export const expectedSpeedup = (alpha, k, c, tVerify = 1) => expectedTokens(alpha, k) / (k * c + tVerify);

/** The alpha at which k drafts neither gain nor lose; null if even 1 would not do. */
export function breakEvenAlpha(k, c, tVerify) {
  if (expectedSpeedup(1, k, c, tVerify) < 1) return null;
  let [low, high] = [0, 1];
  for (let i = 0; i < 50; i += 1) {
    const middle = (low + high) / 2;
    if (expectedSpeedup(middle, k, c, tVerify) < 1) low = middle;
    else high = middle;
  }
  return high;
}

/** Whether a measured speed-up can only come of a busy machine: see steadiness() in formulas.py. */
const isDisturbed = (speedup, tokensPerPass, tVerify) => (
  speedup > 1.05 * tokensPerPass || tVerify < 0.7 || tVerify > 3
);

const draftedPerCycle = (metrics) => metrics.num_draft_tokens / metrics.target_passes;

/** From an answer with a comparison; none where nothing was drafted. */
export function fromRace({ compare, metrics }) {
  const { costs: { alpha, c, t_verify: tVerify }, measured_speedup: speedup, disturbed } = compare;
  if (alpha === null || c === null || speedup === null) return [];
  const [name, k] = [metrics.speculative_decoding.drafter, draftedPerCycle(metrics.speculative_decoding)];
  const told = { source: "the last race", base: "plain decoding in that race", rank: 1 };
  return [{ name, alpha, k, c, v: (tVerify - 1) / k, speedup, disturbed, ...told }];
}

/** From each drafter's life so far, against the controller's idea of a plain pass. */
export function fromHealth(health) {
  const costs = health.controller?.costs_by_batch?.["1"];
  if (!costs?.pass_ms) return [];
  const pass = costs.pass_ms;
  return Object.entries(health.speculative_decoding.per_drafter).flatMap(([name, metrics]) => {
    const alpha = metrics.conditional_acceptance_rate_per_position?.[0] ?? null;
    const step = costs.draft_step_ms?.[name];
    if (alpha === null || step === undefined || !metrics.target_passes) return [];
    const [k, c, v] = [draftedPerCycle(metrics), step / pass, costs.token_ms / pass];
    const speedup = metrics.tokens_per_pass / (k * c + 1 + v * k);
    const disturbed = isDisturbed(speedup, metrics.tokens_per_pass, 1 + v * k);
    const source = `all runs of ${name} so far, experiments too`;
    const base = "plain passes as the controller times them";
    return [{ name, alpha, k, c, v, speedup, disturbed, source, base, rank: 0 }];
  });
}
