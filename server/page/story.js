// The story: chapters to scroll beside one picture. All that it tells was recorded (recordings/), but for the
// cost curve, which is this server's as soon as it has measured one.

import { atWay, CHAPTERS, gainOf, mostK, QUESTION } from "./chapters.js";
import { bestK, costOfDraft, expectedTokens, passMs } from "./curve.js";
import { acceptanceOf, top, withNoise } from "./distribution.js";
import { byId, element, isNarrow, mayMove, reveal, slider, write } from "./elements.js";
import { Scene } from "./scene.js";
import texts from "./texts.json" with { type: "json" };
import { figuresOf, numAccepted, readCycle, readRun, spentMs, tokensIn } from "./trace.js";
import { bytes, chance, counted, milliseconds, quoted, short, times } from "./words.js";

const [MIDDLE, LOW] = ["-45% 0px -45% 0px", "-66% 0px -28% 0px"]; // of the window: which chapter is shown
const MODELS = ["draft_model", "eagle3", "mtp", "dflash", "self_int8"]; // the first that was recorded is told
const [FLAT, AGREED, ROUNDS, PLACES, SEEN] = [1.25, 0.55, 4, 4, 1.9];
/** Where the tokens behind a cycle begin, in the output. */
const endOf = ({ first, tokens }) => first + tokens.length;
const filled = (words, facts) => words.replace(/{(\w+)}/g, (_, name) => facts[name]);

/** The cycle that shows most: some guesses accepted, one rejected, and several behind it to cut. */
function mostTelling(cycles) {
  const worth = (cycle) => {
    const [n, accepted] = [cycle.proposals.length, numAccepted(cycle)];
    const words = new Set([cycle.pending, ...cycle.proposals].map(({ text }) => text));
    return n + 3 * Math.min(accepted, 2) + 6 * Boolean(cycle.rejected) + 2 * Math.min(2, n - accepted - 1)
      + 4 * (words.size > n); // no word twice
  };
  return cycles.reduce((a, b) => (worth(b) > worth(a) ? b : a));
}

/**
 * What the chapters tell: texts, cycles and their times of a recording, and what passes cost `here`, where
 * a curve was measured: {curve, weights}. Without one the recording's stands for it.
 */
