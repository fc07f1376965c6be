// The chapters of the story, whose words are in texts.json. Each has one thing to move, one question, and a
// picture that answers it:
//
//   kinds      of what it shows, for the legend
//   movers     sliders: [name, words, [least, most, step], first value, words of values]
//   right      the place of the choice that is true, or several; `choices`, where they are not words
//   start      [name, last value, ms between two]: what moves by itself when the chapter is reached
//   play       [name, first value, last value, ms between two]: the same with the answer, and with each of
//              the ways in texts.json, which are buttons
//   answered   values that are set with the answer
//   presses    other buttons: [words, a function that gives what is set, attributes]; `first` is set before
//   run        the request of the run that is shown, and its cycle
//   isComputed whether the picture is worked out, from what was recorded
//   draw       the picture of a state {at: values by name, chosen: the answer or null}; gives a sentence

import { bar, drawRows, row, scale } from "./charts.js";
import { balanceOf, bestK, breakEven, drawCosts, drawTimes, LARGEST_K, MOST_POSITIONS,
  passMs } from "./curve.js";
import { chanceRows, drawnByRejection, drawnWithNoise, likeliest, top } from "./distribution.js";
import { element, isNarrow } from "./elements.js";
import { phasesOf } from "./picture.js";
import { drawLanes } from "./scene.js";
import texts from "./texts.json" with { type: "json" };
import { numAccepted, tokensIn } from "./trace.js";
import { bytes, counted, milliseconds, quoted, short, times, visible } from "./words.js";

const [TEN, MOST_TOKENS, NEAR, PHASE_MS, VERDICT_MS] = [10, 16, 16, 1300, 700];
const [ROOM, NEARLY] = [1.15, 1.1]; // of an axis beyond the longest lane; of the shortest time
const [EXPERTS, TAKEN] = [8, 2]; // of a mixture, and how many of them each token takes
export const QUESTION = { alpha: 0.8, k: 5 };
// Tokens that are drawn with noise or by rejection; there the first three are steps of one draw.
const DRAWS = [0, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000];
const LAST = DRAWS.length - 2; // draws with noise end with the recorded one
const GROW_MS = 250; // a step of K that moves by itself
const [BATCH, SLOW, GAIN] = [8, 0.9, 1.02]; // users; the time of a slow guess; a gain at the least

/** What a mixture's pass over so many positions reads, in weights of one over one position. */
const expertsRead = (rows) => (EXPERTS * (1 - (1 - TAKEN / EXPERTS) ** rows)) / TAKEN;
const WAYS = { // to lose
  alone: { alpha: 0.8 }, batch: { alpha: 0.8, batch: BATCH }, hot: { alpha: 0.15 },
  bad: { alpha: 0.8, slow: SLOW }, experts: { alpha: 0.8, factor: expertsRead },
};

/** What a cycle is like in one of these ways: see curve.js. */
export function atWay(data, way, k = QUESTION.k) {
  const { alpha, batch = 1, slow = data.c, factor } = WAYS[way];
  return { alpha, k, c: slow, batch, factor };
}

/** How many times as fast a cycle is in one of these ways. */
export const gainOf = (data, way, k) => balanceOf(data.here.curve, atWay(data, way, k)).speedup;

/** The largest K that this way's users have positions for. */
export const mostK = (way) => Math.min(LARGEST_K, MOST_POSITIONS / (WAYS[way].batch ?? 1) - 1);

const UNDRAWN = "No sampled run with a drafter’s chances was recorded with this model.";
const list = (length, make) => Array.from({ length }, (_, i) => make(i));
const asPlain = (tokens) => tokens.map((token) => ({ ...token, kind: "plain" }));
/** A slider of a cycle's phases; the chapter plays the draft, and the rest with the answer. */
const playsCycle = (cycleOf) => ({
  movers: (data) => [["phase", "steps of this cycle", [0, phasesOf(cycleOf(data)).length, 1], 0]],
  start: (data) => ["phase", cycleOf(data).proposals.length, PHASE_MS],
  play: (data) => ["phase", cycleOf(data).proposals.length + 1, phasesOf(cycleOf(data)).length, PHASE_MS],
});

