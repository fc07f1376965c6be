// The page: one request at a time, from the form through a run to the pictures.
//
//   form → Run ──cycles──→ tokens, figures, cycle picture, charts
//            └──plain────→ race          answer → verdict, what if

import { TokenCard } from "./card.js";
import { drawCharts } from "./charts.js";
import { CyclePicture } from "./cycle.js";
import { byId, element } from "./elements.js";
import { Figures } from "./figures.js";
import { RequestForm } from "./form.js";
import { fromHealth, fromRace, fromRun } from "./measured.js";
import { Race } from "./race.js";
import { Run } from "./run.js";
import { getJson } from "./stream.js";
import { TokenText } from "./tokens.js";
import { readCycle } from "./trace.js";
import { WhatIf } from "./whatif.js";
import { counted, milliseconds, short, summary } from "./words.js";

// While a run streams, pictures are drawn this often: as long as a truncation is seen to take.
const PICTURE_MS = 1000;
const LOADING_MS = 500; // between two questions whether the model is loaded

const form = new RequestForm();
const text = new TokenText(new TokenCard(), (cycle) => browse(cycle.step));
const picture = new CyclePicture();
const race = new Race();
const whatIf = new WhatIf();
const number = byId("cycle-number");

let run = null; // the one under way
let mode = "idle"; // idle | running | stepping | racing
let cycles = [];
let figures = new Figures();
let answer = null; // of the last run, once it is complete
let isRace = false; // whether that was, or is, one
let follows = true; // the picture shows the newest cycle
let drawnAt = 0;

// ---------------------------------------------------------------------------------- a run

function begin(wanted) {
  showError(null);
  let request;
  try {
    request = form.request(wanted === "racing");
  } catch (error) {
    showError(error);
    return;
  }
  [cycles, figures, answer, follows, drawnAt] = [[], new Figures(), null, true, 0];
  isRace = wanted === "racing";
  text.clear(request.chat ? `${request.prompt}\n` : request.prompt);
  picture.clear();
  race.start();
  byId("warnings").replaceChildren();
  byId("whole-text").textContent = "";
  setMode(wanted);
  run = new Run(request, form.key, view, wanted === "stepping");
}

const view = {
  cycle(event, at) {
    const cycle = readCycle(event, cycles.at(-1) ?? null);
    cycles.push(cycle);
    text.add(cycle);
    figures.add(cycle);
    if (isRace) race.cycle(event, at);
  },
  plain(event, at) {
    race.plain(event, at);
  },
  answer(event) {
    answer = event;
  },
  flush() {
    text.flush();
    showFigures();
    if (isRace) race.flush();
    if (mode === "stepping" || performance.now() - drawnAt > PICTURE_MS) drawPictures();
    if (mode === "stepping" && cycles.length) say(summary(cycles.at(-1)));
  },
  ended({ state, error }) {
    run = null;
    drawPictures();
    setMode("idle");
    if (state === "failed") showError(error);
    if (state !== "finished") say(state === "stopped" ? "Stopped." : "Failed.");
    else showAnswer();
    if (state !== "failed") askHealth();
  },
};

function showAnswer() {
  const { finish_reason: reason, seed, usage, warnings } = answer;
  const passes = counted(figures.passes, "pass", "passes");
  say(`Finished (${reason}): ${counted(usage.completion_tokens, "token")} in ${passes}, `
    + `${short(figures.tokensPerPass)} tokens per pass, seed ${seed}.`);
  byId("whole-text").textContent = `The whole text: ${answer.text}`;
  byId("warnings").replaceChildren(...warnings.map((words) => element("li", {}, words)));
  if (isRace) race.finish(answer, textOf);
}

/** The text of a token id, if any cycle had it. */
function textOf(id) {
  const all = cycles.flatMap((cycle) => [...cycle.tokens, ...cycle.choices]);
  return all.find((token) => token.id === id)?.text ?? `#${id}`;
}

// -------------------------------------------------------------------------------- pictures

function showFigures() {
  const shown = {
    tokens: figures.tokens,
    passes: figures.passes,
    tokensPerPass: short(figures.tokensPerPass),
    acceptanceRate: short(figures.acceptanceRate),
    acceptanceLength: short(figures.acceptanceLength),
    time: milliseconds(figures.totalMs),
  };
  for (const [name, words] of Object.entries(shown)) {
    document.querySelector(`[data-figure=${name}]`).textContent = words;
  }
}