class Data {
  #runs;
  #prompts;
  #recorded; // curve
  #racers = {}; // by prompt
  constructor({ health: { target }, runs, prompts, curve }, here) {
    [this.#runs, this.#prompts, this.#recorded] = [runs.map(readRun), prompts, curve];
    [this.weights, this.plainMs] = [target.weight_bytes, this.passMs(1)];
    this.here = here ?? { curve, weights: this.weights };
    const names = runs.map(({ request }) => request.drafter);
    this.drafter = [...MODELS, ...names].find((name) => names.includes(name));
    const { cycles } = this.#run("first", this.drafter);
    [this.told, this.tokens] = [{ cycles, prompt: prompts.first }, tokensIn(cycles)];
    this.played = { cycles: this.#run("new", this.drafter).cycles, prompt: prompts.new };
    const drafted = cycles.slice(1).filter(({ proposals }) => proposals.length > 1);
    const able = drafted.length ? drafted : cycles.slice(-2);
    this.whole = able.find((cycle) => numAccepted(cycle) === cycle.proposals.length) ?? mostTelling(able);
    this.cut = mostTelling(able.filter((cycle) => cycle !== this.whole || able.length === 1));
    this.behind = cycles[this.cut.step + 1];
    const sampled = this.#runs.find(({ request: r }) => r.temperature > 0 && r.verification === "coupled");
    this.drawn = sampled ? this.#drawnOf(sampled) : null;
    const costs = [this.here.curve, curve].map((one) => costOfDraft(one, this.drafter, QUESTION.k));
    const { drafted: guesses, ms } = figuresOf(cycles);
    this.c = costs.find((cost) => cost !== null) ?? (guesses ? ms.draft / guesses / this.plainMs : 0);
  }
  #run(prompt, drafter, temperature = 0) {
    const ofPrompt = this.#runs.filter((run) => run.prompt === prompt);
    return ofPrompt.find(({ request }) => request.drafter === drafter && request.temperature === temperature)
      ?? ofPrompt[0] ?? this.#runs[0];
  }
  /** The request of a recorded run, with its prompt. */
  request(prompt, drafter, temperature = 0) {
    return { ...this.#run(prompt, drafter, temperature).request, prompt: this.#prompts[prompt] };
  }
  passMs(rows) { return passMs(this.#recorded, rows); }
  /** The time of a pass here, in passes over one position. */
  factorOf(rows) { return passMs(this.here.curve, rows) / passMs(this.here.curve, 1); }
  /** Where target and drafter of a sampled run agree about half; `over`, where q is far above p. */
  #drawnOf({ cycles, answer }) {
    const written = tokensIn(cycles);
    const places = cycles.flatMap(({ distributions, first, step }) => distributions.flatMap((all, i) => {
      const entries = withNoise(all.filter(({ q, noise }) => q !== undefined && noise !== undefined));
      const [common, seen] = entries.reduce(([a, b], { p, q }) => [a + Math.min(p, q), b + p + q], [0, 0]);
      if (entries.length < 3 || seen < SEEN) return []; // others may come, of which nothing is recorded
      const differ = top(entries, "target").id !== top(entries, "draft").id;
      const liked = top(entries, "q");
      return { entries, liked, step, tokens: written.slice(0, first + i),
        fit: 0.3 * differ - Math.abs(AGREED - common), gap: Math.min(liked.p, liked.q - liked.p) };
    }));
    return places.length ? { ...top(places, "fit"), over: top(places, "gap"), text: answer.text,
      plain: answer.compare.plain.text } : null;
  }
  /**
   * What the reader's `picks` make, behind the cycles that are `judged`: the one at hand (null at the end),
   * how many picks it lacks, and what is offered for the next: what the target says there, and two likely
   * tokens. What was judged last stays in sight until the next pass is opened.
   */
  game(judged = [], picks = []) {
    const { cycles } = this.played;
    const base = judged.at(-1) ?? cycles[0];
    const [tokens, at] = [tokensIn(cycles), endOf(base)];
    const size = judged.length < ROUNDS ? Math.min(PLACES, tokens.length - 1 - at) : 0;
    if (size < 1) return { judged: judged.length ? judged : [base], cycle: null, isOpen: false };
    const cycle = this.#judged(base, picks, tokens.slice(at));
    if (picks.length === size) return this.game([...judged, cycle]);
    const said = tokens[at + picks.length];
    const chances = cycles.flatMap((one) => one.tokens.map((_, i) => one.distributions[i] ?? []));
    const others = chances[at + picks.length].filter(({ id }) => id !== said.id).slice(0, 2);
    const offered = [said, ...others].sort((a, b) => a.id - b.id);
    const isOpen = !judged.length || picks.length > 0;
    return { judged, picks, cycle, missing: size - picks.length, offered, isOpen };
  }
  /** The cycle behind `base` in which these tokens are drafted, where the target says what it has `said`. */
  #judged(base, picks, said) {
    const wrong = picks.findIndex(({ id }, i) => id !== said[i].id);
    const accepted = wrong < 0 ? picks.length : wrong;
    const kinds = [...Array(accepted).fill("accepted"), wrong < 0 ? "bonus" : "recovered"];
    const tokens = kinds.map((kind, i) => ({ id: said[i].id, kind }));
    const [, before] = base.cached;
    const texts = Object.fromEntries([...picks, ...said].map(({ id, text }) => [id, text]));
    const event = { step: base.step + 1, proposals: picks.map(({ id }) => id), tokens, texts, text: "",
      rejected: wrong < 0 ? null : { id: picks[wrong].id, kind: "rejected" }, ms: {},
      cached: [before + 1 + picks.length, before + 1 + accepted] };
    return readCycle(event, base);
  }
  /** Plain decoding and the drafters on a text: {name, endMs, passes, numTokens, tokensPerPass, at(ms)}. */
  racers(prompt) { return this.#racers[prompt] ??= this.#racersOf(prompt); } // it is asked in each frame
  /** The same without the controller, which chooses among the others. */
  rivals(prompt) { return this.racers(prompt).filter(({ name }) => name !== "auto"); }
  /** Whether all wrote the same tokens: where bits are not equal, near-ties may part them. */
  isEqual(prompt) { return new Set(this.racers(prompt).map(({ ids }) => ids)).size === 1; }
  #racersOf(prompt) {
    const runs = this.#runs.filter(({ prompt: name, request }) => name === prompt && !request.temperature);
    const racer = (name, cycles) => {
      const { passes, tokensPerPass, alpha, ms: { draft } } = figuresOf(cycles);
      let endMs = 0;
      const timed = cycles.flatMap(({ step, tokens, ms }) => {
        const begin = endMs; // a cycle's tokens share its time
        endMs += step ? spentMs(ms) : 0; // the clock starts behind the prompt
        const at = (i) => begin + ((endMs - begin) * i) / tokens.length;
        return tokens.map((token, i) => ({ ...token, seen: endMs, from: at(i), to: at(i + 1) }));
      });
      const guesses = cycles.flatMap(({ proposals }) => proposals).length;
      const costs = guesses ? `, α ${short(alpha)}, c ${short(draft / guesses / this.plainMs)}` : "";
      return { name, passes, tokensPerPass, numTokens: timed.length, ids: `${timed.map(({ id }) => id)}`,
        endMs, costs: `, ${passes} passes${costs}`, at: (now) => timed.filter(({ seen }) => seen <= now) };
    };
    const drafted = runs.map(({ request, cycles }) => racer(request.drafter, cycles));
    return [racer("plain", runs[0].plain), ...drafted];
  }
  /** How many times as fast the drafter's run of the told text is as plain decoding. */
  get gain() {
    const [plain, ...others] = this.racers("first");
    return plain.endMs / (others.find(({ name }) => name === this.drafter) ?? plain).endMs;
  }
  /** What is said with numbers of it, by the names in texts.json and in the page. */
  get facts() {
    const { here: { curve }, plainMs, whole, cut, weights, c } = this;
    const flat = Object.keys(curve.pass_ms).map(Number).filter((rows) => this.factorOf(rows) <= FLAT);
    const ranked = (text) => this.rivals(text).sort((a, b) => a.endMs - b.endMs);
    const autos = ["copy", "new"].flatMap((text) => this.racers(text).filter(({ name }) => name === "auto"));
    const [autoCopy, autoNew] = autos.map(({ endMs }) => milliseconds(endMs));
    const [copy, fresh] = ["copy", "new"].map(ranked);
    const best = (racers) => racers.slice(0, 3).map(({ name, endMs }) => `${name} ${milliseconds(endMs)}`)
      .join(", ");
    const ngram = (racers) => short((racers.find(({ name }) => name === "ngram") ?? racers[0]).tokensPerPass);
    const speed = (way) => times(gainOf(this, way));
    const [n, gave] = [whole.proposals.length, whole.tokens.length];
    const { liked = { text: "…" }, entries = [] } = this.drawn?.over ?? {};
    const { byRejection, byNoise } = entries.length ? acceptanceOf(entries) : {};
    return {
      byRejection: short(byRejection), byNoise: short(byNoise), passes: ROUNDS,
      liked: quoted(liked), likedP: chance(liked.p), likedQ: chance(liked.q),
      gain: times(this.gain), drafter: this.drafter, c: short(c), weights: bytes(weights),
      tenWeights: bytes(10 * weights), same: texts.says[this.isEqual("first") ? "equal" : "parted"],
      plain: milliseconds(plainMs), tenPlain: milliseconds(10 * plainMs), six: times(this.factorOf(6)),
      flat: counted(Math.max(...flat), "position"), guesses: counted(n, "token"), drafted: n,
      kept: numAccepted(whole), gave: counted(gave, "token"), alone: milliseconds(gave * plainMs),
      took: milliseconds(whole.ms.draft + this.passMs(n + 1)),
      wrong: quoted(cut.rejected ?? cut.tokens.at(-1)), own: quoted(cut.tokens.at(-1)),
      cut: counted(cut.cached[0] - cut.cached[1], "token"), from: cut.cached[0], to: cut.cached[1],
      five: short(expectedTokens(QUESTION.alpha, QUESTION.k)), oneUser: speed("alone"),
      eightUsers: speed("batch"), slowGuesser: speed("bad"), most: n + 1,
      eightBest: bestK(curve, atWay(this, "batch"), mostK("batch")),
      copyRanks: best(copy), newRanks: best(fresh), state: cut.recurrent ? ` ${texts.words.state}` : "",
      ngramCopy: ngram(copy), ngramNew: ngram(fresh), drafterSays: texts.drafters[this.drafter],
      auto: autoNew ? filled(texts.says.auto, { autoCopy, autoNew }) : "",
    };
  }
}

export class Story {
  #scene = new Scene();
  #recording;
  #data;
  #states = {}; // by chapter, {at: the movers' values, chosen}
  #id = null; // of the chapter that is shown
  #seen = null; // tells which chapter is read
  #timer = 0;
  #end = () => {}; // of what moves by itself
  #source; // of all numbers
  /** Tell a recording; its own curve is used until `measured` gives this server's. */
  constructor(recording) {
    this.#recording = recording;
    this.#take();
    document.querySelectorAll("[data-chapter]").forEach((article) => this.#ask(article));
    this.#watch();
    this.#enter("start");
    byId(location.hash.slice(1))?.closest("article")?.scrollIntoView(); // by now it is as high as it will be
    addEventListener("resize", () => { this.#watch(); this.#draw(); });
    for (const type of ["pointerdown", "pointermove"]) byId("scene-plot").addEventListener(type, this.#drag);
  }
  /** Enter each chapter that comes to where it is read, which is lower where the picture is above. */
  #watch() {
    this.#seen?.disconnect();
    this.#seen = new IntersectionObserver((entries) => {
      const entered = entries.findLast(({ isIntersecting }) => isIntersecting);
      if (entered) this.#enter(entered.target.dataset.chapter);
    }, { rootMargin: isNarrow() ? LOW : MIDDLE });
    document.querySelectorAll("[data-chapter]").forEach((article) => this.#seen.observe(article));
  }
  /** A figure’s handle follows the pointer that is held down; its slider is moved. */
  #drag = ({ buttons, target, clientX }) => {
    const svg = buttons & 1 && target.closest("[data-moves]");
    if (!svg) return;
    const { moves, from, to, left, right } = svg.dataset;
    const share = (clientX - svg.getBoundingClientRect().left - left) / (right - left);
    const input = byId(`move-${moves}`);
    input.value = Number(from) + (to - from) * share;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  };
  /** Take the curve that this server has measured, of the model that it has loaded. */
  measured(curve, { model, target }) {
    if (Object.keys(curve.pass_ms ?? {}).length < 3) return;
    this.#take({ curve, weights: target.weight_bytes }, ` The curve: ${model}, measured by this server.`);
  }
  #take(here = null, more = "") {
    const { model, machine, recorded_at: date } = this.#recording;
    this.#data = new Data(this.#recording, here);
    this.#source = `with ${model} on ${machine}, ${date}.${more}`;
    const { facts } = this.#data;
    for (const node of document.querySelectorAll("[data-fact]")) node.textContent = facts[node.dataset.fact];
    if (this.#id) this.#draw();
  }
  #state(id) {
    return this.#states[id] ??= { chosen: null, at: this.#firstOf(CHAPTERS[id], texts.chapters[id]) };
  }
  #firstOf({ movers, first }, { ways = {} }) {
    const [way] = Object.keys(ways);
    const values = movers(this.#data).map(([mover, , , value]) => [mover, value]);
    return { way, ...Object.fromEntries(values), ...first?.(this.#data) };
  }
  /** The question of a chapter, and its answers to choose from. */
  #ask(article) {
    const { chapter: id } = article.dataset;
    const [chapter, words] = [CHAPTERS[id], texts.chapters[id]];
    const says = element("p.answer-says", { role: "status" });
    const buttons = element("div.buttons", { role: "group", "aria-label": "Your answer" });
    const choose = (at) => {
      this.#stop();
      const [right, state] = [this.#rightOf(id), this.#state(id)];
      [...buttons.children].forEach((one, i) => {
        one.setAttribute("aria-pressed", i === at);
        one.classList.toggle("is-true", right.includes(i));
        one.classList.toggle("is-false", i === at && !right.includes(i));
      });
      const verdict = element("b", right.includes(at) ? "Yes. " : "Not so. ");
      says.replaceChildren(verdict, filled(words.tell, this.#data.facts));
      state.chosen = at;
      state.first ??= at;
      this.#count();
      Object.assign(state.at, chapter.answered?.(this.#data));
      this.#enter(id, "answer");
      if (isNarrow()) reveal(says); // below the picture
    };
    const { facts } = this.#data;
    const choices = chapter.choices?.(this.#data) ?? words.choices.map((one) => filled(one, facts));
    const press = (i) => ({ type: "button", click: () => choose(i), "aria-pressed": "false" });
    buttons.append(...choices.map((choice, i) => element("button.answer-button", press(i), choice)));
    const skip = () => byId("scene-movers").querySelector("button, input").focus();
    const question = element("h3", filled(words.ask, facts));
    article.append(element("div.question", question, buttons, element("div.verdict-place", says)),
      element("button.skip", { type: "button", click: skip }, "Move the picture"));
    article.addEventListener("focusin", ({ target }) => target.matches(":focus-visible") && this.#enter(id));
    const run = chapter.run?.(this.#data);
    const click = () => dispatchEvent(new CustomEvent("try", { detail: run }));
    if (run) article.append(element("button.quiet", { type: "button", click }, "See it in the workbench"));
  }
  #rightOf(id) { return [CHAPTERS[id].right(this.#data)].flat(); }
  /** Say how many questions were answered, and how well. */
  #count() {
    const answered = Object.entries(this.#states).filter(([, { first }]) => first !== undefined);
    const right = answered.filter(([id, { first }]) => this.#rightOf(id).includes(first));
    write("answered", `You have answered ${answered.length} of ${Object.keys(CHAPTERS).length} questions, `
      + `${right.length} of them right at the first try.`);
  }
  /** Show a chapter; what it plays at its start, or where an answer or a button was pressed, begins. */
  #enter(id, pressed = null) {
    const chapter = CHAPTERS[id];
    if (this.#id === id && !pressed) return; // what it plays goes on
    this.#stop();
    this.#id = byId("scene").dataset.at = id;
    for (const article of document.querySelectorAll("[data-chapter]")) {
      article.toggleAttribute("data-shown", article.dataset.chapter === id);
    }
    for (const key of byId("scene-legend").children) key.hidden = !chapter.kinds.includes(key.dataset.word);
    const { at, chosen } = this.#state(id);
    const plays = pressed ? chapter.play : chosen === null ? chapter.start : null;
    const [name, ...how] = plays?.(this.#data, at) ?? [];
    if (name && pressed) at[name] = how.shift();
    this.#drawMovers(chapter);
    if (name) this.#play(name, ...how);
    else this.#draw(pressed === "button");
  }
  #drawMovers(chapter) {
    const { at, chosen } = this.#state(this.#id);
    const choose = (changes, place) => {
      this.#stop();
      Object.assign(at, changes);
      this.#enter(this.#id, "button");
      const buttons = byId("scene-movers").querySelectorAll("button");
      (buttons[place] ?? buttons[0]).focus();
    };
    const hasGains = chapter.gains && !isNarrow();
    const gain = element(chosen === null ? "span.later" : "span.later.on");
    const ways = Object.entries(texts.chapters[this.#id].ways ?? {}).map(([way, words]) => (
      [words, () => ({ way }), { "data-way": way }]));
    const buttons = (chapter.presses?.(this.#data, at) ?? ways).map(([words, set, attributes], i) => (
      element("button", { type: "button", ...attributes, click: () => choose(set(), i) },
        words, hasGains ? gain.cloneNode() : null)));
    const sliders = chapter.movers(this.#data, at).map(([mover, words, range]) => {
      at[mover] = Math.min(at[mover], range[1]);
      const label = slider(`move-${mover}`, words, at[mover], range);
      label.addEventListener("input", ({ target }) => {
        this.#stop();
        at[mover] = Number(target.value);
        this.#draw();
      });
      return label;
    });
    const group = { role: "group", "aria-label": chapter.presses ? "Your guess" : "What is shown" };
    const groups = buttons.length ? [element("div.buttons", group, ...buttons)] : [];
    byId("scene-movers").replaceChildren(...groups, ...sliders);
  }
  /** Let what moves by itself be at its end. */
  #stop() {
    clearInterval(this.#timer);
    this.#end();
    this.#end = () => {};
  }
  /** Let a mover go to `last` by itself, from where it is. */
  #play(name, last, ms) {
    const { at } = this.#state(this.#id);
    if (!mayMove()) at[name] = last;
    if (at[name] < last) {
      this.#end = () => { at[name] = last; };
      this.#timer = setInterval(() => {
        at[name] += 1;
        if (at[name] >= last) this.#stop();
        this.#draw(true);
      }, ms);
    }
    this.#draw();
  }
  #draw(isPlayed = false) {
    const [chapter, state] = [CHAPTERS[this.#id], this.#state(this.#id)];
    for (const gain of byId("scene-movers").querySelectorAll("[data-way] span")) { // before the figure
      gain.textContent = ` ${chapter.gains(this.#data, gain.parentElement.dataset.way, state.at.k)}`;
    }
    const made = chapter.isComputed ? "Worked out from what was recorded" : "Recorded";
    write("scene-source", `${made} ${this.#source}`);
    const draw = () => write("scene-says", chapter.draw(this.#scene, this.#data, { ...state, isPlayed }));
    draw();
    const { scrollHeight, clientHeight } = byId("scene-plot");
    if (scrollHeight > clientHeight) draw(); // its words take more lines now
    for (const [name, , [, , step], , values] of chapter.movers(this.#data, state.at)) {
      const value = state.at[name];
      byId(`move-${name}`).value = value;
      write(`move-${name}-value`, values?.[value] ?? (step < 1 ? short(value) : value));
    }
    for (const button of byId("scene-movers").querySelectorAll("[data-way]")) {
      button.setAttribute("aria-pressed", state.at.way === button.dataset.way);
    }
  }
}
