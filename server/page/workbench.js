// The workbench: one request at a time, with all that can be seen of it.
//
//   form → begin → Run ──cycles──→ session {cycles, figures, text} → the cycle, the charts
//                   └──plain────→ race       answer → verdict, the address
//
// A session is what one request gave. `now` is the one that is looked at, `run` the one under way.

import { drawStatistics } from "./charts.js";
import { Distribution } from "./distribution.js";
import { byId, element, enable, isNarrow, isOff, onPress, reveal, write } from "./elements.js";
import { RequestForm, settingsWords } from "./form.js";
import { Picture } from "./picture.js";
import { Race } from "./race.js";
import { Run } from "./run.js";
import { getJson, isRecorded, isUnrecorded, recordedRun, recording, unrecorded } from "./stream.js";
import texts from "./texts.json" with { type: "json" };
import { TokenText } from "./tokens.js";
import { figuresOf, numAccepted, readCycle, tellingCycle, tokensIn } from "./trace.js";
import { pace, summary } from "./words.js";

const PICTURE_MS = 1000; // between two pictures while a run streams
const LOADING_MS = 500; // between two questions whether the model is loaded
const SEEN_WELL = 7; // drafted tokens, where nobody asks for more
const [LOADING, SILENT] = ["The model is being loaded.", "The server does not answer."];

const [form, race, distribution] = [new RequestForm(), new Race(), new Distribution()];
const picture = new Picture(byId("picture"), (place) => showPlace(place, true));
const text = new TokenText(byId("text"), (cycle, place) => showCycle(cycle.step, place, true));
const fresh = (more) => ({ request: {}, cycles: [], names: new Map(), answer: null, at: -1, ...more });
let now = fresh();
let run = null; // {stream: a Run, session, ended: called with the session or null, follows}
let mode = "idle"; // idle | running | stepping | racing
let drawnAt = 0; // when pictures were drawn last
let health = null;
let [isLoading, isOpening] = [false, true]; // the model; the page, until it has what it needs

const say = (words) => write("status", words);

// ---------------------------------------------------------------------------------- a run

/** Start what the form asks for; false, with an error shown, if it cannot be sent. */
function begin(wanted, ended = () => {}) {
  showError(null);
  const session = fresh({ isAsked: !isOpening });
  try {
    session.request = form.request(wanted === "racing");
    if (isUnrecorded(session.request)) throw unrecorded(); // what is shown stays
    if (isRecorded) Object.assign(session.request, recordedRun(session.request)?.request);
  } catch (error) { showError(error); return false; }
  const { request } = session;
  text.clear(request.prompt + (request.chat ? "\n" : ""));
  look(session);
  race.begin(JSON.stringify({ ...request, compare: undefined }), request.compare);
  const seen = byId(request.compare ? "racing" : "cycle");
  if (session.isAsked && isNarrow()) seen.scrollIntoView(); // below the text, which sticks to the top
  else if (session.isAsked) [byId("reading"), seen].forEach(reveal);
  if (byId("server").textContent === SILENT) askHealth().catch(showError); // it may be back
  setMode(wanted);
  run = { session, ended, follows: true };
  run.stream = new Run(request, form.key, shown, wanted === "stepping");
  return true;
}

/** Look at a session, which may have no cycle yet: whatever was drawn of another one goes. */
function look(session) {
  [now, drawnAt] = [session, 0];
  Object.assign(byId("cycle-number"), { disabled: true, max: 0, value: 0 });
  for (const id of ["cycle-count", "cycle-settings", "whole-text", "notes"]) write(id, "");
  write("cycle-says", texts.says.cycle);
  byId("cycle").style.minHeight = `${byId("cycle").offsetHeight}px`; // until a cycle is there again
  picture.clear();
  distribution.clear();
  drawStatistics(session);
}