function drawPictures() {
  drawnAt = performance.now();
  drawCharts(figures);
  number.disabled = !cycles.length;
  number.max = Math.max(0, cycles.length - 1);
  if (follows && cycles.length) showCycle(cycles.length - 1);
}

function showCycle(step) {
  number.value = step;
  const count = `${step} of ${cycles.length - 1}${step === 0 ? ", the prefill" : ""}`;
  byId("cycle-count").textContent = count;
  number.setAttribute("aria-valuetext", `cycle ${count}`);
  picture.draw(cycles[step], text.kinds);
}

/** Show one cycle and stay with it, unless it is the newest. */
function browse(step) {
  follows = step === cycles.length - 1;
  number.max = cycles.length - 1;
  number.disabled = false;
  showCycle(step);
}

// ----------------------------------------------------------------------- words and buttons

const say = (words) => {
  byId("status").textContent = words;
};

/** An error in words, marking the field that it is about and asking for a key where one is due. */
function showError(error) {
  byId("error").replaceChildren(...(error ? [element("p", {}, error.message)] : []));
  form.mark(error?.param ?? null);
  if (error?.status === 401) form.askForKey();
}

const BEGUN = { running: "Running.", stepping: "Step by step.", racing: "Racing." };

function setMode(wanted) {
  mode = wanted;
  const isIdle = mode === "idle";
  // Not `disabled`, which would take the focus from whoever has just pressed it.
  const enable = (id, isOn) => byId(id).setAttribute("aria-disabled", !isOn);
  enable("run", isIdle || mode === "stepping");
  enable("step", mode !== "racing");
  enable("stop", !isIdle);
  enable("race", isIdle);
  byId("run").textContent = mode === "stepping" ? "Run on" : "Run";
  byId("text").setAttribute("aria-busy", !isIdle);
  if (!isIdle) say(BEGUN[mode]);
}

const onPress = (id, act) => byId(id).addEventListener("click", () => {
  if (byId(id).getAttribute("aria-disabled") !== "true") act();
});

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (mode === "idle") {
    begin("running");
  } else if (mode === "stepping") {
    setMode("running");
    follows = true;
    run.release();
  }
});
onPress("step", () => {
  if (mode === "idle") {
    begin("stepping");
  } else {
    if (mode === "running") setMode("stepping");
    follows = true;
    run.step();
  }
});
onPress("stop", () => run.stop());
onPress("race", () => begin("racing"));
number.addEventListener("input", () => browse(Number(number.value)));
addEventListener("resize", () => {
  drawCharts(figures);
  whatIf.draw();
  race.draw();
});

// ------------------------------------------------------------------------------ the server

let wasLoading = false;

/** Show what the server says of itself, with 503, too; false and an error shown if nothing. */
async function askHealth() {
  try {
    const health = await getJson("health", form.key, [200, 503]);
    if (health.status === "loading") {
      wasLoading = true;
      byId("server").textContent = `The server loads ${health.model}: ${health.stage} `
        + `(${Math.round(health.elapsed_s)} s). The page then reloads itself.`;
      setTimeout(load, LOADING_MS);
      return false;
    }
    if (wasLoading) {
      location.reload();
      return false;
    }
    const state = health.status === "ok" ? "" : ` (${health.status})`;
    byId("server").textContent = `Target: ${health.model}${state}. Drafters: `
      + `${health.drafters.join(", ")}.`;
    form.offerDrafters(health);
    whatIf.measured = measure(health);
    return true;
  } catch (error) {
    byId("server").textContent = "The server does not answer.";
    showError(error);
    return false;
  }
}

function measure(health) {
  if (answer?.compare) return fromRace(answer);
  return answer ? fromRun(answer, figures, health) : fromHealth(health);
}

async function load() {
  if (!await askHealth()) return;
  try {
    form.offerPrompts((await getJson("prompts", form.key)).prompts);
  } catch (error) {
    showError(error);
  }
}

byId("key").addEventListener("change", () => {
  showError(null);
  load();
});
setMode("idle");
drawCharts(figures);
load();
