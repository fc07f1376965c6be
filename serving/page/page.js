// The page: a story first, then one request at a time through its views.
//
//   form → begin → Run ──cycles──→ session {cycles, figures, text} → the cycle, the charts
//                   └──plain────→ race       answer → verdict, what if, the address
//
// A session is what one request gave. `now` is the one that is looked at, `run` the one under way.

import { drawStatistics } from "./charts.js";
import { Chat } from "./chat.js";
import { Distribution } from "./distribution.js";
import { byId, element, enable, isOff, mayMove, onPress, reveal, write } from "./elements.js";
import { Figures } from "./figures.js";
import { RequestForm } from "./form.js";
import { Guide } from "./guide.js";
import { fromHealth, fromRace, fromStory } from "./measured.js";
import { drawModel } from "./model.js";
import { phasesOf, Picture } from "./picture.js";
import { Popup } from "./popup.js";
import { Race } from "./race.js";
import { Run } from "./run.js";
import { Story } from "./story.js";
import { getJson } from "./stream.js";
import { TokenText } from "./tokens.js";
import { numAccepted, readCycle, ruleOf } from "./trace.js";
import { WhatIf } from "./whatif.js";
import { counted, milliseconds, short, summary } from "./words.js";

const PICTURE_MS = 1000; // between two pictures while a run streams
const LOADING = "The model is being loaded. The cycle below was recorded earlier.";
const LOADING_MS = 500; // between two questions whether the model is loaded
const SLOW_MS = 700; // of a phase that is shown slowly

const popup = new Popup();
const form = new RequestForm();
const story = new Story();
const race = new Race();
const whatIf = new WhatIf();
const distribution = new Distribution();
const picture = new Picture(byId("picture"), (place) => showPlace(place, true));
const parts = { box: byId("text"), list: byId("tokens"), prompt: byId("prompt-text") };
const text = new TokenText(parts, popup, (cycle, place) => showCycle(cycle.step, place, true));
const choose = (cycle, answer) => {
  now = answer.session;
  showCycle(cycle.step, null, true);
};
const chat = new Chat(popup, (messages, answer) => begin("running", { messages, answer }), choose);
const guide = new Guide(runOnce, (result, step) => {
  const { request, cycles } = result;
  [now, latest.text, isChanged] = [result, result, false];
  form.fill({ verification: "", seed: "", ...request, chat: Boolean(request.chat) });
  text.clear(request.prompt);
  for (const cycle of cycles) text.add(cycle);
  select("text");
  text.flush();
  showAnswer(result);
  showCycle(step);
  writeLink();
});

const fresh = (more) => ({
  request: {}, cycles: [], figures: new Figures(), answer: null, at: -1, text, isRace: false, ...more,
});
let now = fresh();
const latest = { text: now, chat: now }; // sessions, by the view that they are seen in
let run = null; // {stream: a Run, session, ended: called with the session or null}
let mode = "idle"; // idle | running | stepping | racing
let view = "story";
let drawnAt = 0;
let slowly = 0; // a timer
let health = null;
let isLoading = false;
let isChanged = false; // whether the form was, since the last run

// ---------------------------------------------------------------------------------- a run

/** Start what the form asks for, or a conversation; false, with an error shown, if it cannot be sent. */
function begin(wanted, { messages = null, answer = null, ended = () => {} } = {}) {
  showError(null);
  let request;
  try {
    request = form.request(wanted === "racing", messages);
  } catch (error) {
    showError(error);
    return false;
  }
  now = fresh({ request, isRace: wanted === "racing", text: answer?.text ?? text, asAnswer: answer });
  latest[answer ? "chat" : "text"] = now;
  if (answer) answer.session = now;
  else text.clear(request.chat ? `${request.prompt}\n` : request.prompt);
  picture.clear();
  distribution.clear();
  write("cycle-says", "Cycles are drawn here as they come.");
  byId("warnings").replaceChildren();
  write("whole-text", "");
  [drawnAt, isChanged] = [0, false];
  form.open(false);
  if (now.isRace) race.start();
  setMode(wanted);
  run = { session: now, ended, follows: true };
  run.stream = new Run(request, form.key, shown, wanted === "stepping");
  return true;
}

