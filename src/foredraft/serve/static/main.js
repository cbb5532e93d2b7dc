// The page: one form, two runs of the same request and seed, and what they show.
import { ApiError, capabilities, rate, stream } from "./api.js";
import * as charts from "./charts.js";
import { Detail } from "./detail.js";
import { byId, make } from "./dom.js";
import { Form } from "./form.js";
import { ORIGINS } from "./origins.js";
import { Run, difference } from "./run.js";
import { Ratios } from "./ratios.js";
import { TokensView } from "./tokens.js";

const SIDES = ["left", "right"];
const RETRY_MS = 1000;  // between two looks whether the model is loaded
const TURNS = 5;        // of both sides that count
const SECONDS = 2;      // that one of them takes at most, and at least so many tokens
const LEAST = 16;
const detail = new Detail();
const form = new Form();
const views = SIDES.map((side) => new TokensView(byId(`text-${side}`), detail));
let model = null;
let runs = [];
let aborter = null;   // of the runs in progress
let shared = false;   // the runs shared the machine
let ratios = null;    // of the runs that count, in turns
let drawing = 0;

const say = (text) => { byId("status").textContent = text; };

function showError(error) {
  byId("error").textContent = error ? error.message : "";
  byId("error").hidden = !error;
  if (error?.status === 401) {
    byId("key-field").hidden = false;
    byId("key").focus();
  }
}

async function begin() {
  byId("run").disabled = true;
  try {
    const found = await capabilities(form.key);
    model = found.model;
    byId("model").textContent = `${model} · up to ${found.max_model_len} tokens · policy ${found.policy}`;
    form.adapt(found);
    showError(null);
    byId("run").disabled = false;
    say(found.default_drafter || Object.keys(found.drafters).length ? "Ready." : "Ready. The server was started without a drafter.");
  } catch (error) {
    if (error.status === 503 || error.status === 0) {
      say(`Waiting: ${error.message.replace(/\.$/, "")}.`);
      setTimeout(begin, RETRY_MS);
    } else {
      say("");
      showError(error);
    }
  }
}

const name = (run) => run.drafter === "none" ? "plain" : run.drafter;

// "auto by lookup and layer-skip": which drafters a choice of the server's came to.
function named(run) {
  const used = Object.keys(run.metrics?.speculative_decoding?.drafters ?? {}).filter((each) => each !== run.drafter);
  return name(run) + (used.length ? ` by ${used.join(" and ")}` : "");
}

function showFigures() {
  const rates = runs.map((run) => run.rate);
  const most = Math.max(...rates, 1e-9);
  byId("rates").replaceChildren(...runs.map((run, i) => {
    const row = make("div", SIDES[i]);
    const meter = make("dd", "meter");
    const bar = make("i");
    bar.style.width = `${100 * rates[i] / most}%`;
    meter.append(bar);
    row.append(make("dt", "", name(run)), meter, make("dd", "", rates[i] ? `${rates[i].toFixed(1)} tokens/s` : "–"));
    return row;
  }));
  SIDES.forEach((side, i) => { byId(`title-${side}`).textContent = runs[i].last ? named(runs[i]) : name(runs[i]); });
  const once = rates[0] && rates[1] ? `${(rates[1] / rates[0]).toFixed(2)}×` : "–";
  byId("speedup").textContent = shared ? once : ratios.figure;
  byId("speedup-note").textContent = shared ? "speed-up, while both shared the machine" : ratios.note;
}

function showVerdict() {
  const [one, other] = runs;
  const at = difference(one, other);
  const whole = one.last && other.last && one.tokens.length === other.tokens.length;
  const same = at < 0 && (!whole || one.text === other.text);
  const node = byId("verdict");
  node.className = !same ? "verdict bad" : whole ? "verdict good" : "verdict";
  const drafting = other.metrics?.speculative_decoding;
  const tau = drafting?.mean_acceptance_length ? ` · ${drafting.mean_acceptance_length.toFixed(2)} tokens per round on the right` : "";
  if (!same) node.textContent = `The texts differ${at < 0 ? "" : ` from token ${at + 1} on`}.${why()}`;
  else if (whole) node.textContent = `✓ Both texts are identical, ${one.tokens.length === 1 ? "one token" : `all ${one.tokens.length} tokens`}${tau}`;
  else node.textContent = other.tokens.length ? "Identical so far." : "";
}