/** The two ways for one cycle, as lanes of times in ms. */
function cycleLanes(data, { proposals: { length: n }, tokens: { length: gave }, ms }, phase, isEnd) {
  const pass = (i) => ({ ms: data.plainMs, kind: "plain", isOn: isEnd && i < gave, words: `pass ${i + 1}` });
  const draft = (i) => ({ ms: ms.draft / n, kind: "drafting", isOn: phase > i });
  const check = { ms: data.passMs(n + 1), kind: "pass", isOn: phase > n, words: "one pass" };
  const passes = isEnd ? counted(gave, "pass", "passes") : "a pass for each token";
  return [{ words: `one by one: ${passes}`, blocks: list(n + 1, pass) },
    { words: `guess and check: ${counted(n, "guess", "guesses")}, one pass`,
      blocks: [...list(n, draft), check] }];
}

/** Draw a cycle as far as a phase, with the text before it and the times of both ways. */
function drawCycle(scene, data, cycle, { at: { phase }, isPlayed }) {
  const [{ cycles, prompt }, phases] = [data.told, phasesOf(cycle)];
  scene.strip(prompt, tokensIn(cycles.slice(0, cycle.step + (phase >= phases.length))));
  scene.cycle(cycle, cycles, phase, isPlayed);
  const lanes = cycleLanes(data, cycle, phase, phase >= phases.length - 1);
  scene.plot((box) => drawLanes(box, lanes, ROOM * (cycle.proposals.length + 1) * data.plainMs));
  return phases[phase - 1]?.gives
    ?? `The text ends with ${quoted(cycle.pending)}: chosen, but not yet read by the target. It is pending.`;
}

/** Draw what a cycle costs and brings, and the positions of its pass. */
function drawGain(scene, data, at, isShown = true) {
  const { alpha, k, batch = 1, factor } = at;
  const rows = batch * (k + 1);
  const parts = factor && `${short(TAKEN * factor(rows), 1)} of ${EXPERTS} experts`;
  const chances = batch > 1 ? [] : list(rows, (i) => (isShown ? alpha ** i : null));
  scene.strip("", []);
  scene.positions(rows, data.here, { parts, chances, perUser: batch > 1 && k + 1 });
  scene.plot((box) => {
    const halves = [element("div.half"), element("div.half")];
    box.replaceChildren(...halves);
    drawCosts(halves, data.here.curve, at, { isShown, moves: "k" });
  }, 0.62);
}

/** Rows of bars as the figure, with their words; `above` stands above them. */
const drawBars = (scene, share, [words, ...rows], ...above) => scene.plot((box) => (
  box.replaceChildren(...above, drawRows(element("div.rows"), words, ...rows))), share);

/**
 * Draw what each of `lanes`, [{name, tokens, words}], has written: a bar for each token by its fate, of a
 * token's width, or in time where the tokens say from when to when.
 */
function drawTokens(scene, share, lanes, most, unit = "tokens", ...above) {
  const bars = (tokens) => tokens.map(({ kind, from, to }, i) => (
    bar(`fate.${kind}`, (from ?? i) / most, (to ?? i + 1) / most)));
  const rows = lanes.map(({ name, tokens, words, isTold = true }) => ( // what is not told keeps its room
    row("", name, bars(tokens), element(isTold ? "span" : "span.later", words))));
  const told = lanes.map(({ name, tokens, words }) => `${name}: ${words || counted(tokens.length, "token")}`);
  drawBars(scene, share, [told.join("; "), ...rows, row(".scale", unit, scale(0, most))], ...above);
}

/** The same of racers, as far as they were at `ms`; who has ended says when, and who `waits` is not seen. */
function drawRace(scene, share, racers, ms, ...above) {
  const end = Math.max(...racers.map(({ endMs }) => endMs));
  const lanes = racers.map(({ name, at, endMs, costs, waits }) => ({ name, tokens: waits ? [] : at(ms),
    isTold: !waits && ms >= endMs, words: `${milliseconds(endMs)}${isNarrow() ? "" : costs}` }));
  drawTokens(scene, share, lanes, end, "ms", ...above);
}