const shown = {
  take(event) {
    const { session } = run;
    if ("plain" in event) return race.add("plain", event.plain);
    if (!("step" in event)) return Object.assign(session, { answer: event });
    const cycle = readCycle(event, session.cycles.at(-1) ?? null);
    session.cycles.push(cycle);
    session.text.add(cycle);
    session.figures.add(cycle);
    return session.isRace && race.add("speculative", event);
  },
  flush() {
    run.session.text.flush();
    run.session.asAnswer?.follow();
    if (mode === "stepping" || performance.now() - drawnAt > PICTURE_MS) drawPictures();
  },
  ended({ state, error }) {
    const { session, ended } = run;
    drawPictures();
    run = null;
    setMode("idle");
    if (state === "failed") showError(error);
    if (state === "finished") showAnswer(session);
    else say(state === "stopped" ? "Stopped." : "Failed.");
    if (session.isRace && state !== "finished") race.stop("The race did not come to its end.");
    session.asAnswer?.finish(state === "finished" ? session.answer : null, session.figures, session.cycles);
    if (state !== "failed") askHealth();
    writeLink();
    ended(state === "finished" ? session : null);
  },
};

function showAnswer({ answer, figures, cycles, isRace }) {
  const { finish_reason: reason, seed, usage, warnings } = answer;
  const passes = counted(figures.passes, "pass", "passes");
  say(`Finished (${reason}): ${counted(usage.completion_tokens, "token")} in ${passes}, `
    + `${short(figures.tokensPerPass)} tokens per pass, seed ${seed}.`);
  write("whole-text", `The whole text: ${answer.text}`);
  byId("warnings").replaceChildren(...warnings.map((words) => element("li", words)));
  if (!isRace) return;
  const tokens = cycles.flatMap((cycle) => [...cycle.tokens, ...cycle.distributions.flat()]);
  const known = new Map(tokens.map((token) => [token.id, token.text]));
  race.finish(answer, (id) => known.get(id) ?? `#${id}`);
  const point = fromRace(answer);
  if (point) whatIf.add([point]);
}

/** An experiment's run: the form is set to `fields` and nothing else, and what it gave comes back. */
function runOnce(fields) {
  if (mode !== "idle" || isLoading) return null;
  form.fill({ temperature: 0, top_p: 1, seed: "", verification: "", chat: false, ...fields });
  return new Promise((resolve) => {
    if (!begin("running", { ended: resolve })) resolve(null);
  });
}

// -------------------------------------------------------------------------------- pictures

function drawPictures() {
  drawnAt = performance.now();
  if (view === "statistics") drawStatistics(now.figures);
  if (!now.cycles.length) return;
  if (!run || run.follows) showCycle(now.cycles.length - 1);
  else showCycle(now.at, now.place);
}

/** Show a cycle of the session that is looked at, and the place in it that says most. */
function showCycle(step, place = null, isAsked = false) {
  clearTimeout(slowly);
  const cycle = now.cycles[step];
  if (!cycle) return;
  now.at = step;
  const [number, last] = [byId("cycle-number"), now.cycles.length - 1];
  number.disabled = false;
  [number.max, number.value] = [last, step];
  const count = `${step} of ${last}${step === 0 ? ", the prefill" : ""}`;
  write("cycle-count", count);
  number.setAttribute("aria-valuetext", `cycle ${count}`);
  const spent = Object.entries(cycle.ms).map(([name, ms]) => `${name} ${milliseconds(ms)}`).join(", ");
  write("cycle-says", `${summary(cycle)} (${spent})`);
  picture.draw(cycle, now.text.kinds);
  showPlace(place ?? Math.min(numAccepted(cycle), cycle.tokens.length - 1));
  now.text.mark(cycle.first, cycle.tokens.length);
  enable("back", step > 0);
  if (!isAsked) return;
  form.open(false);
  if (run) run.follows = step === last;
  reveal(byId("cycle"));
  writeLink();
}

/** Show the two distributions at a place of the cycle. */
function showPlace(place, isAsked = false) {
  now.place = place;
  picture.mark(place);
  distribution.show(now.cycles[now.at], place, now.request);
  if (isAsked) reveal(byId("verdict") ?? byId("picture"));
}

