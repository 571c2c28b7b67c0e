// Shows what the engine does: current figures, plots of the last minutes, and the attention plan.

import { call } from "../api.js";
import { element } from "../parts/dom.js";
import { drawPlot } from "./plot.js";

const PERIOD_MS = 1000;
const MAX_SAMPLES = 600;

let samples = [];
let timer = 0;
let isPlanShown = false;

const rate = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)}k` : value.toFixed(value < 10 && value % 1 ? 1 : 0));
const percent = (value) => `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
const whole = (value) => (Number.isInteger(value) ? String(value) : "");

// Output and prompt have their own plots, since prompts are read many times faster than answers are written.
function plots() {
  const groups = Object.keys(samples.at(-1)?.kv_groups ?? {});
  const specs = [
    { title: "Output tokens per second", text: rate, lines: [["output", (s) => s.output_tokens_per_s]] },
    { title: "Prompt tokens per second", text: rate, hue: 1, lines: [["prompt", (s) => s.prompt_tokens_per_s]] },
    { title: "Time to first token, ms", text: rate, hue: 3, isSparse: true, lines: [["median", (s) => s.ttft_ms]] },
    { title: "Requests", text: whole, lines: [["running", (s) => s.running], ["waiting", (s) => s.waiting]] },
    {
      title: "KV cache in use",
      text: percent,
      top: 1,
      lines: [...groups.map((name) => [name, (s) => s.kv_groups[name]]), ["reusable", (s) => s.kv_reusable]],
    },
  ];
  if (samples.some((s) => (s.tokens_per_verify ?? null) !== null)) {
    const text = (value) => value.toFixed(2);
    specs.push({ title: "Tokens per verify", text, hue: 2, isSparse: true, lines: [["mean", (s) => s.tokens_per_verify]] });
  }
  return specs;
}

function figure(value, name) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value));
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function draw(latest) {
  document.getElementById("figures").replaceChildren(
    figure(rate(samples.at(-1).output_tokens_per_s), "tokens/s now"),
    figure(latest.totals.requests.toLocaleString(), "requests"),
    figure(latest.totals.output_tokens.toLocaleString(), "output tokens"),
    figure(percent(latest.totals.prefix_hit_share), "prompt reuse"),
    figure(latest.totals.preemptions.toLocaleString(), "preemptions"),
    figure(duration(latest.uptime_s), "uptime"),
  );
  const container = document.getElementById("plots");
  const wanted = plots();
  while (container.childElementCount < wanted.length) container.append(element("figure", { className: "plot" }));
  while (container.childElementCount > wanted.length) container.lastElementChild.remove();
  wanted.forEach((spec, index) => drawPlot(container.children[index], samples, spec));
}

async function showPlan() {
  const picture = await call("plan.svg");
  document.getElementById("plan-picture").src = URL.createObjectURL(await picture.blob());
  document.getElementById("plan").hidden = false;
  isPlanShown = true;
}

async function refresh(onError) {
  try {
    const since = samples.at(-1)?.time ?? 0;
    const latest = await (await call(`samples?since=${since}`)).json();
    const known = since && latest.samples.length && latest.samples[0].time < since ? [] : samples; // the server was restarted
    samples = [...known, ...latest.samples].slice(-MAX_SAMPLES);
    if (samples.length) draw(latest);
    if (latest.has_plan && !isPlanShown) await showPlan();
  } catch (error) {
    onError(error);
  }
}

export function startPlots(onError) {
  if (timer) return;
  refresh(onError);
  timer = setInterval(() => document.visibilityState === "visible" && refresh(onError), PERIOD_MS);
}

export function stopPlots() {
  clearInterval(timer);
  timer = 0;
}
