// What this server has measured, as one point for "What if?": {alpha, k, c, tVerify, speedup,
// disturbed, source}. A race is the best source, as it decodes plainly, too; a run is set against
// the controller's idea of a plain pass; before any run /health tells of the server's life.

import { isDisturbed } from "./formulas.js";

/** Drafted tokens per target pass, of a block of metrics. */
const draftedPerPass = (metrics) => metrics.num_draft_tokens / metrics.target_passes;

/** A plain pass of one request in ms, as the controller has it, or null. */
function plainPass(health) {
  const costs = health?.controller?.costs_by_batch?.["1"];
  return costs && costs.pass_ms ? costs.pass_ms + costs.token_ms : null;
}

/** From an answer with a comparison; null where nothing was drafted. */
export function fromRace(answer) {
  const { costs, measured_speedup: speedup, disturbed } = answer.compare;
  if (costs.alpha === null || costs.c === null || speedup === null) return null;
  return {
    alpha: costs.alpha, c: costs.c, tVerify: costs.t_verify, speedup, disturbed,
    source: "the last race",
    k: draftedPerPass(answer.metrics.speculative_decoding),
  };
}

/** From a run's answer and figures, set against a plain pass; null without a draft, or a pass. */
export function fromRun(answer, figures, health) {
  const pass = plainPass(health);
  const later = figures.tokens - 1;
  if (!pass || !figures.drafted || !later) return null;
  const tVerify = answer.timings.verify_ms / figures.passes / pass;
  const speedup = pass / (answer.timings.predicted_ms / later);
  return {
    alpha: figures.alpha,
    k: figures.drafted / figures.passes,
    c: answer.timings.draft_ms / figures.drafted / pass,
    tVerify,
    speedup,
    disturbed: isDisturbed(speedup, later / figures.passes, tVerify),
    source: "the last run, against the controller’s plain pass",
  };
}

/** From the default drafter's life so far; null where it has none, or there is no controller. */
export function fromHealth(health) {
  const pass = plainPass(health);
  const metrics = health?.speculative_decoding?.per_drafter?.[health.drafter];
  const alpha = metrics?.conditional_acceptance_rate_per_position?.[0] ?? null;
  const step = health?.controller?.costs_by_batch?.["1"]?.draft_step_ms?.[health.drafter];
  if (!pass || alpha === null || !step || !metrics.target_passes) return null;
  const k = draftedPerPass(metrics);
  const c = step / pass;
  const tVerify = 1 + (k * health.controller.costs_by_batch["1"].token_ms) / pass;
  const speedup = metrics.tokens_per_pass / (k * c + tVerify);
  const source = `all runs of ${health.drafter} so far`;
  const disturbed = isDisturbed(speedup, metrics.tokens_per_pass, tVerify);
  return { alpha, k, c, tVerify, speedup, disturbed, source };
}
