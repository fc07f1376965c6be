// The chapters of the story. Each has one thing to move, one question, and a picture that answers it:
//
//   kinds      of what it shows, for the legend
//   movers     sliders, as [name, words, [least, most, step], first value], or `choices` of one of them
//   ask        the question, its choices, and right(data), the place of the one that is true
//   tell       what is said once it was answered
//   play       [name, last value, ms between two]: what moves by itself at the start, or with the answer
//   run        the request of the run that is shown, and its cycle
//   draw       the picture, of a state {at: the movers' values, chosen: the answer or null}

import { bestK, breakEven, cycleCost, drawGain, drawTimes, expectedTokens, MOST_POSITIONS, passMs, speedupOf }
  from "./curve.js";
import { element } from "./elements.js";
import { phasesOf } from "./picture.js";
import { best, drawLanes, drawNoise, drawRace, gumbel } from "./scene.js";
import { numAccepted } from "./trace.js";
import { bytes, counted, milliseconds, quoted, short, times } from "./words.js";

const TEN = 10;
const ROOM = 1.15; // of an axis beyond the longest lane
const EXPERTS = [8, 2]; // of a mixture, and how many of them each token takes
const BATCH = 8;
const GOOD = { alpha: 0.8, k: 5 };
const PHASE_MS = 1300;

/** Of a mixture's pass over so many positions, what it reads in weights of one over one position. */
const expertsRead = (rows) => (EXPERTS[0] * (1 - (1 - EXPERTS[1] / EXPERTS[0]) ** rows)) / EXPERTS[1];
/** Ways to lose: what is moved, and what a pass over more positions costs besides. */
const WAYS = {
  alone: { words: "one reader", alpha: 0.8 },
  batch: { words: `${BATCH} readers`, alpha: 0.8, batch: BATCH },
  hot: { words: "a surprising text", alpha: 0.3 },
  bad: { words: "a slow guesser", alpha: 0.8, slow: 0.9 },
  experts: { words: "a mixture of experts", alpha: 0.8, factor: expertsRead },
};

/** The two ways for one cycle, as lanes of times in ms. */
function cycleLanes(data, cycle, phase) {
  const [n, gave] = [cycle.proposals.length, cycle.tokens.length];
  const isEnd = phase >= phasesOf(cycle).length - 1;
  const pass = (i) => ({ ms: data.plainMs, kind: "plain", isOn: isEnd && i < gave, words: `pass ${i + 1}` });
  const draft = (i) => ({ ms: cycle.ms.draft / n, kind: "drafting", isOn: phase > i });
  const check = { ms: data.passMs(n + 1), kind: "pass", isOn: phase > n, words: "one pass" };
  return [
    { words: `one by one: ${isEnd ? counted(gave, "pass", "passes") : "a pass for each token"}`,
      blocks: Array.from({ length: n + 1 }, (_, i) => pass(i)) },
    { words: `guess and check: ${counted(n, "guess", "guesses")}, one pass`,
      blocks: [...Array.from({ length: n }, (_, i) => draft(i)), check] },
  ];
}

/** Draw a cycle as far as a phase, with the text before it and the times of both ways. */
function drawCycle(scene, data, cycle, { at: { phase }, isPlayed }) {
  const { cycles, prompt } = data.told;
  const isEnd = phase >= phasesOf(cycle).length;
  scene.strip(prompt, cycles.slice(0, cycle.step + isEnd).flatMap(({ tokens }) => tokens));
  scene.cycle(cycle, cycles, phase, isPlayed);
  const lanes = cycleLanes(data, cycle, phase);
  scene.plot((box) => drawLanes(box, lanes, ROOM * (cycle.proposals.length + 1) * data.plainMs));
  return phasesOf(cycle)[phase - 1]?.says ?? `The text ends with ${quoted(cycle.pending)}. It is chosen, but the `
    + "target has not read it yet: it is pending.";
}

