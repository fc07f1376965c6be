// What speculation ought to bring, by the formulas of Leviathan et al. (arXiv 2211.17192).
//
//   alpha    the chance that a drafted token is accepted, the same for every token of a draft
//   k        drafted tokens per cycle
//   c        the time of one draft step, in passes of plain decoding
//   tVerify  the time of a target forward over k + 1 tokens, in the same unit; 1 = free

/** Tokens that a cycle gives: 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α). Any k, whole or not. */
export const expectedTokens = (alpha, k) => (alpha === 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha));

/** Expected tokens per time of a plain pass: above 1 speculation is faster. */
export const expectedSpeedup = (alpha, k, c, tVerify = 1) => expectedTokens(alpha, k) / (k * c + tVerify);

/** The alpha at which k drafts neither gain nor lose; null if even 1 would not do. */
export function breakEvenAlpha(k, c, tVerify = 1) {
  const cost = k * c + tVerify;
  if (k + 1 < cost) return null;
  let [low, high] = [0, 1];
  for (let i = 0; i < 50; i += 1) {
    const middle = (low + high) / 2;
    if (expectedTokens(middle, k) < cost) low = middle;
    else high = middle;
  }
  return high;
}

/** Whether a measured speed-up can only come of a busy machine: see steadiness() in formulas.py. */
export const isDisturbed = (speedup, tokensPerPass, tVerify) => (
  speedup > 1.05 * tokensPerPass || tVerify < 0.7 || tVerify > 3
);