const nameOf = (session, id) => session.names.get(id) ?? `#${id}`;
const shown = {
  take(event) {
    const { session } = run;
    if ("plain" in event) {
      const tokens = event.plain.tokens.map(({ id }) => ({ kind: "plain", text: nameOf(session, id) }));
      return race.add("plain", { ...event.plain, tokens });
    }
    if (!("step" in event)) return Object.assign(session, { answer: event });
    const cycle = readCycle(event, session.cycles.at(-1) ?? null);
    session.cycles.push(cycle);
    for (const one of [cycle.tokens, ...cycle.distributions].flat()) session.names.set(one.id, one.text);
    text.add(cycle);
    return session.request.compare && race.add("speculative", cycle);
  },
  flush() {
    text.flush();
    if (mode === "stepping" || performance.now() - drawnAt > (isRecorded ? 0 : PICTURE_MS)) drawPictures();
  },
  ended({ state, error }) {
    const [{ session, ended }, isFinished] = [run, state === "finished"];
    const isEnd = isFinished && mode !== "stepping";
    setMode("idle");
    if (state === "failed") showError(error); // which takes room of the text
    drawPictures(isEnd);
    run = null;
    if (isFinished) showAnswer(session);
    else say(state === "stopped" ? "Stopped." : "Failed.");
    if (session.request.compare && !isFinished) race.breakOff();
    if (state !== "failed" && !isRecorded) askHealth().catch(showError); // a recording stays as it was
    if (session.isAsked) writeLink();
    ended(isFinished ? session : null);
  },
};

function showAnswer(session) {
  const { answer, cycles, request } = session;
  say(`Finished (${answer.finish_reason}): ${pace(figuresOf(cycles))}, seed ${answer.seed}.`);
  write("whole-text", `The whole text: ${answer.text}`);
  const isDrawn = tokensIn(cycles).some(({ u }) => u !== undefined); // by rejection
  const more = !isDrawn && cycles.some(({ drafter }) => drafter === "suffix") ? [texts.says.remembers] : [];
  byId("notes").replaceChildren(...[...answer.warnings, ...more].map((words) => element("li", words)));
  if (request.compare) race.finish(answer, (id) => nameOf(session, id));
}

// -------------------------------------------------------------------------------- pictures

/** Draw what has come; at the end of a run the cycle that tells most, unless the reader chose one. */
function drawPictures(isEnd = false) {
  drawnAt = performance.now();
  if (run.session !== now) return;
  drawStatistics(now);
  const step = isEnd ? now.cycles.indexOf(tellingCycle(now.cycles)) : now.cycles.length - 1;
  showCycle(...run.follows ? [step, null, false, isEnd] : [now.at, now.place]);
}

/** Show a cycle of the session that is looked at, and the place in it that says most. */
function showCycle(step, place = null, isAsked = false, isTelling = false) {
  const [cycle, last, number] = [now.cycles[step], now.cycles.length - 1, byId("cycle-number")];
  if (!cycle) return;
  now.at = step;
  const count = `${step} of ${last}${step === 0 ? ", the prefill" : ""}`;
  Object.assign(number, { disabled: false, max: last, value: step, ariaValueText: `cycle ${count}` });
  write("cycle-count", count);
  write("cycle-says", summary(cycle, now.request, isTelling ? last : 0));
  tellSettings();
  picture.draw(cycle, now.cycles);
  text.mark(cycle.first, cycle.tokens.length, isAsked || isTelling || mode !== "running");
  showPlace(place ?? Math.min(numAccepted(cycle), cycle.tokens.length - 1), isAsked);
  byId("cycle").style.minHeight = "";
  enable("back", step > 0);
  if (!isAsked) return;
  if (run) run.follows = step === last;
  writeLink();
}

function showPlace(place, isAsked = false) {
  now.place = place;
  picture.mark(place);
  distribution.show(now.cycles[now.at], place);
  if (isAsked) for (const id of ["cycle", "verdict"]) if (byId(id)) reveal(byId(id));
}

const back = () => now.at > 0 && showCycle(now.at - 1, null, true);
/** Go one cycle on. Behind the last one ask for a new one, or begin a new run, which no arrow key does. */
function onward(isKey = false) {
  if (now.at >= 0 && now.at < now.cycles.length - 1) return showCycle(now.at + 1, null, true);
  if (mode === "idle") {
    const { answer } = now; // of a run whose prefill has been seen
    if (isKey) return answer ? say("This is the last cycle. Step or Run begins anew.") : null;
    return begin("stepping") && answer && run.stream.step();
  }
  if (mode === "racing") return null;
  if (mode === "running") setMode("stepping");
  run.follows = true;
  return run.stream.step();
}