const cycleMover = (cycle) => [["phase", "steps of this cycle", [0, phasesOf(cycle).length, 1], 0]];

export const CHAPTERS = {
  stream: {
    kinds: ["pass", "plain"],
    movers: () => [["tokens", "tokens to write", [1, 16, 1], 1]],
    ask: () => "The model writes ten tokens. How much does it read?",
    choices: ({ weights }) => [`${bytes(weights)}: its weights once`, `${bytes(TEN * weights)}: ten times its weights`,
      "only the ten tokens"],
    right: () => 1,
    tell: ({ weights, plainMs }) => `Ten passes read ${bytes(TEN * weights)} in ${milliseconds(TEN * plainMs)}. In each of `
      + "them a weight is read, used at one position, and forgotten.",
    play: () => ["tokens", TEN, 350],
    draw(scene, data, { at: { tokens } }) {
      const text = data.tokens.slice(0, tokens);
      scene.strip(data.told.prompt, text.map((token) => ({ ...token, kind: "plain" })));
      const [read, says] = [data.tokens[tokens - 2]?.text ?? "…", data.tokens[tokens - 1]?.text];
      scene.positions(1, data, { read: [read], says: [says] });
      const blocks = Array.from({ length: 16 }, (_, i) => ({ ms: data.plainMs, kind: "plain", isOn: i < tokens }));
      const words = `${counted(tokens, "pass", "passes")}, ${bytes(tokens * data.weights)} read, `
        + milliseconds(tokens * data.plainMs);
      scene.plot((box) => drawLanes(box, [{ words, blocks }], 16.5 * data.plainMs));
      return `${counted(tokens, "token")}, each by a pass of its own over one position.`;
    },
  },
  positions: {
    kinds: ["pass", "plain"],
    movers: () => [["rows", "positions in one pass", [1, MOST_POSITIONS, 1], 6]],
    ask: () => "One pass over six positions: how long does it take?",
    choices: () => ["as long as one, or hardly longer", "about three times as long", "six times as long"],
    right: (data) => [1.75, 4.5, Infinity].findIndex((edge) => data.passMs(6) / data.plainMs < edge),
    tell: (data) => `It takes ${times(data.passMs(6) / data.plainMs)} the time of one position. The weights are read once `
      + `for all six. ${data.flatWords}`,
    draw(scene, data, { at: { rows }, chosen }) {
      scene.strip(data.told.prompt, data.tokens.slice(0, 6).map((token) => ({ ...token, kind: "plain" })));
      const texts = data.tokens.map(({ text }) => text);
      scene.positions(rows, data, { read: texts, says: texts.slice(1) });
      const isShown = chosen !== null || rows !== 6;
      const guesses = isShown ? [] : [1, 3, 6].map((factor) => ({ times: factor, kind: "guess" }));
      const handles = [{ rows, words: counted(rows, "position") }];
      scene.plot((box) => drawTimes(box, data.curve, { handles, guesses, isShown }), 0.6);
      return isShown ? `A pass over ${counted(rows, "position")} takes ${milliseconds(data.passMs(rows))}, `
        + `${times(data.passMs(rows) / data.plainMs)} the time of one.`
        : "Three hollow marks stand at six positions. Which one is true?";
    },
  },
  guess: {
    kinds: ["drafting", "pass", "accepted", "bonus", "plain"],
    movers: (data) => cycleMover(data.whole),
    ask: (data) => `The drafter has guessed ${counted(data.whole.proposals.length, "token")}. How many will be kept?`,
    choices: (data) => Array.from({ length: data.whole.proposals.length + 1 }, (_, i) => `${i}`),
    right: (data) => numAccepted(data.whole),
    tell(data) {
      const { tokens, proposals, ms } = data.whole;
      const took = milliseconds(ms.draft + data.passMs(proposals.length + 1));
      const end = tokens.at(-1).kind === "bonus" ? " The pass also says what comes after the last: a bonus." : "";
      return `${numAccepted(data.whole)} of ${proposals.length}, as the target writes the same there.${end} `
        + `${counted(tokens.length, "token")} came in ${took}; one by one they take ${milliseconds(tokens.length * data.plainMs)}.`;
    },
    start: (data) => ["phase", data.whole.proposals.length, PHASE_MS],
    play: (data) => ["phase", phasesOf(data.whole).length, PHASE_MS],
    draw: (scene, data, state) => drawCycle(scene, data, data.whole, state),
  },
  reject: {
    kinds: ["drafting", "pass", "accepted", "rejected", "recovered", "plain"],
    movers: (data) => cycleMover(data.cut),
    ask: (data) => `The guess ${quoted(data.cut.rejected ?? data.cut.proposals.at(-1))} is not what the target would `
      + "write. What stands in its place?",
    choices: () => ["another guess of the drafter", "the target’s own token", "nothing: the cycle was in vain"],
    right: () => 1,
    tell: (data) => `${quoted(data.cut.tokens.at(-1))}, recovered. The pass says at every position what the target would `
      + "write, so its own token costs nothing more. What was guessed behind the wrong one is dropped. "
      + "So each pass gives at least one token, and every token is the target’s choice.",
    start: (data) => ["phase", data.cut.proposals.length + 1, PHASE_MS],
    play: (data) => ["phase", phasesOf(data.cut).length, PHASE_MS],
    run: (data) => ({ ...data.request("first", data.drafter), at: data.cut.step }),
    draw: (scene, data, state) => drawCycle(scene, data, data.cut, state),
  },
  cache: {
    kinds: ["drafting", "accepted", "rejected", "recovered"],
    movers: (data) => [["phase", "before the pass, after it, cut", [0, 2, 1], 0]],
    ask: (data) => `${counted(data.cut.cached[0] - data.cut.cached[1], "token")} in the cache must go. What does that cost?`,
    choices: () => ["what stays is copied", "the text is read again", "a number is lowered"],
    right: () => 2,
    tell: ({ cut: { cached: [from, to] } }) => `The length goes from ${from} to ${to}. Nothing is copied and nothing is `
      + "erased: the next pass writes over what lies behind the length.",
    start: () => ["phase", 1, PHASE_MS],
    play: () => ["phase", 2, PHASE_MS],
    draw(scene, data, { at: { phase }, isPlayed }) {
      const { cut } = data;
      const n = cut.proposals.length;
      scene.strip(data.told.prompt, data.told.cycles.slice(0, cut.step + (phase > 1)).flatMap(({ tokens }) => tokens));
      scene.cycle(cut, data.told.cycles, [n, phasesOf(cut).length - 1, Infinity][phase], isPlayed);
      scene.plot((box) => drawArray(box, cut, phase));
      const { before, cached: [verified, kept] } = cut;
      return [`Before the pass the cache holds ${counted(before, "token")}.`,
        `The pass has written ${verified - before} more: the pending token and all guesses. The length is ${verified}.`,
        `The length is ${kept}. What lies behind it no longer counts.`][phase];
    },
  },
  pays: {
    kinds: ["drafting", "pass", "accepted", "plain"],
    movers: (data) => [["alpha", "α", [0, 1, 0.01], GOOD.alpha],
      ["k", "K", [0, 15, 1], GOOD.k], ["c", "c", [0, 1, 0.01], data.c]],
    ask: () => "Four guesses of five are right (α = .8), and K = 5. How many tokens does a cycle give on average?",
    choices: () => ["6.0", "5.0", "3.7"],
    right: () => 2,
    tell: () => `${short(expectedTokens(GOOD.alpha, GOOD.k))}: the fifth guess counts only if all before it were right. `
      + "So the first gives .8 of a token, the second .64, the fifth .33, and the target’s own token comes on top.",
    draw(scene, data, { at, chosen }) {
      const isShown = chosen !== null || at.alpha !== GOOD.alpha || at.k !== GOOD.k;
      this.both(scene, data, at, isShown);
      const [least, best] = [at.k ? breakEven(data.curve, at) : null, bestK(data.curve, at)];
      const pays = !at.k ? "This is plain decoding." : least === null ? "It cannot pay, however good the guesses are."
        : `With this K and c it pays from α = ${short(least)} on.`;
      return `${pays} For this α and c, ${best ? `K = ${best} is best` : "no draft is best"}.`;
    },
    both(scene, data, at, isShown = true, handles = [{ rows: at.k + 1, words: "K + 1" }]) {
      scene.positions(Math.min(MOST_POSITIONS, handles.at(-1).rows), data);
      scene.plot((box) => {
        const [left, right] = [element("div.half"), element("div.half")];
        box.replaceChildren(left, right);
        drawTimes(left, data.curve, { handles, factor: at.factor });
        drawGain(right, data.curve, at, { isShown });
      }, 0.62);
    },
  },
  loses: {
    kinds: ["drafting", "pass", "accepted", "plain"],
    ways: () => ["way", WAYS],
    movers: () => [["k", "K", [0, 15, 1], GOOD.k]],
    ask: () => `${BATCH} readers ask at once. With five guesses each, a pass has ${BATCH * 6} positions. Do drafts `
      + "with α = .8 still pay?",
    choices: () => ["as well as for one reader", "yes, but less", "no, the gain is gone"],
    right(data) {
      const [alone, many] = [1, BATCH].map((batch) => speedupOf(data.curve, { ...GOOD, c: data.c, batch }));
      return many < 1.03 ? 2 : many > 0.93 * alone ? 0 : 1;
    },
    tell(data) {
      const [alone, many] = [1, BATCH].map((batch) => speedupOf(data.curve, { ...GOOD, c: data.c, batch }));
      return `Alone ${times(alone)}, with ${BATCH} readers ${times(many)} of plain decoding. Plain decoding already has `
        + `${BATCH} positions in each pass, and further ones are no longer free. Try the other ways, and a smaller K.`;
    },
    answered: { way: "batch" },
    draw(scene, data, { at }) {
      const { words, alpha, batch = 1, slow = null, factor } = WAYS[at.way];
      const all = { alpha, k: at.k, c: slow ?? data.c, batch, factor };
      const rows = Math.min(MOST_POSITIONS, batch * (at.k + 1));
      const handles = [...(batch > 1 ? [{ rows: batch, words: `${batch} readers, plain` }] : []),
        { rows, words: batch > 1 ? `${batch} × (K + 1)` : "K + 1" }];
      CHAPTERS.pays.both(scene, data, all, true, handles);
      const best = bestK(data.curve, all);
      const { draft, verify } = cycleCost(data.curve, all);
      const worth = `${short(expectedTokens(alpha, at.k))} tokens for ${short(draft + verify)} plain passes`;
      const why = { experts: ` Worked out: ${EXPERTS[0]} experts of which each token takes ${EXPERTS[1]}, so more `
        + "positions read more experts.", bad: " A guess takes .9 of a pass.", hot: " At a high temperature α falls." };
      return `${words}: ${worth}, ${times(speedupOf(data.curve, all))}. Best is ${best ? `K = ${best}` : "no draft at all"}.`
        + (why[at.way] ?? "");
    },
  },
  sampling: {
    kinds: ["p", "q", "accepted", "recovered"],
    movers: () => [["noise", "other noise (0: as recorded)", [0, 30, 1], 0]],
    ask: () => "Tokens are drawn by chance, with the same seed, once with drafts and once without. Are the texts the same?",
    choices: () => ["no, other numbers are drawn", "yes, token for token", "only up to the first rejection"],
    run: (data) => data.drawn && { ...data.request("new", data.drafter, 0.8), at: data.drawn.step },
    right: ({ drawn }) => (!drawn || drawn.text === drawn.plain ? 1 : 2),
    tell: () => "The noise belongs to the seed and the place in the text, not to the draft. So the target lands where it "
      + "would have landed alone, whatever was guessed.",
    draw(scene, { drawn }, { at: { noise }, chosen }) {
      if (!drawn) return "Nothing sampled was recorded with this model.";
      scene.strip("", drawn.tokens);
      scene.twins(chosen === null ? [] : [["with drafts", drawn.text], ["without", drawn.plain]]);
      const entries = drawn.entries.map((entry) => ({ ...entry, noise: noise ? gumbel(noise, entry.id) : entry.noise }));
      const [target, guess] = [best(entries, "p"), best(entries, "q")];
      scene.plot((box) => drawNoise(box, entries), 0.62);
      return `The target takes the token whose ● is furthest right, ${quoted(target)}; the drafter’s ◆ is at ${quoted(guess)}: `
        + `${target.id === guess.id ? "accepted" : `rejected, and ${quoted(target)} is written`}.`;
    },
  },
  who: {
    kinds: ["accepted", "recovered", "bonus", "plain"],
    ways: () => ["text", { copy: { words: "a copied text" }, new: { words: "a new story" } }],
    movers: (data) => [["share", "time, in % of the slowest", [0, 100, 1], 0]],
    ask: () => "The model copies a text that stands in its prompt. Who is first?",
    choices: (data) => data.racers("copy").map(({ name }) => name),
    right: (data) => data.racers("copy").map(({ endMs }) => endMs).reduce((best, ms, i, all) => (ms < all[best] ? i : best), 0),
    tell(data) {
      const [copy, fresh] = ["copy", "new"].map((text) => data.racers(text).sort((a, b) => a.endMs - b.endMs));
      const perPass = (racers) => short((racers.find(({ name }) => name === "ngram") ?? racers[0]).tokensPerPass);
      return `On the copied text ${copy[0].name}, then ${copy[1].name}; on the story ${fresh[0].name}, then `
        + `${fresh[1].name}. The lookup ngram gives ${perPass(copy)} tokens per pass on the first, ${perPass(fresh)} on the `
        + "second: it costs nothing, and finds only what stood there before. A model guesses what is new.";
    },
    play: () => ["share", 100, 60],
    draw(scene, data, { at: { text, share } }) {
      const racers = data.racers(text);
      const longest = Math.max(...racers.map(({ endMs }) => endMs));
      const ms = (share / 100) * longest;
      const first = racers.reduce((a, b) => (b.endMs < a.endMs ? b : a));
      scene.strip("", first.at(ms));
      scene.nothing();
      scene.plot((box) => drawRace(box, racers, ms, Math.max(...racers.map(({ numTokens }) => numTokens))), 0.75);
      return `${first.name} is first: ${milliseconds(first.endMs)} for ${counted(first.numTokens, "token")}; `
        + `${counted(first.passes, "pass", "passes")} of the target.`;
    },
  },
};

/** The cache as an array and its length, at one of three times of a cycle. */
function drawArray(box, { before, cached: [verified, kept], fed, pending }, phase) {
  const texts = [pending, ...fed].map(({ text }) => text);
  const length = [before, verified, kept][phase];
  const first = Math.max(0, before - 3);
  const cells = Array.from({ length: verified + 2 - first }, (_, j) => {
    const i = first + j;
    const written = i < before || (phase > 0 && i < verified);
    const text = i < before ? "…" : written ? texts[i - before] : "";
    const kind = i < before ? ".old" : !written ? ".free" : i >= length ? ".rejected" : ".accepted";
    return element(`li${kind}${i === length ? ".at-length" : ""}`, element("span", text), element("small", `${i}`));
  });
  box.replaceChildren(element("ol.array", { "aria-label": `An array with the length ${length}` }, ...cells),
    element("p.array-says", "length = ", element("b", `${length}`)));
}
