// Five experiments. Each asks for a prediction first, then runs real requests and tells what came.

import { byId, element, reveal } from "./elements.js";
import { figuresOf, mostTelling, numAccepted } from "./trace.js";
import { counted, milliseconds, short } from "./words.js";

const ENOUGH = 1.1; // times as long as the fastest: what is nearer is too close to call
const CLOSE = "The best and the second differ by less than 10 %: too close to call.";
// The first of these that is loaded is tried.
const MODELS = ["draft_model", "eagle3", "mtp", "dflash", "self_int8"];

const perPass = ({ figures }) => short(figures.tokensPerPass);
const perToken = ({ figures: { totalMs, tokens } }) => totalMs / Math.max(1, tokens - 1);

/** Of `count` runs that were made thrice, in turn, the median times per token. */
const medians = (results, count) => Array.from({ length: count }, (_, at) => (
  results.filter((_, i) => i % count === at).map(perToken).sort((a, b) => a - b)[1]
));

/** The place of the shortest time; null where the second is too close. */
function fastest(times) {
  const [first, second] = [...times].sort((a, b) => a - b);
  return second < ENOUGH * first ? null : times.indexOf(first);
}

const COLOURS = { prompt: "red, green, blue, red, green,", max_tokens: 48 };
const STORY = { demo: "hard_story", max_tokens: 48 };
const CODE = { demo: "code_function", max_tokens: 48 };
const SAMPLED = { ...CODE, max_tokens: 32, temperature: 0.9, seed: 7, verification: "coupled" };
const WILD = { ...STORY, temperature: 1.5, seed: 7, verification: "coupled" };
const PLAIN = { drafter: "none" };
const drafts = (drafter, k = 5) => ({ drafter, num_speculative_tokens: k, fixed_k: true });

// Each has what it asks and offers, runs(drafter) as [label, fields][], and of their results
// right(results, times), the choice that came true or null if none did, tell(results, times), what is
// learnt, and at(results), the cycle to look at. Those that are timed run thrice, in turn, so that what
// disturbs the machine disturbs them all; their `times` are medians per token.
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
    ask: "Longer drafts may save more passes, and each guess takes time. "
      + "Which K gives a token in the least time?",
    choices: ["K = 2", "K = 6", "K = 14"],
    isTimed: true,
    runs: (best) => [2, 6, 14].map((k) => [`K = ${k}`, { ...CODE, ...drafts(best, k) }]),
    right: (all, times) => fastest(times),
    tell(all, times) {
      const best = fastest(times);
      const why = best === null ? CLOSE
        : best === 2 ? "Even far to the right enough guesses were kept to pay for the others."
          : "Longer drafts cost more than they saved: a guess far to the right is kept only if all "
            + "before it are, and costs as much as the first.";
      const each = times.map((ms, i) => `${all[i].label}: ${perPass(all[i])}, ${milliseconds(ms)} a token`);
      return `Tokens per pass: ${each.join("; ")} (medians). ${why}`;
    },
  },
  {
    title: "See it lose",
    ask: "At temperature 1.5 a story is full of surprises, and in every cycle a model drafter guesses "
      + "16 tokens of it. Is that faster than plain decoding?",
    choices: ["faster", "slower"],
    isTimed: true,
    runs: (best) => [["drafted", { ...WILD, ...drafts(best, 16) }], ["plain", { ...WILD, ...PLAIN }]],
    right: (all, times) => fastest(times),
    tell(all, times) {
      const why = [
        "Here it did not lose: on this model these guesses are cheap and good enough.",
        "Drafting and checking cost more than the passes that they saved.",
      ][fastest(times)] ?? CLOSE;
      const { drafted, accepted } = all[0].figures;
      const [own, plain] = times.map(milliseconds);
      return `Medians of the time per token: drafted ${own}, plain ${plain}. `
        + `${counted(drafted, "guess", "guesses")} were paid for and ${accepted} kept. ${why}`;
    },
  },
  {
    title: "Sample",
    ask: "At temperature 0.9 tokens are drawn by chance. "
      + "With the same seed, does a drafter change the text?",
    choices: ["yes, other numbers are drawn", "no, not a token"],
    runs: (best) => [["with drafts", { ...SAMPLED, ...drafts(best) }], ["without", { ...SAMPLED, ...PLAIN }]],
    right: ([a, b]) => (a.answer.text === b.answer.text ? 1 : 0),
    tell: ([a, b]) => (a.answer.text === b.answer.text
      ? `The same text, in ${a.figures.passes} passes and in ${b.figures.passes}. `
        + "The noise belongs to the seed and the place, not to the draft."
      : "The texts differ here: this server does not compute to the bit, so rounding decided a near-tie."),
  },
  {
    title: "Read the cache",
    ask: "Five tokens are drafted; some are kept, the others are rejected. "
      + "By how much does the cache grow in that cycle?",
    choices: ["by those kept", "by those kept and one", "by all five and one"],
    runs: (best) => [["run", { ...STORY, ...drafts(best) }]],
    right: () => 1,
    tell([{ cycles }]) {
      const cycle = mostTelling(cycles);
      const { step, cached: [verified, kept], before, proposals } = cycle;
      return `The one is the pending token. In cycle ${step} of this run the pass cached `
        + `${verified - before} tokens; ${numAccepted(cycle)} of ${proposals.length} were kept, `
        + `so the cache was cut from ${verified} to ${kept}, `
        + `${counted(kept - before, "token")} more than before.`;
    },
    at: ([{ cycles }]) => mostTelling(cycles).step,
  },
];

