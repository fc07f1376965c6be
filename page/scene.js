// The picture beside the story. Its parts stay where they are: the text so far, the pass with its
// positions and the KV cache below, a figure with axes, and a line of words. A chapter says what each shows.

import { ticks } from "./charts.js";
import { axes } from "./curve.js";
import { byId, element, isNarrow } from "./elements.js";
import { Picture } from "./picture.js";
import { bytes, chance, counted, milliseconds, quoted, visible } from "./words.js";

const FEW = 8; // positions that are drawn with their tokens; more are cells
const MOST_SHOWN = 24; // tokens of the text above the picture
const LANE = 46; // px, the height of a lane of times
const NOISE_RANGE = [-10, 4]; // of log chance + noise
const oneLine = (text) => text.replaceAll("\n", "↵");

export class Scene {
  #strip = byId("scene-text");
  #pass = byId("scene-pass");
  #plot = byId("scene-plot");
  #picture = new Picture(byId("scene-pass"));
  /** What stands in the text: the end of a prompt, and tokens with their fates. */
  strip(prompt, tokens) {
    const end = /(?<=^|\s)\S.{0,34}$/s.exec(prompt)?.[0] ?? prompt.slice(-34); // whole words where it can
    const dots = end.length < prompt.trim().length ? "… " : "";
    const before = tokens.length > MOST_SHOWN ? "… " : prompt && `${dots}${oneLine(end)} `;
    this.#strip.replaceChildren(element("span", element("span.soft", before),
      ...tokens.slice(-MOST_SHOWN).map(({ text, kind }) => element(`span.token.${kind}`, oneLine(text)))));
  }
  /** A pass over so many positions: `read` are the tokens there, `says` what the target writes after each. */
  positions(count, { weights }, { read = [], says = [], parts = bytes(weights) } = {}) {
    const isFew = count <= (isNarrow() ? 1 : FEW) && read.length;
    const slots = Array.from({ length: count }, (_, i) => (!isFew ? element("li.position")
      : element("li.place", element("span.label", count === 1 ? "it reads" : `position ${i + 1}`),
        element("span.chip", visible(read[i] ?? "")), element("span.label", "and says"),
        element("span.chip.own.plain", says[i] ? visible(says[i]) : "\u00a0"))));
    this.#pass.replaceChildren(element(isFew ? "ol.draft" : "ol.draft.cells", ...slots),
      element("p.beam.lit", element("span", `weights, ${parts}, stream past ${counted(count, "position")}`)));
  }
  nothing() { this.#pass.replaceChildren(); }
  /** Texts that grow side by side: [{name, tokens, words}]. */
  writings(all) {
    this.#pass.replaceChildren(...all.map(({ name, tokens, words }) => element("div.writing",
      element("p", element("b", name), element("span.soft", words)),
      element("p.line", ...tokens.map(({ text, kind }) => element(`span.token.${kind}`, oneLine(text)))))));
  }
  /** A cycle as far as `phase`; see phasesOf. */
  cycle(cycle, cycles, phase, isPlayed) {
    this.#picture.draw(cycle, cycles);
    this.#picture.show(phase, isPlayed);
  }
  /** Two texts, one below the other. */
  twins(texts) {
    const end = (text) => `… ${oneLine(text.slice(isNarrow() ? -40 : -100))}`;
    this.#pass.replaceChildren(...texts.map(([words, text]) => (
      element("p.twin", element("b", words), element("span", end(text))))));
  }
  /** Let `draw(box)` fill the figure, which takes this share of what room there is. */
  plot(draw, share = 0.34) {
    this.#plot.style.flexBasis = `${100 * share}%`;
    draw(this.#plot);
  }
}

/** The entry in which log p, or log q, and the noise are largest. */
export const best = (entries, name) => entries.reduce((a, b) => (
  Math.log(b[name]) + b.noise > Math.log(a[name]) + a.noise ? b : a));

/** Noise of one token under another seed: of the server's distribution, made here. */
export function gumbel(seed, id) {
  let x = Math.imul(id + 1, 0x9e3779b1) ^ Math.imul(seed, 0x85ebca6b);
  for (const factor of [0x7feb352d, 0x846ca68b]) x = Math.imul(x ^ (x >>> 15), factor);
  x ^= x >>> 16;
  return -Math.log(-Math.log(((x >>> 0) + 0.5) / 2 ** 32));
}

