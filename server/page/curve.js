// What a pass costs and what a cycle brings: the arithmetic of Leviathan et al. (arXiv 2211.17192) on
// the cost curve that was measured (GET /curve), and the two figures that draw it.
//
//   alpha    the chance that a drafted token is accepted once all before it were
//   k        drafted tokens per cycle
//   c        the time of one draft step, in passes over one position
//   batch    requests that share the pass, which then has batch · (k + 1) positions
//
// Figures are SVG by hand: there are three kinds of axes here and no zooming, which is 60 lines, where
// the smallest library with scales and axes is 60 kB that a reader of this page cannot read.

import { ticks } from "./charts.js";
import { drawing, isNarrow } from "./elements.js";
import { short, times } from "./words.js";

export const MOST_POSITIONS = 64;
export const LARGEST_K = 15;

/** Tokens that a cycle gives on average: 1 + α + … + α^k. */
export const expectedTokens = (alpha, k) => (alpha === 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha));

/**
 * The time of a pass over `rows` positions in ms: straight between measured ones. Behind the last it goes
 * on as it went over its second half, as the last step may be the end of a block.
 */
export function passMs(curve, rows) {
  const known = Object.entries(curve.pass_ms).map(([n, ms]) => [Number(n), ms]); // numbers rise by themselves
  const at = known.findIndex(([n]) => n >= rows);
  if (known.length === 1 || at === 0) return known[0][1];
  const [n1, ms1] = known.at(at);
  const [n0, ms0] = at > 0 ? known[at - 1] : known.findLast(([n]) => n <= n1 / 2) ?? known[0];
  return ms1 + ((ms1 - ms0) * (rows - n1)) / (n1 - n0);
}

/** What a cycle gives, and takes in plain passes of the same batch: with a speedup above 1 it pays. */
export function balanceOf(curve, { alpha, k, c, batch = 1, factor = () => 1 }) {
  const ms = (rows) => passMs(curve, rows) * factor(rows);
  const draft = (k * c * ms(1)) / ms(batch);
  const verify = ms(batch * (k + 1)) / ms(batch);
  const [tokens, passes] = [expectedTokens(alpha, k), draft + verify];
  return { draft, verify, passes, tokens, speedup: tokens / passes };
}

const byK = (curve, at) => Array.from({ length: LARGEST_K + 1 }, (_, k) => balanceOf(curve, { ...at, k }));

/** The acceptance from which k drafts pay; null where even a drafter that is always right would not. */
export function breakEven(curve, at) {
  const pays = (alpha) => balanceOf(curve, { ...at, alpha }).speedup >= 1;
  if (!pays(1)) return null;
  let [low, high] = [0, 1];
  for (let i = 0; i < 40; i += 1) {
    const middle = (low + high) / 2;
    [low, high] = pays(middle) ? [low, middle] : [middle, high];
  }
  return high;
}

/** The k up to `most` that pays best, 0 where none does. */
export function bestK(curve, at, most = LARGEST_K) {
  const all = byK(curve, at).slice(0, most + 1).map(({ speedup }) => speedup);
  return all.indexOf(Math.max(...all));
}

/** The time of a draft step in passes, of a drafter that was measured. */
export function costOfDraft(curve, name, k) {
  const parts = curve.drafters?.[name];
  return parts ? (parts.call_ms / Math.max(1, k) + parts.step_ms) / passMs(curve, 1) : null;
}

const LINE = 17; // px

/**
 * An SVG with two axes in `box`: {x, y, add, text, line, path, dot}, which all take values of the axes. Where
 * it `moves` a slider, [name, its value at an x], one may drag in the figure, too: see story.js.
 */