// ----------------------------------------------------------------------- the form, the address

/** An error in words, marking the field that it is about and asking for a key where one is due. */
function showError(error) {
  byId("error").replaceChildren(...(error ? [element("p.error", form.words(error))] : []));
  form.mark(error?.param ?? null);
  if (error?.status === 401) form.askForKey();
  if (error?.isGone) write("server", SILENT);
}

/** Say what the run had where the form has something else by now. */
function tellSettings() {
  const had = `${now.request.drafter}, ${settingsWords(now.request)}`;
  const isOther = now.cycles.length && had !== `${byId("drafter").value}, ${form.settings}`;
  write("cycle-settings", isOther ? `This run had other settings than the form has now: ${had}.` : "");
}

function setMode(wanted) {
  mode = wanted;
  const [isIdle, isStepping] = [mode === "idle", mode === "stepping"];
  const isReady = !isLoading && !(isOpening && isRecorded); // a recording’s requests are still to come
  enable("run", isReady && (isIdle || isStepping));
  enable("step", isReady && mode !== "racing");
  enable("back", now.at > 0);
  enable("stop", !isIdle);
  enable("race", isReady && isIdle);
  write("run", isStepping ? "Run on" : "Run");
  byId("text").setAttribute("aria-busy", !isIdle);
  if (!isIdle) say({ running: "Running.", stepping: "Step by step.", racing: "Racing." }[mode]);
}

/** Keep the run in the address: its request, its seed, and the cycle that is shown. */
function writeLink() {
  const { request, answer, at } = now;
  const fields = new URLSearchParams({ ...request, seed: answer?.seed ?? request.seed ?? "", at });
  for (const name of ["stream", "trace", "compare", "fixed_k"]) fields.delete(name);
  history.replaceState(null, "", `#${fields}`);
}

/** Run again what the address tells of, and go to its cycle, or open the part that it names. */
function followLink() {
  const fold = byId(location.hash.slice(1))?.closest("details");
  if (fold) fold.open = true;
  fold?.scrollIntoView();
  const fields = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if ("prompt" in fields) runAgain({ ...fields, chat: fields.chat === "true" }, true);
}

function runAgain({ at, ...fields }, isStrict = false) {
  if (mode !== "idle") run.ended = () => runAgain({ at, ...fields }, isStrict);
  if (mode !== "idle") return run.stream.stop();
  const before = form.settings;
  byId("workbench").scrollIntoView();
  form.fill({ isWhole: true, ...fields });
  byId("more").open ||= form.settings !== before; // one should see what is not as usual
  const param = ["drafter", "verification"].find((name) => fields[name] && byId(name).value !== fields[name]);
  if (param) byId(param).selectedIndex = 0;
  if (param && isStrict) return showError({ message: `“${fields[param]}” is not offered here.`, param });
  begin("running", (session) => (
    session && at && showCycle(Math.min(Number(at) || 0, session.cycles.length - 1), null, true)));
}

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isOff("run")) return;
  if (mode !== "stepping") return begin("running");
  setMode("running");
  run.follows = true;
  run.stream.release();
});
onPress("back", back);
onPress("step", onward);
onPress("stop", () => run.stream.stop());
onPress("race", () => begin("racing"));
byId("cycle-number").addEventListener("input", ({ target }) => showCycle(Number(target.value), null, true));
addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const isTaken = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey || event.defaultPrevented;
  if (!by || isTaken || !event.target.closest?.("#reading, #cycle")) return;
  if (!event.target.closest("input, select, textarea, pre, [role=listbox]")) (by < 0 ? back : onward)(true);
});
byId("request").addEventListener("input", ({ target }) => {
  tellSettings();
  if (target.matches("[aria-invalid=true], #demo-prompt")) showError(null); // it is being corrected
});
byId("request").addEventListener("change", ({ target }) => {
  if (!isRecorded || !target.matches("#demo-prompt, #drafter")) return;
  const [prompt, drafter, verification] = ["prompt", "drafter", "verification"].map((id) => byId(id).value);
  const asked = { prompt, drafter, verification, temperature: Number(byId("temperature").value) };
  if (isUnrecorded(asked)) form.fill({ temperature: 0, drafter }); // another one may not be recorded
  if (!run) return begin("running"); // it is there already
  run.ended = () => begin("running");
  run.stream.stop();
});
addEventListener("hashchange", followLink);
addEventListener("try", ({ detail }) => runAgain(detail));