/** For each token log p and log q, and where the same noise moves both; what is out of sight is "◂". */
export function drawNoise(box, entries) {
  const [target, guess] = [best(entries, "p"), best(entries, "q")];
  const others = entries.filter((entry) => entry !== target && entry !== guess);
  const ranked = [...new Set([target, guess]), ...others].slice(0, isNarrow() ? 5 : 7);
  const shown = ranked.sort((a, b) => b.p - a.p);
  const label = `Log chance + noise: largest for the target ${quoted(target)}, the drafter ${quoted(guess)}`;
  const [low, high] = NOISE_RANGE;
  const xTicks = Array.from({ length: (high - low) / 2 + 1 }, (_, i) => low + 2 * i);
  const plot = axes(box, { xs: [low, high], most: 1, xTicks, xWords: "log chance + noise", label,
    yWords: "", isFlat: true, left: 200 });
  const gap = (plot.bottom - plot.top) / shown.length;
  const columns = { token: plot.left - 116, p: plot.left - 60, q: plot.left - 8 };
  for (const [name, x] of Object.entries(columns)) plot.text(x, 13, name, "end");
  shown.forEach(({ id, text, p, q, noise }, i) => {
    const y = plot.top + gap * (i + 0.5);
    plot.text(columns.token, y + 4, shortened(visible(text)), id === target.id ? "end.value" : "end");
    for (const [name, share, lift] of [["p", p, -gap / 6], ["q", q, gap / 6]]) {
      plot.text(columns[name], y + 4, chance(share), `end.${name}-words`);
      const end = share ? Math.log(share) + noise : -Infinity;
      if (end < low) {
        plot.text(plot.left + 6, y + lift + 5, "◂", `middle.${name}-mark`);
        continue;
      }
      const [from, to] = [Math.max(low, Math.log(share)), Math.min(high, end)].map(plot.x);
      plot.add(`line.${name}-line`, { x1: from, x2: to, y1: y + lift, y2: y + lift });
      const kind = id === (name === "p" ? target : guess).id ? ".best" : "";
      plot.text(to, y + lift + 6, name === "p" ? "●" : "◆", `middle.${name}-mark${kind}`);
    }
  });
}
const shortened = (text) => (text.length > 9 ? `${text.slice(0, 8)}…` : text);

/** Tokens drawn by rejection, `count` of them: how often each came, and what the last draw did. */
export function drawnByRejection(entries, count) {
  const rest = (name) => Math.max(0, 1 - entries.reduce((sum, entry) => sum + entry[name], 0));
  const all = [...entries, { id: null, text: "others", p: rest("p"), q: rest("q") }];
  const pick = (weights, at) => {
    let left = at * weights.reduce((sum, weight) => sum + weight, 0);
    return Math.max(0, weights.findIndex((weight) => (left -= weight) < 0));
  };
  let [seed, last] = [1, null];
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647; // the same draws each time
  const [counts, qs, rests] = [new Map(), all.map(({ q }) => q), all.map(({ p, q }) => Math.max(0, p - q))];
  for (let i = 0; i < count; i += 1) {
    const [guess, u] = [all[pick(qs, random())], random()];
    const isKept = u * guess.q < guess.p;
    const token = isKept ? guess : all[pick(rests, random())];
    counts.set(token.id, (counts.get(token.id) ?? 0) + 1);
    last = { guess, u, isKept, token };
  }
  return { counts, ...last };
}

