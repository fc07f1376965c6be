// Five experiments. Each asks for a prediction first, then runs real requests and tells what came.

import { button, byId, element, reveal } from "./elements.js";
import { numAccepted } from "./trace.js";
import { counted, milliseconds, short } from "./words.js";

const ENOUGH = 1.1; // times as long as the fastest: what is nearer is too close to call

const perPass = ({ figures }) => short(figures.tokensPerPass);
const perToken = ({ figures }) => figures.totalMs / Math.max(1, figures.tokens - 1);

/** Each run three times, in turn, so that what disturbs the machine disturbs them all. */
const thrice = (runs) => [1, 2, 3].flatMap((n) => runs.map(([label, to]) => [`${label}, ${n} of 3`, to]));

/** Of `count` runs that were made thrice, the median times per token. */
const medians = (results, count) => Array.from({ length: count }, (_, at) => (
  results.filter((_, i) => i % count === at).map(perToken).sort((a, b) => a - b)[1]
));

/** The place of the shortest time; null where the second is too close. */
function fastest(times) {
  const [first, second] = [...times].sort((a, b) => a - b);
  return second < ENOUGH * first ? null : times.indexOf(first);
}

const timesWords = (times) => `Medians of the time per token: ${times.map(milliseconds).join(", ")}.`;
const CLOSE = "The best and the second differ by less than 10 %: too close to call.";

const COLOURS = { prompt: "red, green, blue, red, green,", max_tokens: 48 };
const STORY = { demo: "hard_story", max_tokens: 48 };
const CODE = { demo: "code_function", max_tokens: 48 };
const SAMPLED = { ...CODE, max_tokens: 32, temperature: 0.9, seed: 7, verification: "coupled" };
const PLAIN = { drafter: "none" };
const drafts = (drafter, k = 5) => ({ drafter, num_speculative_tokens: k });

/** The cycle that says most about truncation: some kept, the others rejected, and most cut. */
function cutMost(cycles) {
  const isBoth = (cycle) => cycle.rejected && numAccepted(cycle) > 0;
  const cut = (cycle) => cycle.cached[0] - cycle.cached[1] + (isBoth(cycle) ? 100 : 0);
  return cycles.reduce((a, b) => (cut(b) > cut(a) ? b : a));
}

// Each has what it asks and offers, runs(drafter) as [label, fields][], and of their results
// right(results), the choice that came true or null if none did, tell(results), what is learnt, and
// at(results), the cycle to look at. A drafter is named, so each draft has as many tokens as K says.
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
    runs: (best) => thrice([2, 6, 14].map((k) => [`K = ${k}`, { ...CODE, ...drafts(best, k) }])),
    right: (all) => fastest(medians(all, 3)),
    tell(all) {
      const best = fastest(medians(all, 3));
      const why = best === null ? CLOSE
        : best === 2 ? "Even far to the right enough guesses were kept to pay for the others."
          : "Longer drafts cost more than they saved: a guess far to the right is kept only if all "
            + "before it are, and costs as much as the first.";
      const passes = all.slice(0, 3).map(perPass).join(", ");
      return `Tokens per pass: ${passes}. ${timesWords(medians(all, 3))} ${why}`;
    },
  },
  {
    title: "See it lose",
    ask: "A model drafter guesses 12 tokens of a story in every cycle. "
      + "Is that faster than plain decoding?",
    choices: ["faster", "slower"],
    runs: (best) => thrice(
      [["drafted", { ...STORY, ...drafts(best, 12) }], ["plain", { ...STORY, ...PLAIN }]]),
    right: (all) => fastest(medians(all, 2)),
    tell(all) {
      const whys = ["Here it did not lose: these guesses are cheap or good.",
        "Drafting cost more than the passes that it saved."];
      const why = whys[fastest(medians(all, 2))] ?? CLOSE;
      const { drafted, accepted } = all[0].figures;
      return `Drafted, then plain. ${timesWords(medians(all, 2))} `
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
    ask: "Five tokens are drafted; some are kept, the others are rejected. "
      + "By how much does the cache grow in that cycle?",
    choices: ["by those kept", "by those kept and one", "by all five and one"],
    runs: (best) => [["run", { ...STORY, ...drafts(best) }]],
    right: () => 1,
    tell([{ cycles }]) {
      const cycle = cutMost(cycles);
      const { step, cached: [verified, kept], before, proposals } = cycle;
      return `The one is the pending token. In cycle ${step} of this run the pass cached `
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
    const named = names.filter((name) => name !== "auto");
    this.#best = models.find((name) => named.includes(name)) ?? named[0];
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
      if (!result) return says.replaceChildren("This run did not come to its end: see above.");
      results.push(result);
    }
    const came = right(results);
    const verdict = came === null ? `You predicted “${choices[at]}”; nothing is proved`
      : came === at ? "As you predicted" : `You predicted “${choices[at]}”; it was “${choices[came]}”`;
    says.textContent = `${verdict}. ${tell(results)}`;
    const look = button("Look at its cycles", () => this.#look(results[0], place ? place(results) : 1));
    says.nextElementSibling?.remove();
    says.after(look);
    return reveal(look);
  }
}