export const CHAPTERS = {
  start: {
    kinds: ["plain", "accepted", "recovered", "bonus"],
    movers: () => [["share", "time, in %", [0, 100, 1], 0]],
    right: (data) => [1.25, 3, Infinity].findIndex((edge) => data.gain < edge),
    start: () => ["share", 100, 40],
    play: () => ["share", 0, 100, 60],
    draw(scene, data, { at: { share }, chosen }) {
      const names = { plain: "the model alone", [data.drafter]: "with a drafter" };
      const pair = data.racers("first").filter(({ name }) => name in names).map((lane) => (
        { ...lane, name: names[lane.name], costs: "" }));
      const ms = (share / 100) * Math.max(...pair.map(({ endMs }) => endMs));
      scene.strip(data.told.prompt, []);
      const words = (lane) => (chosen !== null && ms >= lane.endMs ? `all in ${milliseconds(lane.endMs)}`
        : counted(lane.at(ms).length, "token"));
      scene.writings(pair.map((lane, i) => (i && chosen === null
        ? { name: lane.name, tokens: [], words: "waits for your answer" }
        : { name: lane.name, tokens: lane.at(ms), words: words(lane) })));
      const isOver = chosen !== null && share === 100;
      const above = isOver ? [element("p.score", `${times(data.gain)} as fast`)] : [];
      drawRace(scene, 0.3, chosen === null ? pair.slice(0, 1) : pair, ms, ...above);
      return "One model writes one text, alone and with a drafter, on one clock.";
    },
  },
  stream: {
    kinds: ["pass", "plain"],
    movers: () => [["tokens", "tokens to write", [1, MOST_TOKENS, 1], 1]],
    right: () => 1,
    start: () => ["tokens", 6, 700],
    play: () => ["tokens", 1, TEN, 350],
    draw(scene, data, { at: { tokens } }) {
      scene.strip(data.told.prompt, asPlain(data.tokens.slice(0, tokens)));
      const [read, says] = [data.tokens[tokens - 2]?.text ?? "…", data.tokens[tokens - 1]?.text];
      scene.positions(1, data, { read: [read], says: [says] });
      const blocks = list(MOST_TOKENS, (i) => ({ ms: data.plainMs, kind: "plain", isOn: i < tokens }));
      const words = `${counted(tokens, "pass", "passes")}, ${bytes(tokens * data.weights)} read, `
        + milliseconds(tokens * data.plainMs);
      scene.plot((box) => drawLanes(box, [{ words, blocks }], (MOST_TOKENS + 0.5) * data.plainMs));
      return `${counted(tokens, "token")} by ${counted(tokens, "pass", "passes")}, each over one position.`;
    },
  },
  positions: {
    kinds: ["pass", "plain"],
    movers: () => [["rows", "positions in one pass", [1, NEAR, 1], 6]],
    right: (data) => [1.75, 4.5, Infinity].findIndex((edge) => data.factorOf(6) < edge),
    answered: () => ({ rows: 6 }),
    draw(scene, data, { at: { rows }, chosen }) {
      scene.strip(data.told.prompt, asPlain(data.tokens.slice(0, 6)));
      const read = data.tokens.map(({ text }) => text);
      scene.positions(rows, data.here, { read, says: read.slice(1) });
      const isShown = chosen !== null;
      const guesses = [1, 3, 6];
      const handles = [{ rows, words: counted(rows, "position") }];
      scene.plot((box) => drawTimes(box, data.here.curve, { handles, guesses, isShown, end: NEAR,
        moves: ["rows", (positions) => positions] }), 0.6);
      const took = milliseconds(passMs(data.here.curve, rows));
      return isShown ? `A pass over ${counted(rows, "position")} takes ${took}, `
        + `${times(data.factorOf(rows))} the time of one.`
        : "Three hollow marks stand at six positions. Which one is true?";
    },
  },
  guess: {
    kinds: ["drafting", "pass", "accepted", "bonus", "plain"],
    right: () => 2,
    ...playsCycle(({ whole }) => whole),
    draw: (scene, data, state) => drawCycle(scene, data, data.whole, state),
  },
  reject: {
    kinds: ["drafting", "pass", "accepted", "rejected", "recovered", "plain"],
    right: () => 1,
    ...playsCycle(({ cut }) => cut),
    run: (data) => ({ ...data.request("first", data.drafter), at: data.cut.step }),
    draw: (scene, data, state) => drawCycle(scene, data, data.cut, state),
  },
  you: {
    kinds: ["drafting", "pass", "accepted", "rejected", "recovered", "bonus"],
    movers: () => [],
    first: (data) => ({ game: data.game(), phase: 0 }),
    play(data, { game: { judged, isOpen }, phase }) { // what was judged, step by step
      const shown = judged.at(-1);
      const last = isOpen ? 0 : phasesOf(shown).length;
      return phase < last ? ["phase", Math.max(phase, shown.proposals.length + 1), last, VERDICT_MS] : [];
    },
    presses(data, { game }) {
      const { judged, picks, cycle, offered, isOpen } = game;
      if (!cycle) return [["Start again", () => ({ game: data.game(), phase: 0 })]];
      if (!isOpen) return [["Next pass", () => ({ game: { ...game, isOpen: true }, phase: 0 })]];
      const picked = (token) => ({ game: data.game(judged, [...picks, token]) });
      return offered.map((token) => [visible(token.text), () => picked(token), { "data-id": token.id }]);
    },
    right: () => 1,
    draw(scene, data, { at: { game: { judged, cycle, missing, isOpen }, phase }, isPlayed }) {
      const { cycles, prompt } = data.played;
      const shown = isOpen ? cycle : judged.at(-1);
      const { step } = judged[0] ?? cycle;
      const phases = phasesOf(shown);
      const counts = isOpen || phase >= phases.length ? judged : judged.slice(0, -1); // not before its end
      const [before, rivals] = [cycles.slice(0, step), cycles.slice(step, step + counts.length)];
      const [you, theirs] = [tokensIn(counts), tokensIn(rivals)];
      scene.strip(prompt, tokensIn([...before, ...counts]));
      scene.cycle(shown, [...before, ...judged, shown], isOpen ? shown.proposals.length : phase, isPlayed);
      const plain = asPlain(you.slice(0, counts.length)); // as many as passes
      const took = `in ${counted(counts.length, "pass", "passes")}`;
      const lanes = Object.entries({ you, [data.drafter]: theirs, plain }).map(([name, tokens]) => (
        { name, tokens, words: `${counted(tokens.length, "token")} ${took}` }));
      const score = element("p.score", `You ${you.length} : ${theirs.length} ${data.drafter}`);
      drawTokens(scene, 0.34, lanes, Math.max(20, you.length, theirs.length), "tokens", score);
      if (counts.length < judged.length) return phases[phase - 1].says;
      if (isOpen) return `You are the drafter: choose ${counted(missing, "more token")}.`;
      const says = `Accepted: ${numAccepted(shown)} of your ${shown.proposals.length} guesses. `
        + `The pass gives ${counted(shown.tokens.length, "token")}. `;
      if (cycle) return says;
      const lead = you.length - theirs.length;
      return `${says}You have ${counted(you.length, "token")}, ${data.drafter} has ${theirs.length}: `
        + `${lead > 0 ? "you win" : lead < 0 ? "it wins" : "a draw"}.`;
    },
  },
  cache: {
    kinds: ["drafting", "pass", "accepted", "rejected", "recovered"],
    movers: (data) => [["phase", "moment", [0, data.behind ? 3 : 2, 1], 0,
      ["before the pass", "after the pass", "after the cut", "after the next pass"]]],
    right: () => 2,
    start: () => ["phase", 1, PHASE_MS],
    answered: () => ({ phase: 2 }),
    draw(scene, { cut, behind, told: { cycles, prompt } }, { at: { phase }, isPlayed }) {
      scene.strip(prompt, tokensIn(cycles.slice(0, cut.step + (phase > 1))));
      const [n, end] = [cut.proposals.length, phasesOf(cut).length];
      scene.cycle(phase < 3 ? cut : behind, cycles, [n, end - 1, end][phase] ?? behind.proposals.length + 1,
        isPlayed);
      const { before, cached: [verified, kept] } = cut;
      const length = [before, verified, kept][phase] ?? behind.cached[0];
      scene.plot((box) => drawArray(box, cut, behind, length, phase));
      return [`Before the pass the cache holds ${counted(before, "token")}.`,
        `The pass has written ${verified - before} more: the pending token and all guesses.`,
        "What lies after the length no longer counts.",
        `The next pass has written ${length - kept} more, over what was cut.`][phase];
    },
  },
  pays: {
    isComputed: true,
    kinds: ["drafting", "pass", "accepted", "plain"],
    movers: ({ c }) => [["alpha", "α, right", [0, 1, 0.01], QUESTION.alpha],
      ["k", "K, guesses", [0, 15, 1], QUESTION.k], ["c", "c, cost", [0, 1, 0.01], c]],
    right: () => 2,
    play: (data, { k }) => ["k", 0, k, GROW_MS],
    draw(scene, data, { at, chosen }) {
      const [isShown, { curve }] = [chosen !== null, data.here];
      drawGain(scene, data, at, isShown);
      const { tokens, passes } = balanceOf(curve, at);
      if (!isShown) return `This cycle takes the time of ${short(passes)} plain passes.`;
      const [least, k] = [at.k ? breakEven(curve, at) : null, bestK(curve, at)];
      const terms = list(at.k + 1, (i) => short(at.alpha ** i)).slice(1, 4).join(" + ");
      const sum = `1 + ${terms}${at.k > 3 ? " + …" : ""}`;
      const gives = at.k ? `A cycle gives ${sum} = ${short(tokens)} tokens. ` : "";
      const pays = !at.k ? "This is plain decoding." : least === null
        ? "It cannot pay, however good the guesses are."
        : `With this K and c it pays from α = ${short(least)} on.`;
      return `${gives}${pays} For this α and c, ${k ? `K = ${k} is best` : "not to draft is best"}.`;
    },
  },
  loses: {
    isComputed: true,
    kinds: ["drafting", "pass", "accepted", "plain"],
    gains: (data, way, k) => times(gainOf(data, way, Math.min(k, mostK(way)))),
    movers: (data, { way = "alone" } = {}) => [["k", "K", [0, mostK(way), 1], QUESTION.k]],
    right(data) {
      const [many, slow] = ["batch", "bad"].map((way) => gainOf(data, way) < GAIN);
      return many && slow ? 2 : many ? 0 : slow ? 1 : 3;
    },
    answered: () => ({ way: "bad", k: QUESTION.k }),
    play: (data, { k }) => ["k", 0, k, GROW_MS],
    draw(scene, data, { at: { way, k } }) {
      const { here: { curve } } = data;
      const at = atWay(data, way, k);
      drawGain(scene, data, at);
      const [best, { tokens, passes, speedup }] = [bestK(curve, at, mostK(way)), balanceOf(curve, at)];
      const { ways, why } = texts.chapters.loses;
      return `${ways[way]}: ${short(tokens)} tokens in the time of ${short(passes)} plain passes, `
        + `${times(speedup)}. Best: ${best ? `K = ${best}` : "no drafts"}. ${why[way]}`;
    },
  },
  sampling: {
    isComputed: true,
    kinds: ["p", "q", "drafting", "accepted", "recovered"],
    movers: () => [["added", "noise added, in %", [0, 100, 1], 0],
      ["draws", "draws", [0, LAST, 1], LAST, [...DRAWS.slice(2), "the recorded one"]]],
    start: () => ["added", 100, 40],
    answered: () => ({ added: 100 }),
    play: () => ["draws", 0, LAST, 450],
    right: ({ drawn }) => (!drawn || drawn.text === drawn.plain ? 1 : 2),
    run: (data) => data.drawn && { ...data.request("new", data.drafter, 0.8), at: data.drawn.step },
    draw(scene, { drawn }, { at: { added, draws: stop }, chosen }) {
      if (!drawn) return UNDRAWN;
      scene.strip("", drawn.tokens);
      const without = drawn.text === drawn.plain ? "without: equal" : "without";
      scene.twins([["with drafts", drawn.text], [without, drawn.plain]], chosen !== null);
      const seed = stop < LAST ? DRAWS[stop + 2] : 0; // 0 is the run's
      const count = seed || (chosen === null ? 0 : DRAWS.at(-1));
      const { all, same } = drawnWithNoise(drawn.entries, count, seed, added / 100);
      const [own, guess] = [top(all, "target"), top(all, "draft")];
      const isSame = own.id === guess.id;
      const kinds = new Map([[guess.id, "drafting"], [own.id, isSame ? "accepted" : "recovered"]]);
      const shown = likeliest(all, [...kinds.keys()], isNarrow() ? 6 : undefined);
      const heads = ["chance of each token", "log chance + noise: the largest wins (ring)"];
      drawBars(scene, 0.62, chanceRows(shown, kinds),
        element("p.spread.note", ...heads.map((words) => element("span", words))));
      if (seed) {
        return `${counted(count, "draw")}. Black lines: how often the target took each token. In `
          + `${short(same)} of all draws it took the drafter’s.`;
      }
      if (added < 100) return "The noise (the line) moves the log of each chance.";
      return `Largest: ● ${quoted(own)} for the target, ◆ ${quoted(guess)} for the drafter: `
        + `${isSame ? "accepted" : "rejected"}.`;
    },
  },
  rejection: {
    isComputed: true,
    kinds: ["p", "q", "drafting", "accepted", "rejected", "recovered"],
    movers: () => [["draws", "draws; the first one step by step", [0, DRAWS.length - 1, 1], 0,
      ["the guess", "u", ...DRAWS.slice(2)]]],
    right: () => 1,
    start: () => ["draws", 2, PHASE_MS],
    play: () => ["draws", 2, DRAWS.length - 1, 450],
    draw(scene, { drawn }, { at: { draws: stop } }) {
      if (!drawn) return UNDRAWN;
      const { all, guess, u, isKept, token } = drawnByRejection(likeliest(drawn.over.entries), DRAWS[stop]);
      const [name, ratio] = [quoted(guess), short(guess.p / guess.q)];
      const [verdict, end] = isKept ? ["accepted", "accepted"] : ["rejected", "recovered"];
      const steps = [[guess.id, "drafting", "drawn from q", visible(guess.text)],
        [guess.id, verdict, "u below p / q?", `${short(u)} ${isKept ? "<" : "≥"} ${ratio}`],
        [token.id, end, isKept ? "kept" : "drawn anew", visible(token.text)]].slice(0, stop + 1);
      const slots = steps.map(([, kind, label, words]) => element("li", element(`div.slot.judged.${kind}`,
        element("span.label", label), element(`span.chip.own.${kind}`, words))));
      const kinds = new Map(stop > 2 ? [] : steps); // of the first draw
      scene.strip("", drawn.over.tokens);
      scene.nothing();
      drawBars(scene, 1, chanceRows(all, kinds, true), element("ol.steps", ...slots));
      return [`The drafter guesses ${name}: q is ${short(guess.q)}.`,
        `u is ${short(u)}. The guess is kept if u is below p / q, which is ${ratio}.`,
        isKept ? `${name} is kept.` : `${name} is rejected; ${quoted(token)} is drawn from the shaded part.`,
      ][stop] ?? `${DRAWS[stop]} draws, the last of them above. Lines show how often each token came.`;
    },
  },
  who: {
    kinds: ["accepted", "recovered", "bonus", "plain"],
    movers: () => [["share", "time, in % of the slowest", [0, 100, 1], 0]],
    start: () => ["share", 100, 20],
    choices: (data) => data.rivals("copy").map(({ name }) => name),
    right(data) {
      const ends = data.rivals("copy").map(({ endMs }) => endMs);
      return ends.flatMap((ms, i) => (ms < NEARLY * Math.min(...ends) ? [i] : [])); // a clock’s noise
    },
    play: () => ["share", 0, 100, 60],
    draw(scene, data, { at: { way, share }, chosen }) {
      const racers = data.racers(way);
      const ms = (share / 100) * Math.max(...racers.map(({ endMs }) => endMs));
      const [plain, ...others] = racers;
      const first = chosen === null ? plain : others.reduce((a, b) => (b.endMs < a.endMs ? b : a), plain);
      scene.strip("", first.at(ms));
      scene.nothing();
      drawRace(scene, 0.75, racers.map((lane, i) => ({ ...lane, waits: i > 0 && chosen === null })), ms);
      const [tokens, passes] = [counted(first.numTokens, "token"), counted(first.passes, "pass", "passes")];
      const bet = chosen === null ? "" : ` Your bet: ${data.rivals("copy")[chosen].name}.`;
      if (!bet) return `Plain decoding takes ${milliseconds(plain.endMs)}. The others wait for your answer.`;
      if (share < 100) return `${texts.says[data.isEqual(way) ? "alike" : "unlike"]}${bet}`;
      const late = racers.filter(({ endMs }) => endMs > plain.endMs).map(({ name }) => name);
      const loses = late.length ? ` Slower than plain: ${late.join(", ")}.` : "";
      return `${first.name} is first: ${milliseconds(first.endMs)} for ${tokens} in ${passes}.${loses}${bet}`;
    },
  },
};

/** The cache as an array that has this length, at one of four times of a cycle and the one behind it. */
function drawArray(box, { before, cached: [verified, kept], fed, pending }, behind, length, phase) {
  const first = Math.max(0, before - 2);
  const written = [pending, ...fed].map(({ text }, i) => [text,
    phase < 2 ? "pass" : before + i >= kept ? "rejected" : i ? "accepted" : pending.kind]);
  const next = behind ? [behind.pending, ...behind.fed].map(({ text }) => [text, "pass"]) : [];
  if (phase > 2) written.splice(kept - before, next.length, ...next);
  const cells = list(Math.max(verified, behind?.cached[0] ?? 0) + 1 - first, (j) => {
    const i = first + j;
    const [text, kind] = i < before ? ["…", "old"] : (phase && written[i - before]) || ["", "free"];
    const tag = i === length ? `li.${kind}.at-length` : `li.${kind}`;
    return element(tag, element("span", text.trim() || text), element("small", `${i}`));
  });
  box.replaceChildren(element("ol.array", { "aria-label": `An array with the length ${length}` }, ...cells),
    element("p.array-says", "length = ", element("b", `${length}`)));
}