/** Of each token p above q, and a mark where its share of what was drawn is: by the rule it comes to p. */
export function drawShares(box, entries, counts, draws) {
  const [first, others] = [entries.slice(0, isNarrow() ? 4 : 6), { id: null, text: "others", p: 0, q: 0 }];
  for (const name of ["p", "q"]) others[name] = 1 - first.reduce((sum, entry) => sum + entry[name], 0);
  const all = [...counts].filter(([id]) => first.every((entry) => entry.id !== id));
  const drawn = new Map([...counts, [null, all.reduce((sum, [, count]) => sum + count, 0)]]);
  const shown = [...first, others];
  const label = `Chances and shares of ${draws} draws: ${shown.map(({ id, text, p }) => (
    `${visible(text)} p ${chance(p)}, drawn ${chance((drawn.get(id) ?? 0) / draws)}`)).join("; ")}`;
  const most = Math.min(1, 0.1 + Math.max(...shown.flatMap(({ p, q }) => [p, q])));
  const plot = axes(box, { xs: [0, most], most: 1, xTicks: ticks(0, most), yWords: "",
    xWords: "chance, and share of the draws", label, isFlat: true, left: 110 });
  const gap = (plot.bottom - plot.top) / shown.length;
  shown.forEach(({ id, text, p, q }, i) => {
    const [y, height] = [plot.top + gap * i + 3, gap / 2 - 4];
    const bar = (kind, from, to, top) => plot.add(`rect.${kind}`, { x: plot.x(from), y: top, height,
      width: Math.max(0, plot.x(to) - plot.x(from)) });
    plot.text(plot.left - 10, y + gap / 2, shortened(visible(text)), "end");
    bar("p", 0, Math.min(p, q), y);
    bar("recovered", Math.min(p, q), p, y);
    bar("q", 0, q, y + height + 2);
    const share = (drawn.get(id) ?? 0) / draws;
    const [x, tip] = [plot.x(Math.min(most, share)), y + height / 2 - 8];
    plot.add("path.drawn", { d: `M${x} ${tip}l8 15h-16z` });
  });
}

/** Times as blocks in lanes: [{words, blocks: [{ms, kind, isOn, words}]}], what is to come is dashed. */
export function drawLanes(box, lanes, most) {
  const label = lanes.map(({ words }) => words).join("; ");
  const plot = axes(box, { xs: [0, most], most: 1, xTicks: ticks(0, most), xWords: "ms", yWords: "", label,
    isFlat: true, height: 24 + lanes.length * (LANE + 28) + 42 });
  lanes.forEach(({ words, blocks }, i) => {
    const top = plot.top + 4 + i * (LANE + 28);
    plot.text(plot.left, top - 6, words, "start.value");
    let at = 0;
    for (const { ms, kind, isOn = true, words: inside = "" } of blocks) {
      const [x, width] = [plot.x(at), Math.max(1, plot.x(at + ms) - plot.x(at) - 2)];
      plot.add(`rect.${kind}${isOn ? "" : ".to-come"}`, { x, y: top, width, height: LANE, rx: 4 });
      if (inside && width > 26) plot.text(x + width / 2, top + LANE / 2 + 5, inside, "middle.value");
      at += ms;
    }
  });
}

/** Texts of drafters as bars of tokens by their fates, as far as they were at `ms`. */
export function drawRace(box, lanes, ms, isTimed = true) {
  const numTokens = Math.max(...lanes.map((lane) => lane.numTokens));
  const label = lanes.map(({ name, at }) => `${name}: ${at(ms).length} tokens`).join(", ");
  const plot = axes(box, { xs: [0, numTokens], most: 1, xTicks: ticks(0, numTokens), label,
    xWords: "tokens written", yWords: isTimed ? `after ${milliseconds(ms)}` : "", isFlat: true, left: 96,
    margin: isNarrow() ? 70 : 150 });
  const height = Math.min(60, (plot.bottom - plot.top) / lanes.length - 4);
  lanes.forEach(({ name, at, endMs, passes }, i) => {
    const [tokens, y] = [at(ms), plot.top + 4 + i * (height + 4)];
    plot.text(plot.left - 6, y + height / 2 + 5, name, "end.value");
    tokens.forEach(({ kind }, j) => plot.add(`rect.fate.${kind}`, { x: plot.x(j), y, height,
      width: Math.max(1, plot.x(1) - plot.x(0) - 1) }));
    const end = [plot.right + 6, y + height / 2 + 5];
    const more = isNarrow() ? "" : `, ${passes} passes`;
    if (isTimed && ms >= endMs) plot.text(...end, `${milliseconds(endMs)}${more}`, "start.value");
  });
}