// ------------------------------------------------------------------------------ the server

/** Show what the server says of itself, with 503, too; whether it is ready. Raises ServerError. */
async function askHealth() {
  health = await getJson("health", form.key, [200, 503]);
  isLoading = health.status === "loading";
  if (mode === "idle") setMode("idle");
  if (isLoading) {
    write("server", `The server loads ${health.model}: ${health.stage} (${Math.round(health.elapsed_s)} s).`);
    say(LOADING);
    setTimeout(load, LOADING_MS);
    return false;
  }
  const warnings = [health.status !== "ok" && `the server is ${health.status}`, ...health.warnings ?? []];
  write("server", [`${health.model} runs here`, ...warnings.filter(Boolean)].join("; "));
  const drafters = health.drafters.filter((name) => name !== "prediction"); // which needs a field of its own
  const drafter = drafters.find((name) => name === health.drafter) ?? "none";
  const k = Math.min(health.num_speculative_tokens, SEEN_WELL);
  if (isRecorded) offerRecorded(await recording);
  else form.offer(health, [...drafters, "none"], { ...health, drafter, num_speculative_tokens: k });
  if (!isRecorded) learnCurve();
  return true;
}

/** Ask what passes take here; a server that measures none says so with 404. */
async function learnCurve() {
  const curve = await getJson("curve", form.key).catch(() => null);
  if (curve) dispatchEvent(new CustomEvent("curve", { detail: { curve, health } }));
}

/** Offer what was recorded, where no server of ours sends the page. */
function offerRecorded({ runs, model, recorded_at: day, machine }) {
  const requests = runs.map(({ request }) => request);
  const first = requests.find(({ drafter }) => drafter === "draft_model") ?? requests[0];
  const drafters = [...new Set(requests.map(({ drafter }) => drafter))];
  form.offer(health, drafters, first);
  const sampled = runs.filter(({ request }) => request.temperature);
  byId("drafter").append(...sampled.map(({ request: { drafter: value, verification } }) => (
    element("option", { value }, `sampled, ${verification}`))));
  byId("drafter").addEventListener("change", ({ target: { selectedIndex } }) => {
    const run = sampled[selectedIndex - drafters.length];
    const { temperature, verification } = run?.request ?? first;
    form.fill({ temperature, verification, demo: run?.prompt }); // a prompt that was sampled
  });
  for (const field of document.querySelectorAll(".settings > :is(label, span)")) field.hidden = true;
  Object.assign(byId("demo-prompt").options[0], { disabled: true, text: "your own text: not recorded" });
  byId("recorded-settings").hidden = false;
  byId("prompt").readOnly = true;
  const here = "engine" in document.documentElement.dataset
    ? "the engine that runs here has no cycles to show" : "no server runs here";
  write("server", `Recorded on ${day} with ${model} on ${machine}; ${here}.`);
}

async function load() {
  try {
    showError(null);
    if (!await askHealth()) return;
    if ([LOADING, "Failed."].includes(byId("status").textContent)) say("Ready.");
    form.offerPrompts((await getJson("prompts", form.key)).prompts);
    if (isOpening) followLink(); // later the address tells of a run that was made here
    const isFree = mode === "idle" && !byId("error").hasChildNodes();
    if (isOpening && isRecorded && isFree) begin("running"); // there is something to look at
    isOpening = false;
    if (mode === "idle") setMode("idle");
  } catch (error) {
    if (!health) ["server", "status"].forEach((id) => write(id, "Nothing is loaded."));
    showError(error);
  }
}

byId("key").addEventListener("change", load);
text.clear("Press Run or Step: the text appears here.");
look(now);
setMode("idle");
load();
