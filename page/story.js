// The story: chapters to scroll, each with one thing to move and one question, beside one picture. All
// that it tells was recorded (recordings/), but for the cost curve, which is this server's as soon as
// it has measured one.

import { CHAPTERS } from "./chapters.js";
import { passMs } from "./curve.js";
import { byId, element, isNarrow, mayMove, slider, write } from "./elements.js";
import { Scene } from "./scene.js";
import { numAccepted, readCycles } from "./trace.js";
import { bytes, milliseconds, short, times } from "./words.js";

const [MIDDLE, LOW] = ["-45% 0px -45% 0px", "-72% 0px -18% 0px"]; // of the window: which chapter is shown
const [MODELS, FREE] = [["draft_model", "eagle3", "mtp", "dflash", "self_int8"], 1.25];

/** The cycle that shows most: some guesses accepted, one rejected, and several behind it to cut. */
function mostTelling(cycles) {
  const worth = (cycle) => {
    const [n, accepted] = [cycle.proposals.length, numAccepted(cycle)];
    return n + 3 * Math.min(accepted, 2) + (cycle.rejected ? 6 : 0) + 2 * Math.min(2, n - accepted - 1);
  };
  return cycles.reduce((a, b) => (worth(b) > worth(a) ? b : a));
}

/** What the chapters tell of a recording and a curve. */
class Data {
  #runs;
  #prompts;
  constructor(recording, curve) {
    const { health, runs, prompts } = recording;
    [this.#runs, this.#prompts, this.curve, this.weights] = [runs, prompts, curve, health.target.weight_bytes];
    this.plainMs = passMs(curve, 1);
    const names = [...new Set(runs.map(({ request }) => request.drafter))];
    this.drafter = [...MODELS, ...names].find((name) => names.includes(name));
    this.told = { cycles: this.#cycles("first", this.drafter), prompt: prompts.first };
    const later = this.told.cycles.slice(1).filter(({ proposals }) => proposals.length > 1);
    this.whole = later.find((cycle) => numAccepted(cycle) === cycle.proposals.length) ?? mostTelling(later);
    this.cut = mostTelling(later.filter((cycle) => cycle !== this.whole));
    this.tokens = this.told.cycles.flatMap(({ tokens }) => tokens);
    const sampled = runs.find(({ request }) => request.temperature > 0 && request.verification === "coupled");
    this.drawn = sampled ? this.#drawnOf(sampled) : null;
    const parts = curve.drafters?.[this.drafter];
    this.c = parts ? (parts.call_ms / 5 + parts.step_ms) / this.plainMs : 0.1;
  }
  /** The request of a recorded run, with its prompt. */
  request(prompt, drafter, temperature = 0) {
    const { request } = this.#runs.find(({ prompt: name, request: one }) => (
      name === prompt && one.drafter === drafter && one.temperature === temperature));
    return { ...request, prompt: this.#prompts[prompt] };
  }
  passMs(rows) { return passMs(this.curve, rows); }
  #run(prompt, drafter) {
    return this.#runs.find(({ prompt: name, request }) => (
      name === prompt && request.drafter === drafter && !request.temperature));
  }
  #cycles(prompt, drafter) {
    return readCycles(this.#run(prompt, drafter).events.filter((event) => "step" in event));
  }
  /** The place of a sampled run where target and drafter agree about half: {entries, tokens, text, plain}. */
  #drawnOf({ events }) {
    const [cycles, answer] = [readCycles(events.filter((event) => "step" in event)), events.at(-1)];
    const all = cycles.flatMap(({ tokens }) => tokens);
    const places = cycles.flatMap(({ distributions, first, step }) => distributions.map((entries, i) => ({
      entries: entries.filter(({ q, noise }) => q !== undefined && noise !== undefined), tokens: all.slice(0, first + i + 1), step })));
    const agreed = ({ entries }) => Math.abs(0.55 - entries.reduce((sum, { p, q }) => sum + Math.min(p, q), 0));
    const able = places.filter(({ entries }) => entries.length > 2).sort((a, b) => agreed(a) - agreed(b));
    return able.length ? { ...able[0], text: answer.text, plain: answer.compare.plain.text } : null;
  }
  /** The drafters' runs of a text, and plain decoding's: {name, endMs, passes, numTokens, at(ms)}. */
  racers(prompt) {
    const runs = this.#runs.filter(({ prompt: name, request }) => name === prompt && !request.temperature);
    const spent = ({ ms }) => (ms.draft ?? 0) + (ms.verify ?? 0) + (ms.other ?? 0);
    const racer = (name, cycles) => {
      let ms = 0;
      const timed = cycles.flatMap((cycle) => {
        if (cycle.step) ms += spent(cycle);
        return cycle.tokens.map((token) => ({ ...token, ms }));
      });
      const passes = cycles.length - 1;
      return { name, endMs: ms, passes, numTokens: timed.length, tokensPerPass: (timed.length - 1) / passes,
        at: (now) => timed.filter((token) => token.ms <= now) };
    };
    const plain = runs[0].events.filter((event) => "plain" in event).map(({ plain: one }) => ({ ...one,
      tokens: one.tokens.map((token) => ({ ...token, kind: "plain", text: one.text })) }));
    return [racer("plain", plain), ...runs.map(({ request }) => (
      racer(request.drafter, this.#cycles(prompt, request.drafter))))];
  }
  get flatWords() {
    const far = Object.keys(this.curve.pass_ms).map(Number).filter((n) => this.passMs(n) <= FREE * this.plainMs).at(-1);
    return far > 1 ? `Here a pass over ${far} positions still takes less than ${FREE} times that of one.`
      : "On this machine computing costs from the second position on.";
  }
}

export class Story {
  #scene = new Scene();
  #recording;
  #data = null;
  #states = {}; // by chapter, {at: the movers' values, chosen}
  #id = null; // of the chapter that is shown
  #timer = 0;
  #source = "";
  /** Tell a recording; its own curve is used until `measured` gives this server's. */
  tell(recording) {
    this.#recording = recording;
    const { model, recorded_at: date, machine } = recording;
    this.#source = `recorded with ${model} on ${machine}, ${date}`;
    this.#take(recording.curve);
    const seen = new IntersectionObserver((entries) => {
      const entered = entries.findLast(({ isIntersecting }) => isIntersecting);
      if (entered) this.#enter(entered.target.dataset.chapter);
    }, { rootMargin: isNarrow() ? LOW : MIDDLE });
    for (const article of document.querySelectorAll("[data-chapter]")) {
      this.#ask(article);
      seen.observe(article);
    }
    this.#enter("stream");
    addEventListener("resize", () => this.#draw());
  }
  /** Take the curve that this server has measured. */
  measured(curve) {
    if (!this.#recording || !(Object.keys(curve.pass_ms ?? {}).length > 2)) return;
    this.#take({ drafters: this.#recording.curve.drafters, ...curve }, "curve: measured on this machine");
  }
  #take(curve, words = "") {
    this.#data = new Data(this.#recording, curve);
    write("scene-source", `Text and cycles: ${this.#source}. ${words}`);
    const data = this.#data;
    const facts = { weights: bytes(data.weights), plain: milliseconds(data.plainMs), drafter: data.drafter,
      six: times(data.passMs(6) / data.plainMs), c: short(data.c), model: this.#recording.model,
      layers: this.#recording.health.target.layers };
    for (const node of document.querySelectorAll("[data-fact]")) node.textContent = facts[node.dataset.fact];
    if (this.#id) this.#draw();
  }
  #state(id) {
    const { movers, ways } = CHAPTERS[id];
    this.#states[id] ??= { chosen: null, at: {
      ...Object.fromEntries(movers(this.#data).map(([name, , , first]) => [name, first])),
      ...(ways && { [ways()[0]]: Object.keys(ways()[1])[0] }) } };
    return this.#states[id];
  }
  /** The question of a chapter, and its answers to choose from. */
  #ask(article) {
    const { chapter: id } = article.dataset;
    const chapter = CHAPTERS[id];
    const says = element("p.answer-says", { role: "status" });
    const buttons = element("div.buttons", { role: "group", "aria-label": "Your answer" });
    const choose = (at) => {
      const right = chapter.right(this.#data);
      [...buttons.children].forEach((one, i) => {
        one.setAttribute("aria-pressed", i === at);
        one.classList.toggle("is-true", i === right);
        one.classList.toggle("is-false", i === at && i !== right);
      });
      says.replaceChildren(element("b", at === right ? "Yes. " : "Not so. "), chapter.tell(this.#data));
      const state = this.#state(id);
      state.chosen = at;
      Object.assign(state.at, chapter.answered);
      this.#enter(id, chapter.play);
    };
    buttons.append(...chapter.choices(this.#data).map((words, i) => element("button.answer-button",
      { click: () => choose(i), "aria-pressed": "false" }, words)));
    const fields = chapter.run?.(this.#data);
    const run = () => dispatchEvent(new CustomEvent("try", { detail: fields }));
    article.append(element("div.question", element("h3", chapter.ask(this.#data)), buttons, says),
      fields ? element("button.quiet", { type: "button", click: run }, "See this run in the workbench") : "");
  }
  /** Show a chapter; what it plays at its start, or with the answer, begins. */
  #enter(id, play = null) {
    const chapter = CHAPTERS[id];
    const isNew = this.#id !== id;
    this.#id = byId("scene").dataset.at = id;
    for (const article of document.querySelectorAll("[data-chapter]")) {
      article.toggleAttribute("data-shown", article.dataset.chapter === id);
    }
    for (const key of byId("scene-legend").children) key.hidden = !chapter.kinds.includes(key.dataset.word);
    if (isNew) this.#drawMovers(chapter);
    const start = play ?? (isNew && this.#state(id).chosen === null ? chapter.start : null);
    if (start) this.#play(...start(this.#data));
    else this.#draw();
  }
  #drawMovers(chapter) {
    const state = this.#state(this.#id);
    const [name, ways] = chapter.ways?.() ?? [null, {}];
    const pick = (way) => {
      state.at[name] = way;
      this.#draw();
    };
    byId("scene-movers").replaceChildren(
      ...(name ? [element("div.buttons", { role: "group", "aria-label": "What is shown" },
        ...Object.entries(ways).map(([way, { words }]) => element("button", { "data-way": way, click: () => pick(way) }, words)))] : []),
      ...chapter.movers(this.#data).map(([mover, words, range]) => slider(`move-${mover}`, words, state.at[mover], range)));
    for (const [mover] of chapter.movers(this.#data)) {
      byId(`move-${mover}`).addEventListener("input", ({ target }) => {
        this.#stop();
        state.at[mover] = Number(target.value);
        this.#draw();
      });
    }
  }
  #stop() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }
  /** Let a mover go to `last` by itself, from where it is. */
  #play(name, last, ms) {
    this.#stop();
    const { at } = this.#state(this.#id);
    if (!mayMove()) at[name] = last;
    if (at[name] >= last) return this.#draw();
    this.#timer = setInterval(() => {
      at[name] += 1;
      if (at[name] >= last) this.#stop();
      this.#draw(true);
    }, ms);
    return this.#draw();
  }
  #draw(isPlayed = false) {
    const [chapter, state] = [CHAPTERS[this.#id], this.#state(this.#id)];
    const says = chapter.draw(this.#scene, this.#data, { ...state, isPlayed });
    write("scene-says", says);
    for (const [name, , [, , step]] of chapter.movers(this.#data)) {
      byId(`move-${name}`).value = state.at[name];
      write(`move-${name}-value`, step < 1 ? short(state.at[name]) : state.at[name]);
    }
    for (const button of byId("scene-movers").querySelectorAll("[data-way]")) {
      button.setAttribute("aria-pressed", Object.values(state.at).includes(button.dataset.way));
    }
  }
}