/** Show the cycle that is looked at once more, phase by phase. */
function playSlowly(phase = 0) {
  const phases = now.at < 0 ? [] : phasesOf(now.cycles[now.at]);
  if (!phases.length || !mayMove()) return;
  clearTimeout(slowly);
  picture.show(phase, true);
  write("cycle-says", phases[phase - 1]?.says ?? "Slowly:");
  if (phase === phases.length) return;
  slowly = setTimeout(() => playSlowly(phase + 1), phase ? 3 * SLOW_MS : SLOW_MS);
}

/** Go one cycle back. */
function back() { if (now.at > 0) showCycle(now.at - 1, null, true); }

/** Go one cycle on, and ask for a new one where the last one is shown. */
function onward() {
  if (now.at >= 0 && now.at < now.cycles.length - 1) return showCycle(now.at + 1, null, true);
  const isEnd = now.answer && !isChanged && view !== "story";
  if (mode === "idle" && isEnd) return say("This is the last cycle. Run begins anew.");
  if (mode === "idle") return begin("stepping") && select("text");
  if (mode === "racing") return null;
  if (mode === "running") setMode("stepping");
  run.follows = true;
  return run.stream.step();
}

// -------------------------------------------------------------------- words, views, address

const say = (words) => write("status", words);

/** An error in words, marking the field that it is about and asking for a key where one is due. */
function showError(error) {
  byId("error").replaceChildren(...(error ? [element("p", form.words(error))] : []));
  form.mark(error?.param ?? null);
  if (error?.status === 401) form.askForKey();
  if (error?.isGone) write("server", "The server does not answer.");
}

function setMode(wanted) {
  mode = wanted;
  const isIdle = mode === "idle";
  enable("run", !isLoading && (isIdle || mode === "stepping"));
  enable("step", !isLoading && mode !== "racing");
  enable("back", now.at > 0);
  enable("stop", !isIdle);
  enable("race", !isLoading && isIdle);
  chat.isBusy = isLoading || !isIdle;
  write("run", mode === "stepping" ? "Run on" : "Run");
  byId("text").setAttribute("aria-busy", !isIdle);
  if (!isIdle) say({ running: "Running.", stepping: "Step by step.", racing: "Racing." }[mode]);
}

/** Show one of the views; those of texts share the panel of the cycle. */
function select(wanted) {
  view = wanted;
  for (const tab of byId("tabs").children) {
    const isChosen = tab.dataset.view === wanted;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    byId(`view-${tab.dataset.view}`).hidden = !isChosen;
    if (isChosen && byId("tabs").scrollWidth > byId("tabs").clientWidth) {
      tab.scrollIntoView({ block: "nearest", inline: "center" });
    }
  }
  if (wanted in latest) {
    byId(`view-${wanted}`).append(byId("cycle"));
    if (!now.cycles.length || (now.asAnswer ? "chat" : "text") !== wanted) now = latest[wanted];
    if (now.cycles.length && !run) showCycle(now.at);
  }
  if (wanted !== "story") story.pause();
  redraw();
  const bar = byId("bar").getBoundingClientRect();
  const top = document.querySelector("main").getBoundingClientRect().top - bar.bottom;
  if (top < 0) scrollBy({ top, behavior: "instant" });
}

/** Draw anew what depends on the width of what is shown. */
function redraw() {
  if (view === "statistics") drawStatistics(now.figures);
  if (view === "whatif") whatIf.draw();
  if (view === "story") story.draw();
  distribution.draw();
}

const SENT = [
  "prompt", "chat", "drafter", "num_speculative_tokens", "temperature", "top_p", "verification",
  "max_tokens", "seed",
];

/** Keep the run in the address: its request, its seed, and the cycle that is shown. */
function writeLink() {
  const { request, answer, at } = now;
  if (typeof request.prompt !== "string") return; // a conversation is no single request
  const fields = { ...request, seed: answer?.seed ?? request.seed };
  const parts = SENT.filter((name) => fields[name] !== undefined).map((name) => [name, fields[name]]);
  history.replaceState(null, "", `#${new URLSearchParams([...parts, ["at", at]])}`);
}

