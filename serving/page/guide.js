// Five experiments. Each asks for a prediction first, then runs real requests and tells what came.

import { byId, element, reveal } from "./elements.js";
import { numAccepted } from "./trace.js";
import { counted, milliseconds, short } from "./words.js";

const perPass = ({ figures }) => short(figures.tokensPerPass);
const speed = ({ figures }) => (figures.tokens - 1) / figures.totalMs;
const perToken = ({ figures }) => milliseconds(figures.totalMs / Math.max(1, figures.tokens - 1));
const COLOURS = { prompt: "red, green, blue, red, green,", max_tokens: 48 };
const STORY = { demo: "hard_story", max_tokens: 48 };
const SAMPLED = { demo: "code_function", max_tokens: 32, temperature: 0.9, seed: 7 };
/** Where a controller chooses, K is a limit. */
const chosen = ({ figures }) => (figures.controller ? ` (This server’s controller may draft less: ${short(figures.drafted / figures.passes)} per cycle.)` : "");
/** The cycle that says most about truncation. */
const cutMost = (cycles) => cycles.reduce((a, b) => (b.cached[0] - b.cached[1] > a.cached[0] - a.cached[1] ? b : a));

// Each has what it asks and offers, runs(drafter) as [label, fields][], and of their results right(results), the choice
// that came true, tell(results), what is learnt, and at(results), the cycle to look at.
const EXPERIMENTS = [
  { title: "Colours, then a story",
    ask: "The n-gram drafter guesses what followed the last time. Which text takes fewer passes for 48 tokens?",
    choices: ["a list of colours", "a story", "both the same"], right: ([a, b]) => (a.figures.passes < b.figures.passes ? 0 : a.figures.passes > b.figures.passes ? 1 : 2),
    runs: () => [["colours", { ...COLOURS, drafter: "ngram", num_speculative_tokens: 5 }], ["story", { ...STORY, drafter: "ngram", num_speculative_tokens: 5 }]],
    tell: ([a, b]) => `Colours: ${perPass(a)} tokens per pass. The story: ${perPass(b)}. A lookup guesses well what repeats, so the gain depends on the text.` },
  { title: "Raise K",
    ask: "Longer drafts may save more passes. Does the time per token keep falling from K = 2 to 6 to 14?",
    choices: ["yes, the more the better", "no, it turns"],
    right: ([a, b, c]) => Number(!(speed(a) < speed(b) && speed(b) < speed(c))),
    runs: (best) => [2, 6, 14].map((k) => [`K = ${k}`, { demo: "code_function", max_tokens: 48, drafter: best, num_speculative_tokens: k }]),
    tell: (all) => `Tokens per pass: ${all.map(perPass).join(", ")}. Time per token, one run each: ${all.map(perToken).join(", ")}. `
      + "A guess far to the right is kept only if all before it are, and costs as much as the first." + chosen(all.at(-1)) },
  { title: "See it lose",
    ask: "A model drafter may guess 12 tokens of a story in every cycle. Is that faster than plain decoding?",
    choices: ["faster", "slower"], right: ([a, b]) => Number(speed(a) < speed(b)),
    runs: (best) => [["drafted", { ...STORY, drafter: best, num_speculative_tokens: 12 }], ["plain", { ...STORY, drafter: "none" }]],
    tell: ([a, b]) => `${perToken(a)} per token drafted, ${perToken(b)} plain, one run each. ${counted(a.figures.drafted, "guess", "guesses")} were paid for and `
      + `${a.figures.accepted} kept. ${speed(a) < speed(b) ? "Drafting cost more than the passes that it saved." : "Here it did not lose: these guesses are cheap, few or good."}${chosen(a)}` },
  { title: "Sample",
    ask: "At temperature 0.9 tokens are drawn by chance. With the same seed, does a drafter change the text?",
    choices: ["yes, other numbers are drawn", "no, not a token"], right: ([a, b]) => Number(a.answer.text === b.answer.text),
    runs: (best) => [["with drafts", { ...SAMPLED, drafter: best, num_speculative_tokens: 5, verification: "coupled" }], ["without", { ...SAMPLED, drafter: "none", verification: "coupled" }]],
    tell: ([a, b]) => (a.answer.text === b.answer.text ? `The same text, in ${a.figures.passes} passes and in ${b.figures.passes}. The noise belongs to the seed and the place, not to the draft.`
      : "The texts differ here: this server does not compute to the bit, so rounding decided a near-tie.") },
  { title: "Read the cache",
    ask: "Five tokens are drafted, two are kept. By how much does the cache grow in that cycle?",
    choices: ["2", "3", "6"], right: () => 1,
    runs: (best) => [["run", { ...STORY, drafter: best, num_speculative_tokens: 5 }]],
    tell: ([{ cycles }]) => {
      const cycle = cutMost(cycles);
      return `By 3: the pending token and the two kept. In cycle ${cycle.step} of this run the pass cached ${cycle.cached[0] - cycle.before} tokens; ${numAccepted(cycle)} of ${cycle.proposals.length} were kept, `
        + `so the cache was cut from ${cycle.cached[0]} to ${cycle.cached[1]}, ${counted(cycle.cached[1] - cycle.before, "token")} more than before.`;
    },
    at: ([{ cycles }]) => cutMost(cycles).step },
];

export class Guide {
  #run;
  #look;
  #best = "ngram";
  /** `run(fields)` gives {cycles, figures, answer}, or null; `look(result, step)` shows it cycle by cycle. */
  constructor(run, look) {
    [this.#run, this.#look] = [run, look];
    byId("experiments").replaceChildren(...EXPERIMENTS.map(({ title }, i) => {
      const button = element("button", { type: "button" }, title);
      button.addEventListener("click", () => this.#show(i));
      return element("li", {}, button);
    }));
    this.#show(0);
  }
  /** The drafters that are loaded; the model drafter among them is the experiments'. */
  set drafters(names) { this.#best = ["draft_model", "eagle3", "mtp", "self_int8"].find((name) => names.includes(name)) ?? names[0]; }
  #show(i) {
    [...byId("experiments").querySelectorAll("button")].forEach((button, at) => button.setAttribute("aria-pressed", at === i));
    const { title, ask, choices } = EXPERIMENTS[i];
    const says = element("p", { class: "says", role: "status" });
    const buttons = choices.map((words, at) => {
      const button = element("button", { type: "button" }, words);
      button.addEventListener("click", () => this.#try(i, at, button, says));
      return button;
    });
    byId("experiment").replaceChildren(element("h3", {}, `${i + 1}. ${title}`), element("p", {}, ask),
      element("div", { class: "buttons", role: "group", "aria-label": "Your prediction" }, ...buttons), says);
  }
  async #try(i, at, button, says) {
    const { choices, right, runs, tell, at: place } = EXPERIMENTS[i];
    const results = [];
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", other === button);
    for (const [label, fields] of runs(this.#best)) {
      says.textContent = `Running: ${label} …`;
      const result = await this.#run(fields);
      if (!result) {
        says.textContent = "This run did not come to its end: see above.";
        return;
      }
      results.push(result);
    }
    says.textContent = `${at === right(results) ? "As you predicted" : `You predicted “${choices[at]}”`}. ${tell(results)}`;
    const look = element("button", { type: "button" }, "Look at its cycles");
    look.addEventListener("click", () => this.#look(results[0], place ? place(results) : 1));
    says.after(look);
    reveal(look);
    for (const old of [...byId("experiment").querySelectorAll(".says ~ button")].slice(1)) old.remove();
  }
}