export class Guide {
  #run;
  #look;
  #best = "ngram";
  #titles = EXPERIMENTS.map(({ title }, i) => element("button", { click: () => this.#show(i) }, title));
  /** `run(fields)` gives {cycles, figures, answer}, or null; `look(result, step)` shows its cycles. */
  constructor(run, look) {
    [this.#run, this.#look] = [run, look];
    byId("experiments").append(...this.#titles.map((title) => element("li", title)));
    this.#show(0);
  }
  /** The drafters that are loaded. */
  set drafters(names) {
    this.#best = [...MODELS, ...names].find((name) => names.includes(name) && name !== "auto");
  }
  #show(i) {
    this.#titles.forEach((title, at) => title.setAttribute("aria-pressed", at === i));
    const { title, ask, choices } = EXPERIMENTS[i];
    const says = element("p.says", { role: "status" });
    const buttons = element("div.buttons", { role: "group", "aria-label": "Your prediction" });
    const choose = (at) => {
      [...buttons.children].forEach((one, place) => one.setAttribute("aria-pressed", place === at));
      this.#try(EXPERIMENTS[i], at, says);
    };
    buttons.append(...choices.map((words, at) => element("button", { click: () => choose(at) }, words)));
    const head = element("h3", `${i + 1}. ${title}`);
    byId("experiment").replaceChildren(head, element("p", ask), buttons, says);
  }
  async #try({ choices, isTimed, right, runs, tell, at: place }, at, says) {
    const [results, wanted] = [[], runs(this.#best)];
    says.nextElementSibling?.remove();
    for (const round of isTimed ? [1, 2, 3] : [1]) {
      for (const [label, fields] of wanted) {
        says.textContent = `Running: ${label}${isTimed ? `, ${round} of 3` : ""} …`;
        const result = await this.#run(fields);
        if (!result) return says.replaceChildren("This run did not come to its end: see above.");
        results.push({ ...result, label, figures: figuresOf(result.cycles) });
      }
    }
    const times = medians(results, wanted.length);
    const came = right(results, times);
    const verdict = came === null ? `You predicted “${choices[at]}”; nothing is proved`
      : came === at ? "As you predicted" : `You predicted “${choices[at]}”; it was “${choices[came]}”`;
    says.textContent = `${verdict}. ${tell(results, times)}`;
    const press = () => this.#look(results[0], place ? place(results) : 1);
    const look = element("button", { click: press }, "Look at its cycles");
    says.after(look);
    return reveal(look);
  }
}