/** Run again what the address tells of, and go to its cycle. */
function followLink() {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (!parts.has("prompt") || mode !== "idle") return;
  const names = SENT.filter((name) => parts.has(name));
  const fields = Object.fromEntries(names.map((name) => [name, parts.get(name)]));
  const at = Number(parts.get("at")) || 0;
  form.fill({ verification: "", seed: "", ...fields, chat: fields.chat === "true" });
  select("text");
  begin("running", {
    ended: (session) => session && showCycle(Math.min(at, session.cycles.length - 1), null, true),
  });
}

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isOff("run")) return;
  if (mode === "stepping") {
    setMode("running");
    run.follows = true;
    run.stream.release();
  } else if (begin("running")) {
    select("text");
  }
});
onPress("back", back);
onPress("step", onward);
onPress("stop", () => run.stream.stop());
onPress("race", () => begin("racing") && select("race"));
onPress("slow", () => playSlowly());
onPress("story-try", () => select("try"));
onPress("link", async () => {
  const isCopied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  const where = isCopied ? "is copied" : "stands above";
  const isDrawn = now.cycles.length && ruleOf(now.cycles[0].tokens[0]) === "rejection";
  const doubt = isDrawn ? " By the rule of rejection the text depends on the drafts, too." : "";
  say(`The address of this run ${where}: it holds the request, the seed and the cycle.${doubt}`);
});
byId("cycle-number").addEventListener("input", ({ target }) => showCycle(Number(target.value), null, true));
byId("tabs").addEventListener("click", ({ target }) => target.dataset.view && select(target.dataset.view));
addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const isTaken = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey || event.defaultPrevented;
  if (!by || isTaken || event.target.closest?.("input, select, textarea, pre, [role=listbox]")) return;
  if (event.target.closest?.("[role=tablist]")) {
    const tabs = [...byId("tabs").children].filter((tab) => !tab.hidden);
    const next = tabs.at((tabs.indexOf(event.target) + by) % tabs.length);
    select(next.dataset.view);
    next.focus();
  } else if (view === "story") story.move(by);
  else if (view === "text" || view === "chat") (by < 0 ? back : onward)();
});
byId("request").addEventListener("input", ({ target }) => {
  isChanged = true;
  if (target.matches("[data-wrong], #demo-prompt")) showError(null); // it is being corrected
});
addEventListener("resize", redraw);
addEventListener("hashchange", followLink);

// ------------------------------------------------------------------------------ the server

/** Show what the server says of itself, with 503, too; false and an error shown if nothing. */
async function askHealth() {
  try {
    health = await getJson("health", form.key, [200, 503]);
  } catch (error) {
    showError(error);
    return false;
  }
  isLoading = health.status === "loading";
  byId("server").classList.toggle("loading", isLoading);
  if (mode === "idle") setMode("idle");
  if (isLoading) {
    const seconds = Math.round(health.elapsed_s);
    write("server", `The server loads ${health.model}: ${health.stage} (${seconds} s).`);
    say(LOADING);
    setTimeout(load, LOADING_MS);
    return false;
  }
  const state = health.status === "ok" ? "" : ` (${health.status})`;
  write("server", `Target: ${health.model}${state}. Drafters: ${health.drafters.join(", ")}.`);
  form.offerDrafters(health);
  guide.drafters = health.drafters;
  document.querySelector("[data-view=chat]").hidden = !health.chat_template;
  whatIf.add(fromHealth(health));
  return true;
}

let told = null; // the story that is told

/** Tell the recorded story, or the stored one while a model is being loaded. */
async function tellStory() {
  const recorded = await getJson("page/story.json", "");
  if (told?.model !== recorded.model || told.stored !== recorded.stored) story.tell(recorded);
  told = recorded;
}

async function load() {
  try {
    if (!told) await tellStory();
    if (!await askHealth()) return;
    if (told.stored) await tellStory();
    if (byId("status").textContent === LOADING) say("Ready.");
    form.offerPrompts((await getJson("prompts", form.key)).prompts);
    drawModel(health, told.stored ? null : told);
    if (!told.stored) whatIf.add(fromStory(told));
    followLink();
  } catch (error) {
    showError(error);
  }
}

byId("key").addEventListener("change", () => {
  showError(null);
  load();
});
setMode("idle");
select("story");
load();