export function axes(box, { xs, most, xTicks, xWords, yWords, label, moves, isFlat = false,
  height = Math.max(140, box.clientHeight) }) {
  const width = Math.max(240, box.clientWidth);
  const [left, top, right, bottom] = isFlat ? [8, 24, width - 26, height - 24]
    : [46, 40, width - 16, height - 40]; // px
  const x = (value) => left + ((value - xs[0]) / (xs[1] - xs[0])) * (right - left);
  const y = (value) => bottom - (Math.min(value, most) / most) * (bottom - top);
  const svg = drawing("svg.plot", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": label });
  if (moves) {
    const [from, to] = xs.map(moves[1]);
    Object.assign(svg.dataset, { moves: moves[0], from, to, left, right });
  }
  const add = (...parts) => svg.append(drawing(...parts));
  const text = (at, to, words, kind = "middle") => add(`text.${kind}`, { x: at, y: to }, words);
  const line = (x1, y1, x2, y2, kind) => add(`line.${kind}`, { x1: x(x1), y1: y(y1), x2: x(x2), y2: y(y2) });
  const shape = (tag) => (points, kind) => (
    add(`${tag}.${kind}`, { points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
  const [path, area] = [shape("polyline"), shape("polygon")];
  const dot = (a, b, kind, r = 6) => add(`circle.${kind}`, { cx: x(a), cy: y(b), r });
  const note = (i, words) => text(right, 13 + LINE * i, words, "end.value"); // above, where no curve is
  for (const tick of isFlat ? [] : ticks(0, most)) {
    line(xs[0], tick, xs[1], tick, "grid");
    text(left - 6, y(tick) + 4, tick, "end");
  }
  line(xs[0], 0, xs[1], 0, "axis");
  for (const tick of xTicks) text(x(tick), bottom + 17, isFlat && tick ? `${tick} ${xWords}` : tick);
  if (!isFlat) text(right, bottom + 34, xWords, "end");
  text(4, 13 + LINE, yWords, "start");
  box.replaceChildren(svg);
  return { x, y, add, text, note, line, path, area, dot, left, top, right };
}

/**
 * Time of a pass against the positions in it. `handles` are [{rows, words}]; `guesses`, in times
 * of one position, stand at six, and hide the curve until `isShown`.
 */
export function drawTimes(box, curve, { handles, guesses = [], isShown = true, moves, factor = () => 1,
  end = MOST_POSITIONS }) {
  const one = passMs(curve, 1) * factor(1);
  const at = (rows) => passMs(curve, rows) * factor(rows);
  const all = Array.from({ length: end }, (_, i) => [i + 1, at(i + 1)]);
  const most = 1.1 * Math.max(at(end), (guesses.length ? 6.4 : 3) * one);
  const told = handles.map(({ rows, words }) => `${words}: ${times(at(rows) / one)}`);
  const label = `Milliseconds of a pass against the positions in it, 1 to ${end}. ${told.join(", ")}`;
  const plot = axes(box, { xs: [0, end], most, xTicks: [1, ...[1, 2, 4, 6, 8].map((n) => (n * end) / 8)],
    yWords: "ms of one pass", xWords: "positions in the pass", label, moves });
  const last = Math.min(end, most / one); // what as many passes over one would take
  plot.path([[1, one], [last, last * one]], "plain");
  plot.text(plot.x(last) + 8, plot.y(last * one) + 14, "one by one", "start");
  if (isShown) {
    plot.path(all, "pass");
    const measured = Object.keys(curve.pass_ms).map(Number).filter((rows) => rows <= end);
    for (const rows of measured) plot.dot(rows, at(rows), "pass", 3);
  }
  plot.dot(1, one, "pass", 4);
  if (!isShown) return guesses.forEach((guess) => plot.dot(6, guess * one, "guess", 7));
  handles.forEach(({ rows }, i) => {
    plot.line(rows, 0, rows, at(rows), "leader");
    plot.dot(rows, at(rows), "pass.handle", 7);
    plot.note(i, told[i]);
  });
}

/**
 * What a cycle gives against what it takes, over K: where the line of tokens is above both areas,
 * speculation pays. `at` has alpha, k, c, batch.
 */
function drawGain(box, curve, at, { isShown = true, moves }) {
  const [all, now] = [byK(curve, at), balanceOf(curve, at)];
  const last = all.at(-1);
  const gives = `${short(now.tokens)} tokens in ${short(now.passes)} plain passes`;
  const needed = 1.1 * Math.max(...all.flatMap(({ tokens, passes }) => [tokens, passes]));
  const most = [4, 8, 16].find((end) => end >= needed) ?? needed; // seldom another axis
  const label = `Tokens and time of a cycle over K. At K = ${at.k}: ${gives}, ${times(now.speedup)}`;
  const plot = axes(box, { xs: [0, LARGEST_K], most, xTicks: [0, 3, 6, 9, 12, 15],
    xWords: "K, drafted tokens per cycle", yWords: "tokens, passes", label, moves });
  const over = (name) => all.map((cycle, k) => [k, cycle[name]]);
  plot.area([...over("verify"), [LARGEST_K, 0], [0, 0]], "pass");
  plot.area([...over("passes"), ...over("verify").reverse()], "drafting");
  if (isShown) plot.path(over("tokens"), "accepted");
  plot.line(at.k, 0, at.k, Math.max(isShown ? now.tokens : 0, now.passes), "leader");
  if (isShown) plot.dot(at.k, now.tokens, "accepted");
  plot.dot(at.k, now.passes, "pass");
  const name = (y, dy, words) => plot.text(plot.right - 4, plot.y(y) + dy, words, "end.value");
  const hasRoom = !isNarrow();
  if (hasRoom) name(last.verify / 4, 0, "time of the pass");
  if (hasRoom && last.draft > most / 12) name(last.passes - last.draft / 2, 5, "time of guessing");
  if (!isShown) return;
  const isClear = Math.abs(last.tokens - last.verify / 4) > most / 12; // of the name of the pass
  if (hasRoom && isClear) name(last.tokens, -9, "tokens it gives");
  plot.note(0, gives);
  plot.note(1, `${times(now.speedup)} as fast`);
}

/**
 * Both figures, in two boxes: where the pass of a cycle stands on the curve, and what the cycle brings.
 * `moves` is the name of a slider of K that one may drag in them.
 */
export function drawCosts([left, right], curve, at, { moves, ...shown }) {
  const { k, batch = 1, factor } = at;
  const rows = Math.min(MOST_POSITIONS, batch * (k + 1));
  const handles = [{ rows, words: batch > 1 ? `${batch} × (K + 1)` : "K + 1" }];
  if (batch > 1) handles.unshift({ rows: batch, words: `${batch}, plain` });
  drawTimes(left, curve, { handles, factor, moves: moves && [moves, (value) => value / batch - 1] });
  drawGain(right, curve, at, { ...shown, moves: moves && [moves, (value) => value] });
}