function why() {
  const lasts = runs.map((run) => run.last ?? {});
  if (lasts.some((last) => last.lossless === false)) return " One of the runs is not lossless.";
  if (lasts.some((last) => last.deterministic === false)) return " This server is not deterministic.";
  return "";
}

function show() {
  drawing = 0;
  views.forEach((view, i) => runs[i] && view.update());
  showFigures();
  showVerdict();
  charts.race(byId("chart-race"), runs);
  charts.positions(byId("chart-positions"), runs[1]);
  charts.rounds(byId("chart-rounds"), runs[1]);
}

const showSoon = () => { drawing ||= requestAnimationFrame(show); };

async function follow(index, request, signal) {
  const run = runs[index];
  run.started = performance.now();
  for await (const chunk of stream({ ...request, drafter: run.drafter }, form.key, signal)) {
    run.take(chunk, performance.now());
    showSoon();
  }
}

// Run both sides in turns, short, untraced, and after a run of each that warmed the server up.
async function measure(request, signal) {
  const slower = Math.min(...runs.map((run) => run.rate));
  const tokens = Math.min(request.max_tokens ?? Infinity, Math.max(LEAST, Math.ceil(SECONDS * slower)));
  for (let turn = 0; turn < TURNS; turn++) {
    say(`Both run in turns, ${turn + 1} of ${TURNS}, to measure the speed-up…`);
    const rates = [];
    for (const i of turn % 2 ? [1, 0] : [0, 1]) {
      rates[i] = await rate({ ...request, max_tokens: tokens, drafter: runs[i].drafter }, form.key, signal);
    }
    ratios.add(rates[1] / rates[0]);
    showSoon();
  }
}

async function start() {
  if (aborter || byId("run").disabled) return;
  aborter = new AbortController();
  const { signal } = aborter;
  shared = form.together;
  ratios = new Ratios();
  runs = form.drafters.map((drafter) => new Run(drafter, performance.now()));
  views.forEach((view, i) => view.begin(runs[i]));
  detail.hide();
  showError(null);
  byId("hero").hidden = false;
  byId("run").disabled = true;
  byId("stop-button").disabled = false;
  const request = form.request(model);
  try {
    if (shared) {
      say("Both run…");
      await Promise.all(SIDES.map((_, i) => follow(i, request, signal)));
    } else {
      for (const i of [0, 1]) {
        say(`The ${SIDES[i]} one runs: ${name(runs[i])}…`);
        await follow(i, request, signal);
      }
    }
    form.answered(runs[1].text);
    if (!shared && runs.every((run) => run.tokens.length > 1)) await measure(request, signal);
    ratios.end();
    show();
    say(`Done. Speed-up: ${byId("speedup").textContent}; ${byId("verdict").textContent}`);
  } catch (error) {
    aborter.abort();  // the other side, too
    if (error.name === "AbortError") say("Stopped.");
    else {
      say("");
      showError(error instanceof ApiError ? error : new ApiError(0, `The page failed: ${error.message}`));
    }
  } finally {
    aborter = null;
    ratios.end();
    byId("run").disabled = false;
    byId("stop-button").disabled = true;
    showSoon();
  }
}

const stop = () => aborter?.abort();

byId("form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
byId("stop-button").addEventListener("click", stop);
byId("use-key").addEventListener("click", begin);
byId("key").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); begin(); } });
byId("rejects").addEventListener("change", ({ target }) => {
  SIDES.forEach((side) => byId(`text-${side}`).classList.toggle("rejects", target.checked));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); byId("form").requestSubmit(); }
  if (event.key === "Escape") { if (aborter) stop(); else detail.hide(); }
});
new ResizeObserver(() => runs.length && showSoon()).observe(byId("results"));
byId("legend").append(...Object.entries(ORIGINS).map(([kind, meaning]) => {
  const item = make("li");
  item.append(make("span", `t ${kind}`, kind), ` ${meaning}`);
  return item;
}));
begin();
