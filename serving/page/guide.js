// Five experiments. Each asks for a prediction first, then runs real requests and tells what came.

import { button, byId, element, reveal } from "./elements.js";
import { numAccepted } from "./trace.js";
import { counted, milliseconds, short } from "./words.js";

const perPass = ({ figures }) => short(figures.tokensPerPass);
const speed = ({ figures }) => (figures.tokens - 1) / figures.totalMs;
const perToken = ({ figures }) => milliseconds(figures.totalMs / Math.max(1, figures.tokens - 1));

const COLOURS = { prompt: "red, green, blue, red, green,", max_tokens: 48 };
const STORY = { demo: "hard_story", max_tokens: 48 };
const CODE = { demo: "code_function", max_tokens: 48 };
const SAMPLED = { ...CODE, max_tokens: 32, temperature: 0.9, seed: 7, verification: "coupled" };
const PLAIN = { drafter: "none" };
const drafts = (drafter, k = 5) => ({ drafter, num_speculative_tokens: k });

/** Where a controller chooses, K is a limit. */
function limit({ figures }) {
  const k = short(figures.drafted / figures.passes);
  return figures.controller ? ` (This server’s controller may draft less: ${k} per cycle.)` : "";
}

/** The cycle that says most about truncation. */
function cutMost(cycles) {
  const cut = ({ cached: [verified, kept] }) => verified - kept;
  return cycles.reduce((a, b) => (cut(b) > cut(a) ? b : a));
}

// Each has what it asks and offers, runs(drafter) as [label, fields][], and of their results
// right(results), the choice that came true, tell(results), what is learnt, and at(results), the
// cycle to look at.
const EXPERIMENTS = [
  {
    title: "Colours, then a story",
    ask: "The n-gram drafter guesses what followed the last time. "
      + "Which text takes fewer passes for 48 tokens?",
    choices: ["a list of colours", "a story", "both the same"],
    runs: () => [
      ["colours", { ...COLOURS, ...drafts("ngram") }],
      ["story", { ...STORY, ...drafts("ngram") }],
    ],
    right([{ figures: a }, { figures: b }]) {
      if (a.passes === b.passes) return 2;
      return a.passes < b.passes ? 0 : 1;
    },
    tell: ([a, b]) => `Colours: ${perPass(a)} tokens per pass. The story: ${perPass(b)}. `
      + "A lookup guesses well what repeats, so the gain depends on the text.",
  },
  {
    title: "Raise K",
    ask: "Longer drafts may save more passes. "
      + "Does the time per token keep falling from K = 2 to 6 to 14?",
    choices: ["yes, the more the better", "no, it turns"],
    runs: (best) => [2, 6, 14].map((k) => [`K = ${k}`, { ...CODE, ...drafts(best, k) }]),
    right: ([a, b, c]) => (speed(a) < speed(b) && speed(b) < speed(c) ? 0 : 1),
    tell: (all) => `Tokens per pass: ${all.map(perPass).join(", ")}. `
      + `Time per token, one run each: ${all.map(perToken).join(", ")}. `
      + "A guess far to the right is kept only if all before it are, "
      + `and costs as much as the first.${limit(all.at(-1))}`,
  },
  {
    title: "See it lose",
    ask: "A model drafter may guess 12 tokens of a story in every cycle. "
      + "Is that faster than plain decoding?",
    choices: ["faster", "slower"],
    runs: (best) => [["drafted", { ...STORY, ...drafts(best, 12) }], ["plain", { ...STORY, ...PLAIN }]],
    right: ([a, b]) => (speed(a) < speed(b) ? 1 : 0),
    tell([a, b]) {
      const why = speed(a) < speed(b) ? "Drafting cost more than the passes that it saved."
        : "Here it did not lose: these guesses are cheap, few or good.";
      return `${perToken(a)} per token drafted, ${perToken(b)} plain, one run each. `
        + `${counted(a.figures.drafted, "guess", "guesses")} were paid for and ${a.figures.accepted} kept. `
        + why + limit(a);
    },
  },
  {
    title: "Sample",
    ask: "At temperature 0.9 tokens are drawn by chance. "
      + "With the same seed, does a drafter change the text?",
    choices: ["yes, other numbers are drawn", "no, not a token"],
    runs: (best) => [["with drafts", { ...SAMPLED, ...drafts(best) }], ["without", { ...SAMPLED, ...PLAIN }]],
    right: ([a, b]) => (a.answer.text === b.answer.text ? 1 : 0),
    tell([a, b]) {
      return a.answer.text === b.answer.text
        ? `The same text, in ${a.figures.passes} passes and in ${b.figures.passes}. `
          + "The noise belongs to the seed and the place, not to the draft."
        : "The texts differ here: this server does not compute to the bit, "
          + "so rounding decided a near-tie.";
    },
  },
  {
    title: "Read the cache",
    ask: "Five tokens are drafted, two are kept. By how much does the cache grow in that cycle?",
    choices: ["2", "3", "6"],
    runs: (best) => [["run", { ...STORY, ...drafts(best) }]],
    right: () => 1,
    tell([{ cycles }]) {
      const cycle = cutMost(cycles);
      const { step, cached: [verified, kept], before, proposals } = cycle;
      return `By 3: the pending token and the two kept. In cycle ${step} of this run the pass cached `
        + `${verified - before} tokens; ${numAccepted(cycle)} of ${proposals.length} were kept, `
        + `so the cache was cut from ${verified} to ${kept}, `
        + `${counted(kept - before, "token")} more than before.`;
    },
    at: ([{ cycles }]) => cutMost(cycles).step,
  },
];

export class Guide {
  #run;
  #look;
  #best = "ngram";
  #titles = EXPERIMENTS.map(({ title }, i) => button(title, () => this.#show(i)));
  /** `run(fields)` gives {cycles, figures, answer}, or null; `look(result, step)` shows its cycles. */
  constructor(run, look) {
    [this.#run, this.#look] = [run, look];
    byId("experiments").replaceChildren(...this.#titles.map((title) => element("li", title)));
    this.#show(0);
  }
  /** The drafters that are loaded; the model drafter among them is the experiments'. */
  set drafters(names) {
    const models = ["draft_model", "eagle3", "mtp", "self_int8"];
    this.#best = models.find((name) => names.includes(name)) ?? names[0];
  }
  #show(i) {
    this.#titles.forEach((title, at) => title.setAttribute("aria-pressed", at === i));
    const { title, ask, choices } = EXPERIMENTS[i];
    const says = element("p.says", { role: "status" });
    const buttons = element("div.buttons", { role: "group", "aria-label": "Your prediction" });
    buttons.append(...choices.map((words, at) => button(words, () => {
      [...buttons.children].forEach((one, place) => one.setAttribute("aria-pressed", place === at));
      this.#try(EXPERIMENTS[i], at, says);
    })));
    byId("experiment").replaceChildren(element("h3", `${i + 1}. ${title}`), element("p", ask), buttons, says);
  }
  async #try({ choices, right, runs, tell, at: place }, at, says) {
    const results = [];
    for (const [label, fields] of runs(this.#best)) {
      says.textContent = `Running: ${label} …`;
      const result = await this.#run(fields);
      if (!result) {
        says.textContent = "This run did not come to its end: see above.";
        return;
      }
      results.push(result);
    }
    const verdict = at === right(results) ? "As you predicted" : `You predicted “${choices[at]}”`;
    says.textContent = `${verdict}. ${tell(results)}`;
    const look = button("Look at its cycles", () => this.#look(results[0], place ? place(results) : 1));
    says.nextElementSibling?.remove();
    says.after(look);
    reveal(look);
  }
}
