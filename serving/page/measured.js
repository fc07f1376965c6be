// What was measured on this server, each as a point for "What if?": {name, alpha, k, c, v, speedup,
// disturbed, source, rank}. v is what each further token adds to a pass: t_verify is 1 + v·k. A race is the
// best source, as it decodes plainly, too; /health tells of all runs of each drafter so far.

import { Figures } from "./figures.js";
import { expectedSpeedup, isDisturbed } from "./formulas.js";
import { readCycles } from "./trace.js";

const draftedPerCycle = (metrics) => metrics.num_draft_tokens / metrics.target_passes;

/** From an answer with a comparison; null where nothing was drafted. */
export function fromRace(answer) {
  const { costs, measured_speedup: speedup, disturbed } = answer.compare;
  const { alpha, c, t_verify: tVerify } = costs;
  if (alpha === null || c === null || speedup === null) return null;
  const metrics = answer.metrics.speculative_decoding;
  const [name, k] = [metrics.drafter, draftedPerCycle(metrics)];
  return { name, alpha, c, v: (tVerify - 1) / k, k, speedup, disturbed, source: "the last race", rank: 2 };
}

/** From each drafter's life so far, against the controller's idea of a plain pass. */
export function fromHealth(health) {
  const costs = health?.controller?.costs_by_batch?.["1"];
  if (!costs?.pass_ms) return [];
  const pass = costs.pass_ms + costs.token_ms;
  return Object.entries(health.speculative_decoding.per_drafter).flatMap(([name, metrics]) => {
    const alpha = metrics.conditional_acceptance_rate_per_position?.[0] ?? null;
    const step = costs.draft_step_ms?.[name];
    if (alpha === null || step === undefined || !metrics.target_passes) return [];
    const [k, c, v] = [draftedPerCycle(metrics), step / pass, costs.token_ms / pass];
    const speedup = metrics.tokens_per_pass / (k * c + 1 + v * k);
    const disturbed = isDisturbed(speedup, metrics.tokens_per_pass, 1 + v * k);
    return [{ name, alpha, k, c, v, speedup, disturbed, source: `all runs of ${name} so far`, rank: 1 }];
  });
}

/** From the recorded story: the drafter that told it, its acceptance counted there. */
export function fromStory({ plain_ms: plain, costs, drafter, cycles }) {
  const figures = new Figures();
  for (const cycle of readCycles(cycles)) figures.add(cycle);
  const { alpha, drafted, passes } = figures;
  const { step_ms: step, verify_ms: verify } = costs[drafter];
  if (!plain || !step || !verify || alpha === null) return [];
  const [k, c] = [drafted / passes, step / plain];
  const v = (verify / plain - 1) / 5; // its drafts have five tokens
  const speedup = expectedSpeedup(alpha, k, c, 1 + v * k);
  const disturbed = isDisturbed(speedup, Infinity, 1 + v * 5);
  const source = "the recorded cycles of the first view, by the formula";
  return [{ name: drafter, alpha, k, c, v, speedup, disturbed, source, rank: 0 }];
}
