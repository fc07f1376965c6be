// The picture beside the story. Its parts stay where they are: the text so far, the pass with its
// positions and the KV cache below, a figure with axes, and a line of words. A chapter says what each shows.

import { ticks } from "./charts.js";
import { axes } from "./curve.js";
import { byId, element, isNarrow } from "./elements.js";
import { Picture, SAYS, slotOf, stage } from "./picture.js";
import { bytes, counted, short, visible } from "./words.js";

const SLOTS = 7; // of the pass; for as many positions and more there are cells
const [MOST_SHOWN, MOST_NARROW] = [24, 36]; // tokens of the text above the picture, and letters on a phone
const [LANE, OVER, AXIS] = [60, 25, 48]; // px: a lane of times at most, the words over it, what is around all
const oneLine = (text) => text.replaceAll("\n", "↵");
/** Tokens by their fates; what ends a text is none of its words. */
const spans = (tokens) => tokens.filter(({ text }, i) => i < tokens.length - 1 || !/^<.+>$/.test(text))
  .map(({ text, kind }) => element(`span.token.${kind}`, oneLine(text)));

export class Scene {
  #strip = byId("scene-text");
  #pass = byId("scene-pass");
  #plot = byId("scene-plot");
  #picture = new Picture(byId("scene-pass"), null, SLOTS);
  /** What stands in the text: the end of a prompt, and tokens with their fates. */
  strip(prompt, tokens) {
    const end = /(?<=^|\s)\S.{0,34}$/s.exec(prompt)?.[0] ?? prompt.slice(-34); // whole words where it can
    const hasRoom = !isNarrow() || tokens.length < 3;
    const asked = prompt && hasRoom && `${end.length < prompt.trim().length ? "… " : ""}${oneLine(end)} `;
    let [length, room] = [0, isNarrow() ? MOST_NARROW : Infinity]; // in letters
    const shown = tokens.slice(-MOST_SHOWN).toReversed().filter(({ text }) => (length += text.length) < room);
    const before = shown.length < tokens.length ? "… " : asked || "";
    this.#strip.replaceChildren(element("span", element("span.soft", before), ...spans(shown.toReversed())));
  }
  /**
   * A pass over so many positions: `read` are the tokens there, `says` what the target says at each, and
   * `chances` how likely that is to be kept. Of many users each has `perUser` positions: a token and guesses.
   */
  positions(count, { weights }, { read = [], says = [], parts, chances = [], perUser } = {}) {
    const above = chances.length ? "; above: the chance that each one’s token is kept"
      : perUser ? ": each user’s token, then its guesses" : "";
    const past = isNarrow() ? "" : ` stream past ${counted(count, "position")}${above}`;
    const words = (parts || `${bytes(weights)} of weights`) + past;
    const slots = Array.from({ length: count + 1 }, (_, i) => slotOf("div.slot", {},
      i < count && element("span.label", count > 1 ? `position ${i + 1}` : "position"),
      i < count && element("span.chip", visible(read[i] ?? "…")),
      i ? element("span.chip.own.plain", visible(says[i - 1] ?? "…")) : element("span.label", SAYS)));
    const cells = Array.from({ length: count }, (_, i) => {
      const kind = perUser && i % perUser ? "drafting" : "plain";
      const share = i in chances && (chances[i] === null ? "?" : short(chances[i]));
      const cell = element(`li.position.${kind}`, share);
      cell.style.setProperty("--share", `${100 * (chances[i] ?? 0)}%`);
      return cell;
    });
    const most = isNarrow() && count < 2 ? count + 1 : SLOTS;
    const shown = read.length && count < SLOTS ? stage(slots, words, most)
      : element("ol.cells", ...cells, element("li.beam.pass", element("span", words)));
    shown.lastChild.classList.add("lit");
    shown.lastChild.classList.toggle("thin", count < 2); // its words stand beside it
    this.#pass.replaceChildren(shown);
  }
  nothing() { this.#pass.replaceChildren(); }
  /** Texts that grow side by side: [{name, tokens, words}]. */
  writings(all) {
    this.#pass.replaceChildren(...all.map(({ name, tokens, words }) => element("div.writing",
      element("p", element("b", name), element("span.soft", words)),
      element("p.line", ...spans(tokens)))));
  }
  /** A cycle as far as `phase`; see phasesOf. */
  cycle(cycle, cycles, phase, isPlayed) {
    this.#picture.draw(cycle, cycles);
    this.#picture.show(phase, isPlayed);
  }
  /** Two texts, one below the other, or the room for them. */
  twins(texts, isShown) {
    const end = (text) => `… ${oneLine(text.slice(isNarrow() ? -40 : -100).replace(/^\S*\s/, ""))}`;
    this.#pass.replaceChildren(...texts.map(([words, text]) => (
      element(isShown ? "p.twin" : "p.twin.later", element("b", words), element("span", end(text))))));
  }
  /** Let `draw(box)` fill the figure, which takes this share of what room there is. */
  plot(draw, share = 0.34) {
    this.#plot.style.flexBasis = `${100 * share}%`;
    draw(this.#plot);
  }
}

/** Times as blocks in lanes: [{words, blocks: [{ms, kind, isOn, words}]}], what is to come is dashed. */
export function drawLanes(box, lanes, most) {
  const label = lanes.map(({ words }) => words).join("; ");
  const high = Math.max(20, Math.min(LANE, (box.clientHeight - AXIS) / lanes.length - OVER));
  const plot = axes(box, { xs: [0, most], most: 1, xTicks: ticks(0, most), xWords: "ms", yWords: "", label,
    isFlat: true, height: AXIS + lanes.length * (high + OVER) });
  lanes.forEach(({ words, blocks }, i) => {
    const top = plot.top + 4 + i * (high + OVER);
    plot.text(plot.left, top - 6, words, "start.value");
    let at = 0;
    for (const { ms, kind, isOn = true, words: inside = "" } of blocks) {
      const [x, width] = [plot.x(at), Math.max(1, plot.x(at + ms) - plot.x(at) - 2)];
      plot.add(`rect.${kind}${isOn ? "" : ".to-come"}`, { x, y: top, width, height: high, rx: 4 });
      if (inside && width > 26) plot.text(x + width / 2, top + high / 2 + 5, inside, "middle.value");
      at += ms;
    }
  });
}
